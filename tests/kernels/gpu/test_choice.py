"""Rows that choose their pages on the card: bounds and worth as the CPU's, and passes that choose as it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.kernels.decoders import TinyModel, tiny_model
from tests.kernels.gpu.cases import aligned
from tests.kernels.gpu.models import CPU, aligned_arena, on_card
from tierd.daemon.engine.batch import Rows, build
from tierd.daemon.engine.runner import Runner
from tierd.daemon.engine.selection import Lesson, Pick, Selection
from tierd.kernels import reference
from tierd.kernels.cpu.selection import PageBounds
from tierd.kernels.gpu.choice import CardBounds
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Bound

PAGE = 16
SMALL = {"heads": 2, "kv_heads": 1, "head_dim": 16, "hidden": 64, "intermediate": 64, "vocab": 40}
PROMPT, READ = 118, 4  # tokens, pages


@pytest.mark.parametrize("page_format", ["fp32", "bf16", "fp8", "k4v4"])
def test_pages_are_worth_what_the_cpu_says(page_format: str) -> None:
    layout = PageLayout(2, 2, 32, page_format)
    draw = torch.Generator().manual_seed(1)
    arena = aligned(9 * layout.record_bytes, torch.uint8).view(9, layout.record_bytes)
    pages = arena.data_ptr() + np.arange(9) * layout.record_bytes
    for page in range(9):
        for layer in range(2):
            reference.put_tokens(arena[page], layout, layer, *torch.randn((2, 2, PAGE, 32), generator=draw), 0)
    ours, theirs = CardBounds(layout, CPU), PageBounds(layout, 6)
    for bounds in (ours, theirs):
        bounds.learn(1, 0, pages[:8])
        bounds.learn(1, 8, pages[8:].copy())
    query = torch.randn((6, 32), generator=draw)
    scaled = reference.turned(query.double(), layout.rotation) if layout.packed else query
    wanted = theirs.worth(1, (scaled * 32**-0.5).float().numpy(), 1, 7)
    worth = ours.worth(1, query, 1, 7)
    np.testing.assert_allclose(worth, wanted, rtol=1e-4, atol=1e-5)
    table = ours.there(pages)
    best = sorted(1 + np.argsort(-wanted, kind="stable")[:3])
    assert ours.picked(1, query, table, 1, 7, 6).tolist() == pages[[0, *best, 7, 8]].tolist()


class Lives:
    """A prompt, and rows after it that choose, over a decoder of either backend."""

    def __init__(self, model: TinyModel, decoder: Any, selection: Selection) -> None:
        self.arena = aligned_arena(model, 10)
        self.pages = self.arena.ctypes.data + np.random.default_rng(0).permutation(10) * self.arena.shape[1]
        self.tokens = np.random.default_rng(1).integers(0, model.shape.vocab, 140).tolist()
        self.runner = Runner(decoder, model.layout, [self.arena])
        self.selection = selection

    def prompt(self) -> NDArray[np.float32]:
        for start, end in ((0, 60), (60, PROMPT)):
            wanted = [(0, Lesson(self.selection, PROMPT // PAGE))] if end == PROMPT else []
            logits = self.runner.run(build([Rows(self.tokens[start:end], start, self.pages, 1)], PAGE), wanted=wanted)
        return logits

    def random_prompt(self, layout: PageLayout) -> None:
        """In place of one that is computed."""
        draw = torch.Generator().manual_seed(2)
        shape = (2, layout.kv_heads, PAGE, layout.head_dim)
        for page in self.pages[: PROMPT // PAGE + 1].tolist():
            record = torch.from_numpy(self.arena[(page - self.arena.ctypes.data) // self.arena.shape[1]])
            for layer in range(layout.num_layers):
                reference.put_tokens(record, layout, layer, *torch.randn(shape, generator=draw), 0)
        for layer in range(layout.num_layers):
            self.selection.bounds.learn(layer, 0, self.pages[: PROMPT // PAGE])

    def row(self, position: int, **how: Any) -> NDArray[np.float32]:
        """Beside a chunk of somebody else, before it."""
        count = position // PAGE + 1
        pick = Pick(self.selection, self.pages[:count], lambda _: b"", (position + 1) % PAGE == 0)
        given = np.full(READ, self.pages[count - 1])
        mine = Rows(self.tokens[position : position + 1], position, given, 1, Bound(base=(count - READ) * PAGE))
        other = Rows([1, 2, 3], 0, self.pages[-1:], 0)
        return self.runner.run(build([other, mine], PAGE), wanted=[(1, pick)], **how)


def life(model: TinyModel) -> Lives:
    bounds = CardBounds(model.layout, CPU)
    return Lives(model, on_card(model), Selection(bounds, model.shape.windows, bounds))


@pytest.mark.long
def test_rows_choose_as_on_the_cpu_and_learn_what_they_fill() -> None:
    model = tiny_model(windows=(0, 40), **SMALL)
    with model.decoder() as decoder:
        bounds = PageBounds(model.layout, model.shape.heads)
        ours, theirs = life(model), Lives(model, decoder, Selection(bounds, model.shape.windows))
        np.testing.assert_allclose(ours.prompt(), theirs.prompt(), rtol=1e-4, atol=1e-4)
        for position in range(PROMPT, PROMPT + 12):
            np.testing.assert_allclose(ours.row(position), theirs.row(position), rtol=1e-4, atol=1e-4)


def test_a_host_that_is_asked_says_the_same() -> None:
    model = tiny_model(page_format="k8v8", **{**SMALL, "head_dim": 32})
    one, other = life(model), life(model)
    for live in (one, other):
        live.random_prompt(model.layout)
    for position in range(PROMPT, PROMPT + 2):
        # What may give way goes layer by layer.
        found = one.row(position), other.row(position, gives_way=lambda: False)
        assert np.array_equal(*found) and np.array_equal(one.arena, other.arena)


def test_pages_that_may_be_chosen_lie_in_the_memories() -> None:
    model = tiny_model(windows=(0,), **SMALL)
    ours = life(model)
    ours.random_prompt(model.layout)
    ours.pages[2] += ours.arena.nbytes
    with pytest.raises(ValueError, match="page 2: .* do not lie, aligned to 64"):
        ours.row(PROMPT)

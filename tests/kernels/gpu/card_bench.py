"""A tiny model whose weights lie on a card made of CPU memory, and passes over them without an engine."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.gpu.cards import Memory
from tests.kernels.gpu.cases import aligned
from tests.tiers.fake_gpu import FakeGpu
from tests.tiers.faults import GatedDisk
from tierd.daemon.engine.batch import Batch
from tierd.daemon.engine.model import rope
from tierd.daemon.engine.model.card_memory import Card
from tierd.daemon.engine.model.weights_card import CardWeights
from tierd.daemon.engine.model.weights_status import NotMoved
from tierd.daemon.engine.runner import Runner
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.models.placement_card import place_on_card
from tierd.kernels.gpu.decoder import GpuDecoder
from tierd.kernels.layout import PageLayout
from tierd.tiers.errors import WeightsLost
from tierd.tiers.mover import Disturbance, Mover


class Bench:
    """Passes over weights of a card, without an engine around them."""

    def __init__(
        self, model: Path, device_bytes: int | None, host_bytes: int | None, seed: int = 5, threads: int = 0
    ) -> None:
        self.disk = GatedDisk()
        self.gpu, self.memory = FakeGpu(seed), Memory()
        self.manifest = load_manifest(model)
        spec = self.manifest.spec
        self.mover = Mover(3, before=Disturbance(seed, 0.001))
        card = Card(self.gpu, self.gpu.new_stream(), torch.device("cpu"), torch.bfloat16, None, self.memory)
        self.weights = CardWeights(
            model, self.manifest, device_bytes, host_bytes, card, self.mover, lambda _done, _total: None,
            threads=threads, io=self.disk.as_io(),
        )  # fmt: skip
        layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, "bf16")
        tables = rope.tables(rope.frequencies(spec, 16), 16)
        self.decoder = GpuDecoder(
            self.weights.shape, self.weights.layers, self.weights.ends, layout, *tables, 8, torch.bfloat16,
            embed_rows=self.weights.embed_rows if self.weights.ends.embed is None else None,
        )  # fmt: skip
        self.weights.attach(self.decoder)
        self.weights.begin_computing()
        self.page = aligned(layout.record_bytes, torch.uint8).numpy()
        self.runner = Runner(self.decoder, layout, [self.page], weights=self.weights)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.weights.close()
        self.mover.close()
        # A real card has copies; this one, whose memory is the computer's, has views of what it was loaded from.
        del self.decoder, self.runner
        gc.collect()  # arrays that are registered as long as they live
        assert not self.gpu.registered and not self.memory.live
        assert not self.gpu.events and len(self.gpu.lanes) == 1  # that computes

    def step(self, token: int, position: int) -> np.ndarray:
        return self.chunk([token], position)

    def chunk(self, tokens: list[int], position: int) -> np.ndarray:
        """Logits of every row."""
        rows, count = np.arange(len(tokens), dtype=np.int32), len(tokens)
        where = np.array([self.page.ctypes.data], np.int64)
        return self.runner.run(
            Batch(
                np.array(tokens, np.int32), rows + np.int32(position), np.zeros(count, np.int32), where,
                np.array([0, 1], np.int32), rows,
            )  # fmt: skip
        )


def move_while_something_fails(
    bench: Bench, wanted: np.ndarray, chance: random.Random, target: Callable[[], int], most_left: int, most_steps: int
) -> None:
    """Weights go between places, to what `target` says, while calls of the card fail and it runs out of memory; passes
    give the bits that are `wanted`, and nothing is left behind.

    Fewer than `most_left` allocations until the card is full, fewer than `most_steps` steps of a move.
    """
    for _ in range(6):
        if chance.random() < 0.5:
            bench.memory.left = chance.randrange(most_left)
        for method in ("copy", "synchronize", "register"):
            bench.gpu.refusals[method] = chance.choice([0, 0, 1, 3])
        try:
            bench.weights.retarget(target())
            for _ in range(chance.randrange(most_steps)):
                if not bench.weights.settle():
                    break
        except (NotMoved, DoesNotFit):
            pass
        bench.memory.left = None
        for _ in range(9):  # a pass that something fails in leaves the next one as it was
            try:
                found = bench.step(7, 0)
                break
            except WeightsLost:
                pass
        assert np.array_equal(found, wanted)
        bench.gpu.refusals.clear()
        gc.collect()
        assert sum(bench.memory.live.values()) <= bench.weights.memory_bytes + 256 * len(bench.memory.live)


def least_bytes(model: Path, **more: bool) -> int:
    with pytest.raises(DoesNotFit) as caught:
        place_on_card(load_manifest(model), 1, None, **more)
    return caught.value.needed_bytes

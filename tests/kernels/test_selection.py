"""The pages that a row chooses: bounds and worth against their twins, and the pass that asks for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.counts import counted
from tierd.kernels import reference
from tierd.kernels.cpu.selection import PageBounds
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.layout import PAGE_TOKENS, PageLayout
from tierd.kernels.rows import Bound

from .decoders import TinyModel, tiny_model
from .test_moe import Source, model_of, without_experts

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
CONTEXT = 160


def pages_of(layout: PageLayout, count: int, seed: int, spread: float = 1.0) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Whole pages of random keys and values in both layers, and their addresses."""
    draw = torch.Generator().manual_seed(seed)
    arena = torch.zeros((count, layout.record_bytes), dtype=torch.uint8)
    addresses = arena.data_ptr() + np.arange(count) * layout.record_bytes
    for page in range(count):
        for layer in range(layout.num_layers):
            keys, values = torch.randn((2, layout.kv_heads, PAGE_TOKENS, layout.head_dim), generator=draw) * spread
            reference.put_tokens(arena[page], layout, layer, keys, values, 0)
    return arena, addresses


@pytest.mark.parametrize("page_format", ["fp32", "bf16", "fp8", "k8v4", "k4v8"])
def test_bounds_are_those_of_the_keys_that_a_page_stands_for(page_format: str) -> None:
    layout = PageLayout(2, KV_HEADS, HEAD_DIM, page_format)
    arena, addresses = pages_of(layout, 7, 1)
    bounds = PageBounds(layout, HEADS)
    for layer in (1, 0):
        bounds.learn(layer, 0, addresses[:3])
        bounds.learn(layer, 3, addresses[3:].copy())
    for layer in (0, 1):
        keys = torch.stack([reference.page_planes([arena], at, layout, layer)[0] for at in addresses.tolist()])
        if layout.packed:  # as queries meet them
            keys = reference.turned(keys.double(), layout.rotation)
        low, high = keys.double().amin(2), keys.double().amax(2)
        np.testing.assert_allclose(bounds.bounds[layer, :7, :, 0], low, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(bounds.bounds[layer, :7, :, 1], high, rtol=1e-5, atol=1e-5)


def test_more_pages_than_there_is_room_for_keep_what_was_learned() -> None:
    layout = PageLayout(2, KV_HEADS, HEAD_DIM)
    _arena, addresses = pages_of(layout, 70, 2)
    bounds, whole = PageBounds(layout, HEADS), PageBounds(layout, HEADS)
    for page in range(70):
        bounds.learn(0, page, addresses[page : page + 1].copy())
    whole.learn(0, 0, addresses)
    assert np.array_equal(bounds.bounds[0, :70], whole.bounds[0, :70])


@settings(max_examples=counted(200, 6), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.sampled_from([0.1, 1.0, 100.0]))
def test_no_key_scores_more_than_its_page_may_and_worth_is_the_twins(seed: int, count: int, spread: float) -> None:
    layout = PageLayout(1, KV_HEADS, HEAD_DIM)
    arena, addresses = pages_of(layout, count, seed, spread)
    query = np.random.default_rng(seed).standard_normal((HEADS, HEAD_DIM)).astype(np.float32)
    bounds = PageBounds(layout, HEADS)
    bounds.learn(0, 0, addresses)
    low, high = (torch.from_numpy(bounds.bounds[0, :count, :, half].copy()) for half in (0, 1))
    most = np.maximum(
        query.reshape(KV_HEADS, -1, HEAD_DIM) * low.numpy()[:, :, None],
        query.reshape(KV_HEADS, -1, HEAD_DIM) * high.numpy()[:, :, None],
    ).sum(-1)  # [pages, kv heads, group]
    for page, address in enumerate(addresses.tolist()):
        keys = reference.page_planes([arena], address, layout, 0)[0].numpy()  # [kv heads, tokens, head_dim]
        scores = np.einsum("kgd,ktd->kgt", query.reshape(KV_HEADS, -1, HEAD_DIM), keys)
        assert (scores.max(-1) <= most[page] + 1e-4 * spread).all()
    worth = bounds.worth(0, query, 0, count)
    shares = torch.from_numpy(most.reshape(count, HEADS)).double().softmax(0).mean(1)
    np.testing.assert_allclose(worth, shares, atol=1e-4)
    (best,) = reference.select(torch.from_numpy(query[None]), low, high, [0, count], 1, 1.0)
    assert worth[best[0]] >= worth.max() - 1e-4


def test_a_needle_in_an_old_page_is_found() -> None:
    layout = PageLayout(1, KV_HEADS, HEAD_DIM)
    arena, addresses = pages_of(layout, 40, 3)
    query = np.random.default_rng(4).standard_normal((HEADS, HEAD_DIM)).astype(np.float32)
    keys = torch.from_numpy(query.reshape(KV_HEADS, -1, HEAD_DIM).mean(1)) * 4
    planes = reference.page_planes([arena], int(addresses[17]), layout, 0)
    planes[0][:, 5] = keys  # of one token of page 17
    reference.put_tokens(arena[17], layout, 0, *planes, 0)
    bounds = PageBounds(layout, HEADS)
    bounds.learn(0, 0, addresses)
    assert int(bounds.worth(0, query, 1, 38).argmax()) == 16


def one_row(
    model: TinyModel, decoder: CpuDecoder, source: Source | None, asks: bool
) -> tuple[NDArray[np.float32], bytes]:
    """Logits of row 129, which reads other pages in every layer, and all pages. `asks`: `choose` says which."""
    start, rng = 129, np.random.default_rng(2)
    tokens = rng.integers(0, model.shape.vocab, CONTEXT).astype(np.int32)
    arena = model.arena(9)
    pages = arena.ctypes.data + np.arange(9) * arena.shape[1]
    rows, row, zero = np.arange(start, dtype=np.int32), np.array([start], np.int32), np.zeros(1, np.int32)
    decoder.start(tokens[:start], rows, 0 * rows, np.array([0, 9], np.int32), zero[:0])
    for layer in range(model.shape.num_layers):
        decoder.layer(layer, [arena], pages, experts=source)
    decoder.finish()
    bound = np.array([Bound(base=(9 - 5) * PAGE_TOKENS)], np.int32)
    decoder.start(tokens[start : start + 1], row, zero, np.array([0, 5], np.int32), zero, None, bound)
    for layer in range(model.shape.num_layers):
        table = pages[[*np.sort(rng.choice(7, 3, replace=False)), 7, 8]]

        def choose(
            queries: NDArray[np.float32], table: NDArray[np.int64] = table
        ) -> tuple[list[NDArray[np.uint8]], NDArray[np.int64]]:
            assert queries.shape == (1, model.shape.heads, model.shape.head_dim) and queries.any()
            return [arena], table

        given = np.full(5, pages[8]) if asks else table
        decoder.layer(layer, [arena], given, experts=source, choose=choose if asks else None)
    return decoder.finish(), arena.tobytes()


@pytest.mark.parametrize("kind", ["dense", "experts", "streamed experts"])
def test_a_pass_reads_what_was_chosen_and_writes_where_it_was_told(kind: str) -> None:
    """The bits of a pass whose pages were known beforehand."""
    model = tiny_model() if kind == "dense" else model_of("few, fp32")
    streamed = kind == "streamed experts"
    found = []
    for asks in (False, True):
        with (without_experts(model) if streamed else model).decoder(max_rows=CONTEXT) as decoder:
            found.append(one_row(model, decoder, Source(model, decoder, 2) if streamed else None, asks))
    assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_pages_outside_of_the_memories_are_refused_and_the_next_pass_is_whole() -> None:
    model = tiny_model(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    arena, zero = model.arena(1), np.zeros(1, np.int32)
    pages, offsets = np.array([arena.ctypes.data], np.int64), np.array([0, 1], np.int32)
    with model.decoder() as decoder:
        wanted = decoder.forward([arena], zero, zero, zero, pages, offsets, zero)
        decoder.start(zero, zero, zero, offsets, zero)
        with pytest.raises(ValueError, match="do not lie within one of the memories"):
            decoder.layer(0, [arena], pages, choose=lambda _queries: ([arena], pages + arena.nbytes))
        assert np.array_equal(decoder.forward([arena], zero, zero, zero, pages, offsets, zero), wanted)

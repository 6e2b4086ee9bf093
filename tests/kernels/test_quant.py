"""Pages from one format to another: against the twin, back and forth, and that nothing else is touched."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.counts import counted
from tierd.kernels import reference
from tierd.kernels.cpu.quant import Repacker
from tierd.kernels.layout import PAGE_FORMATS, PageLayout

STALE = 0xA5
PAIRS = list(itertools.permutations(PAGE_FORMATS, 2))
Bytes = NDArray[np.uint8]


def layouts(source: str, target: str, layers: int = 2, heads: int = 2, head_dim: int = 64) -> tuple[PageLayout, ...]:
    return tuple(PageLayout(layers, heads, head_dim, name) for name in (source, target))


def page(layout: PageLayout, seed: int, spread: float = 1.0) -> Bytes:
    """A record whose keys share a mean, as keys do."""
    generator = torch.Generator().manual_seed(seed)
    record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    shape = (layout.kv_heads, layout.page_tokens, layout.head_dim)
    for layer in range(layout.num_layers):
        mean = torch.randn(shape[0], 1, shape[2], generator=generator)
        keys = mean + torch.randn(shape, generator=generator)
        reference.put_tokens(record, layout, layer, spread * keys, torch.randn(shape, generator=generator), 0)
    found: Bytes = record.numpy()
    return found


def repacked(record: Bytes, source: PageLayout, target: PageLayout) -> Bytes:
    found = np.full(target.record_bytes, STALE, np.uint8)
    Repacker(source, target)(record, found, source.num_layers)
    assert (found[target.payload_bytes :] == STALE).all()
    return found


def numbers(record: Bytes, layout: PageLayout) -> NDArray[np.float64]:
    tensor = torch.from_numpy(record)
    planes = [reference.page_planes([tensor], tensor.data_ptr(), layout, n) for n in range(layout.num_layers)]
    return np.stack([plane.double().numpy() for pair in planes for plane in pair])


def twin(record: Bytes, source: PageLayout, target: PageLayout) -> Bytes:
    given, found = torch.from_numpy(record), torch.full((target.record_bytes,), STALE, dtype=torch.uint8)
    reference.quant([given.data_ptr()], [given], source, [found.data_ptr()], [found], target, [source.page_tokens])
    made: Bytes = found.numpy()
    return made


@pytest.mark.parametrize(("source_format", "target_format"), PAIRS)
def test_it_is_what_the_twin_makes(source_format: str, target_format: str) -> None:
    source, target = layouts(source_format, target_format)
    record = page(source, 1)
    found, wanted = (numbers(make(record, source, target), target) for make in (repacked, twin))
    # A number that lies in the middle between two codes may go to either: a code apart, and in few places.
    apart = np.abs(found - wanted) > 1e-3 * np.abs(wanted).max()
    assert apart.mean() < 0.01
    assert np.abs(found - wanted).max() < 0.2 * np.abs(wanted).max()


@settings(max_examples=counted(500, 15), deadline=None)
@given(
    st.sampled_from(PAIRS), st.sampled_from([16, 64, 80, 128]), st.integers(1, 3), st.integers(1, 3),
    st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 100.0]),
)  # fmt: skip
def test_shapes_and_magnitudes(
    pair: tuple[str, str], head_dim: int, layers: int, heads: int, seed: int, spread: float
) -> None:
    source, target = layouts(*pair, layers=layers, heads=heads, head_dim=head_dim)
    record = page(source, seed, spread)
    found, wanted = (numbers(make(record, source, target), target) for make in (repacked, twin))
    assert (np.abs(found - wanted) > 1e-3 * np.abs(wanted).max()).mean() < 0.02


@pytest.mark.parametrize("stored", ["fp16", "bf16", "fp8", "k8v8", "k8v4", "k4v8", "k4v4"])
def test_there_and_back_is_near(stored: str) -> None:
    memory, disk = layouts("fp32", stored)
    record = page(memory, 3)
    before = numbers(record, memory)
    back = numbers(repacked(repacked(record, memory, disk), disk, memory), memory)
    error = np.sqrt(np.mean((back - before) ** 2)) / np.sqrt(np.mean(before**2))
    wanted = {"fp16": 3e-4, "bf16": 3e-3, "fp8": 0.03, "k8v8": 0.01, "k8v4": 0.1, "k4v8": 0.12, "k4v4": 0.13}
    assert error < wanted[stored]
    half = {"k8v8": 2, "k8v4": 1}.get(stored)
    if half is not None:  # keys of 8 bits are near whatever values have
        keys = slice(0, None, 2)
        assert np.sqrt(np.mean((back[keys] - before[keys]) ** 2)) < 0.02


def test_a_page_of_the_same_format_keeps_its_bits() -> None:
    for name in ("fp32", "fp16", "bf16", "fp8"):
        layout = PageLayout(2, 2, 64, name)
        record = page(layout, 4)
        assert (repacked(record, layout, layout)[: layout.payload_bytes] == record[: layout.payload_bytes]).all()


def test_some_layers_alone() -> None:
    source, target = layouts("fp32", "k8v8", layers=3)
    record = page(source, 5)
    whole = repacked(record, source, target)
    part = np.full(target.layer_bytes, STALE, np.uint8)
    Repacker(source, target)(record[source.layer_bytes :], part, 1)
    assert (part == whole[target.layer_bytes : 2 * target.layer_bytes]).all()


def test_tokens_that_were_never_written_harm_no_others() -> None:
    source, target = layouts("fp32", "k8v8")
    record = page(source, 6)
    rows = record[: source.payload_bytes].view(np.float32).reshape(source.num_layers, 2, 2, -1)
    spoilt = rows.copy()
    spoilt[:, 0].reshape(source.num_layers, 2, source.head_dim, 16)[..., 5:] = np.nan
    spoilt[:, 1].reshape(source.num_layers, 2, 16, source.head_dim)[:, :, 5:] = np.nan
    odd = np.zeros(source.record_bytes, np.uint8)
    odd[: source.payload_bytes] = spoilt.view(np.uint8).reshape(-1)
    found = numbers(repacked(odd, source, target), target)[:, :, :5]
    assert (found == numbers(repacked(record, source, target), target)[:, :, :5]).all()


def test_layouts_of_two_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="can't become"):
        Repacker(PageLayout(2, 2, 64), PageLayout(2, 1, 64, "k8v8"))
    repacker = Repacker(*layouts("fp32", "k8v8"))
    with pytest.raises(ValueError, match="no 2 layers"):
        repacker(np.zeros(100, np.uint8), np.zeros(100, np.uint8), 2)

"""pages: tokens written into a page and the page widened again, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tierd.kernels import reference
from tierd.kernels.cpu.forward import JOB
from tierd.kernels.cpu.pages import page_values, turn, widen_keys, widen_values, write_token
from tierd.kernels.layout import PAGE_FORMATS, PageLayout

PACKED = [name for name, form in PAGE_FORMATS.items() if form.packed]
LAYERS, LAYER, HEADS = 2, 1, 2
Floats = NDArray[np.float32]


def turned(x: Floats, rotation: int) -> Floats:
    return np.array(reference.turned(torch.from_numpy(x), rotation).float().numpy())


class Page:
    """One record, of stale memory at first, and what the kernels need to know of it."""

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout
        self.record = np.full(layout.record_bytes, 0xFF, np.uint8)
        self.job: Any = np.zeros((), JOB)[()]
        self.job["head_dim"] = layout.head_dim
        for name, value in page_values(layout).items():
            self.job[name] = value

    def at(self, head: int) -> tuple[int, int]:
        start = self.record.ctypes.data + LAYER * self.layout.layer_bytes
        keys, values = self.layout.keys.stop, self.layout.values.stop
        return start + head * keys, start + self.layout.plane_bytes + head * values

    def write(self, keys: Floats, values: Floats, first: int = 0) -> None:  # [HEADS, tokens, head_dim]
        for head in range(HEADS):
            for token in range(keys.shape[1]):
                key, value = turned(keys[head, token], self.layout.rotation), values[head, token].copy()
                write_token(self.job, key.ctypes.data, value.ctypes.data, *self.at(head), first + token)

    def read(self) -> tuple[Floats, Floats]:  # [HEADS, token, head_dim]
        shape = (HEADS, self.layout.page_tokens, self.layout.head_dim)
        keys, values = np.empty((shape[0], shape[2], shape[1]), np.float32), np.empty(shape, np.float32)
        for head in range(HEADS):
            at_keys, at_values = self.at(head)
            widen_keys(self.job, at_keys, keys[head].ctypes.data)
            widen_values(self.job, at_values, values[head].ctypes.data)
        return turned(keys.transpose(0, 2, 1).copy(), self.layout.rotation), values

    def expected(self) -> tuple[Floats, Floats]:
        keys, values = reference.page_planes(
            [torch.from_numpy(self.record)], self.record.ctypes.data, self.layout, LAYER
        )
        return keys.float().numpy(), values.float().numpy()


def numbers(layout: PageLayout, seed: int = 0, tokens: int = 16) -> tuple[Floats, Floats]:
    """Keys with a channel that sticks out, values, [HEADS, tokens, head_dim]."""
    rng = np.random.default_rng(seed)
    keys, values = (rng.standard_normal((HEADS, tokens, layout.head_dim)).astype(np.float32) for _ in range(2))
    keys[:, :, 3] += 50
    return keys, values


def page(format: str, head_dim: int = 64) -> Page:
    return Page(PageLayout(LAYERS, HEADS, head_dim, format))


@pytest.mark.parametrize("format", list(PAGE_FORMATS))
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_a_page_is_widened_to_what_its_bytes_stand_for(format: str, head_dim: int) -> None:
    subject = page(format, head_dim)
    rng = np.random.default_rng(0)
    random = rng.integers(0, 256, subject.record.shape, np.uint8)
    subject.record[:] = np.where(random & 0x7C == 0x7C, random & 0x83, random)  # no exponent of infinity or NaN
    for ours, theirs in zip(subject.read(), subject.expected(), strict=True):
        assert np.isfinite(theirs).all()
        assert np.allclose(ours, theirs, rtol=1e-5, atol=2e-6 * np.abs(theirs).max() if subject.layout.packed else 0)


@pytest.mark.parametrize("format", list(PAGE_FORMATS))
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_tokens_are_written_as_by_the_reference(format: str, head_dim: int) -> None:
    """Float32 may round a number between two codes the other way than float64: that happens now and then, by one."""
    subject, other = page(format, head_dim), page(format, head_dim)
    keys, values = numbers(subject.layout)
    subject.write(keys[:, :5], values[:, :5])
    subject.write(keys[:, 5:], values[:, 5:], 5)
    record = torch.from_numpy(other.record)
    reference.put_tokens(record, other.layout, LAYER, torch.from_numpy(keys), torch.from_numpy(values), 0)
    assert (subject.record != other.record).mean() < 0.01
    for ours, theirs, exact in zip(subject.read(), other.expected(), (keys, values), strict=True):
        error = np.abs(theirs - exact).max()
        assert np.abs(ours - exact).max() < 1.05 * error + 1e-6


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("first", [1, 7, 8, 15])
def test_a_page_that_is_filled_token_by_token_has_the_bytes_of_one_written_at_once(format: str, first: int) -> None:
    subject, other = page(format), page(format)
    keys, values = numbers(subject.layout)
    other.write(keys, values)
    subject.write(keys[:, :first], values[:, :first])
    before = [plane[:, :first].copy() for plane in subject.read()]
    subject.write(keys[:, first:], values[:, first:], first)
    assert np.array_equal(subject.record, other.record)
    for plane, earlier in zip(subject.read(), before, strict=True):
        assert np.array_equal(plane[:, :first], earlier)


@pytest.mark.parametrize(("format", "key_bound", "value_bound"), [("k8v8", 0.1, 0.02), ("k4v4", 0.8, 0.25)])
def test_a_channel_that_sticks_out_costs_the_others_nothing(
    format: str, key_bound: float, value_bound: float
) -> None:
    """A step of a key's scale without turning and anchor: 50 / 127 or 53 / 15."""
    subject = page(format)
    keys, values = numbers(subject.layout)
    subject.write(keys, values)
    found_keys, found_values = subject.read()
    assert np.abs(found_keys - keys).max() < key_bound
    assert np.abs(found_values - values).max() < value_bound


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_stay_so(format: str, wrong: float) -> None:
    subject = page(format)
    keys, values = numbers(subject.layout)
    keys[0, 3, 7], values[1, 4, 40] = wrong, wrong
    subject.write(keys, values)
    found_keys, found_values = subject.read()
    assert not np.isfinite(found_keys[0, 3]).any() and np.isfinite(found_keys[0, :3]).all()
    assert np.isfinite(found_keys[1]).all() and np.isfinite(found_values[0]).all()
    assert not np.isfinite(found_values[1, 4, 32:]).any() and np.isfinite(found_values[1, 4, :32]).all()


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-7, 1e3])
def test_numbers_of_any_size(format: str, size: float) -> None:
    subject = page(format)
    keys, values = numbers(subject.layout)
    subject.write(np.float32(size) * keys, np.float32(size) * values)
    for plane, exact in zip(subject.read(), (keys, values), strict=True):
        assert np.abs(plane - size * exact).max() <= 0.8 * size + 1e-6


def test_turning_twice_gives_back_what_was_turned() -> None:
    x = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    found = x.copy()
    turn(found.ctypes.data, 96, 32)
    assert np.abs(found - turned(x, 32)).max() < 1e-5
    turn(found.ctypes.data, 96, 32)
    assert np.abs(found - x).max() < 1e-5


def test_fp8_holds_what_is_too_large_and_rounds_to_even() -> None:
    subject = page("fp8", 16)
    values = np.zeros((HEADS, 1, 16), np.float32)
    values[:, 0, :10] = [1e9, -1e9, np.inf, 1.0625, 1.1875, 2**-9, 2**-10, 3 * 2**-11, -np.nan, -0.0]
    subject.write(values, values)
    found = subject.read()[1][0, 0]
    assert found[:8].tolist() == [448, -448, 448, 1.0, 1.25, 2**-9, 0, 2**-9] and np.isnan(found[8])

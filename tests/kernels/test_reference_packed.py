"""reference.packed: single numbers by the formulas of layout.py, and where the bytes lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierd.kernels import reference
from tierd.kernels.layout import PageLayout


def written(format: str) -> tuple[PageLayout, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layout, a record, and the keys and values [2, 16, 64] in its only layer."""
    layout = PageLayout(1, 2, 64, format)
    record = torch.full((layout.record_bytes,), 255, dtype=torch.uint8)
    keys, values = torch.randn(2, 2, 16, 64, generator=torch.manual_seed(0))
    reference.put_tokens(record, layout, 0, keys, values, 0)
    return layout, record, keys, values


def test_turning_keeps_products_and_spreads_one_channel() -> None:
    x, y = torch.randn(2, 3, 96, generator=torch.manual_seed(0), dtype=torch.float64)
    assert torch.allclose((reference.turned(x, 32) * reference.turned(y, 32)).sum(-1), (x * y).sum(-1))
    one = torch.zeros(64)
    one[5] = 8
    assert torch.allclose(reference.turned(one, 64).abs(), torch.ones(64, dtype=torch.float64))


def test_a_value_of_8_bits_lies_where_the_layout_says() -> None:
    layout, record, _, values = written("k8v8")
    head, token, channel = 1, 3, 40
    start = layout.plane_bytes + head * layout.values.stop
    code = int(record[start + token * 64 + channel].view(torch.int8))
    at = start + layout.values.scales + 2 * (channel // 32 * 16 + token)
    scale = float(np.frombuffer(record[at : at + 2].numpy().tobytes(), np.float16)[0])
    group = values[head, token, 32:64]
    assert scale == pytest.approx(float(group.abs().max()) / 127, rel=1e-3)
    assert code == round(float(values[head, token, channel]) / scale)
    _, found = reference.page_planes([record], record.data_ptr(), layout, 0)
    assert float(found[head, token, channel]) == code * scale


def test_a_key_of_4_bits_lies_where_the_layout_says() -> None:
    layout, record, keys, _ = written("k4v4")
    head, token, channel = 1, 11, 40
    start = head * layout.keys.stop
    code = int(record[start + channel * 8 + token - 8]) >> 4
    halves = {
        name: np.frombuffer(record[start + at :].numpy().tobytes()[:1024], np.float16)
        for name, at in (("s", layout.keys.scales), ("m", layout.keys.minima), ("a", layout.keys.anchor))
    }
    scale, low = (float(halves[name][channel // 32 * 16 + token]) for name in "sm")
    anchor = float(halves["a"][channel])
    turned = reference.turned(keys, 64)
    assert anchor == pytest.approx(float(turned[head, 0, channel]), rel=1e-3)
    assert abs(code * scale + low + anchor - float(turned[head, token, channel])) < 0.51 * scale
    found, _ = reference.page_planes([record], record.data_ptr(), layout, 0)
    assert float(reference.turned(found, 64)[head, token, channel]) == pytest.approx(code * scale + low + anchor)


def test_shifting_a_packed_page_turns_what_it_stands_for() -> None:
    layout, record, _, _ = written("k8v8")
    before, values = reference.page_planes([record], record.data_ptr(), layout, 0)
    angles = torch.rand(1, 32, generator=torch.manual_seed(1))
    reference.shift([record], [record.data_ptr()], layout, 0, angles.cos(), angles.sin())
    after, kept = reference.page_planes([record], record.data_ptr(), layout, 0)
    cos, sin = (angle.double().expand(16, 32) for angle in (angles.cos(), angles.sin()))
    assert torch.equal(kept, values)
    assert (after - reference.rope(before.transpose(0, 1), cos, sin).transpose(0, 1)).abs().max() < 0.05


def test_heads_that_do_not_come_in_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="k8v4 takes heads of a multiple of 16 elements"):
        PageLayout(1, 1, 24, "k8v4")
    with pytest.raises(ValueError, match="unknown page format 'int8'; known: fp32, .*k4v4"):
        PageLayout(1, 1, 64, "int8")

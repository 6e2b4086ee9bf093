"""ops: the row operations against the reference. The phases around them are tested in test_step.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierd.kernels import reference
from tierd.kernels.cpu.forward import JOB
from tierd.kernels.cpu.ops import _rotate, activate, norm_row
from tierd.kernels.cpu.team import PHASE_WORDS


@pytest.mark.parametrize("length", [8, 50, 96, 4096])
def test_norm(length: int) -> None:
    padded = -(-length // 16) * 16
    rng = np.random.default_rng(length)
    x, weight = np.zeros(padded, np.float32), np.zeros(padded, np.float32)
    x[:length], weight[:length] = rng.standard_normal(length), rng.standard_normal(length)
    out = np.full(padded, np.nan, np.float32)
    norm_row(x.ctypes.data, weight.ctypes.data, length, padded, np.float32(1e-5), out.ctypes.data)
    expected = reference.rms_norm(torch.from_numpy(x[:length]), torch.from_numpy(weight[:length]), 1e-5)
    assert np.abs(out[:length] - expected.numpy()).max() < 1e-5
    assert not out[length:].any()
    norm_row(x.ctypes.data, weight.ctypes.data, length, padded, np.float32(1e-5), x.ctypes.data)
    assert np.array_equal(x, out)  # in place


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128])
def test_rope(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    x = rng.standard_normal(head_dim).astype(np.float32)
    angles = rng.standard_normal(head_dim // 2).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    parts = (torch.from_numpy(part.copy()) for part in (x[None, None], cos[None], sin[None]))
    expected = 0.25 * reference.rope(*parts).numpy()[0, 0]
    _rotate(x.ctypes.data, cos.ctypes.data, sin.ctypes.data, head_dim, np.float32(0.25))
    assert np.abs(x - expected).max() < 1e-6


@pytest.mark.parametrize("intermediate", [1, 9, 64, 1100])
def test_swiglu(intermediate: int) -> None:
    rows, width = 3, -(-intermediate // 16) * 16
    gate_up = np.zeros((rows, -(-2 * intermediate // 16) * 16), np.float32)
    gate_up[:, : 2 * intermediate] = 4 * np.random.default_rng(0).standard_normal((rows, 2 * intermediate))
    gate_up[0, 0] = -1000
    out, phase, job = np.zeros((rows, width), np.float32), np.zeros(PHASE_WORDS, np.int64), np.zeros((), JOB)[()]
    job["rows"], job["intermediate"] = rows, intermediate
    job["gate_up"], job["gate_up_stride"] = gate_up.ctypes.data, gate_up.strides[0]
    job["activated"], job["activated_stride"] = out.ctypes.data, out.strides[0]
    activate(job, phase.ctypes.data)
    gate, up = torch.from_numpy(gate_up[:, : 2 * intermediate]).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up).numpy()
    assert np.abs(out[:, :intermediate] - expected).max() < 1e-5

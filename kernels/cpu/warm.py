"""Compiling all kernels ahead of use, or loading them from Numba's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numba import from_dtype, types

from tierd.kernels.cpu.attention import attention
from tierd.kernels.cpu.forward import JOB
from tierd.kernels.cpu.matmul import MATRIX, matmul
from tierd.kernels.cpu.microkernel import direct
from tierd.kernels.cpu.selection import compile_selection
from tierd.kernels.cpu.weights import DecoderShape, LayerWeights
from tierd.kernels.layout import PageLayout
from tierd.kernels.packing import PackedMatrix, WeightFormat, pack

if TYPE_CHECKING:
    from tierd.kernels.cpu.step import CpuDecoder


def warm_up(make_decoder: type[CpuDecoder], progress: Callable[[int, int], None]) -> None:
    """See `CpuDecoder.warm_up`."""
    address = types.int64
    stages: list[Callable[[], object]] = [
        lambda: direct.compile((address,) * 12),
        lambda: matmul.compile((from_dtype(MATRIX), *[address] * 10)),
        lambda: attention.compile((from_dtype(JOB), *[address] * 5)),
        compile_selection,
        lambda: _tiny_pass(make_decoder),
    ]
    for done, stage in enumerate(stages):
        progress(done, len(stages))
        stage()
    progress(len(stages), len(stages))


def _tiny_pass(make_decoder: type[CpuDecoder]) -> None:
    """A pass through the smallest decoder there is: every kernel has one signature, so this compiles them all."""
    shape = DecoderShape(1, 16, 16, 1, 1, 16, 16, 1e-5, False, (0,))
    ones = np.ones(16, np.float32)

    def matrix(rows: int) -> PackedMatrix:
        return PackedMatrix(WeightFormat.FP32, rows, 16, pack(WeightFormat.FP32, np.ones((rows, 16), np.float32)))

    layer = LayerWeights(ones, matrix(48), matrix(16), ones, matrix(32), matrix(16))
    layout = PageLayout(1, 1, 16)
    table = np.zeros((1, 8), np.float32)
    zero = np.zeros(1, np.int32)
    arena = np.zeros(layout.record_bytes, np.uint8)
    pages = np.array([arena.ctypes.data], np.int64)
    with make_decoder(shape, [layer], matrix(16), ones, matrix(16), layout, table, table, 1, 1) as decoder:
        decoder.forward([arena], zero, zero, zero, pages, np.array([0, 1], np.int32), zero)

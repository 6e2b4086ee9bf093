"""Matrices of a model on the card: quantized ones for our kernel, others dense for torch's own products."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from tierd.kernels.gpu.embed import plan_embed
from tierd.kernels.gpu.launch import Call, Plan, check_tensor
from tierd.kernels.gpu.matmul import plan_matmul
from tierd.kernels.gpu.packing import GpuMatrix, from_panels
from tierd.kernels.packing import PackedMatrix, WeightFormat, unpack

Matrix: TypeAlias = GpuMatrix | Tensor  # a tensor: [rows, cols] in the type of the activations
QUANTIZED = (WeightFormat.INT4_G32, WeightFormat.INT8_G32)


def to_card(matrix: PackedMatrix, device: torch.device, dtype: torch.dtype) -> Matrix:
    """A matrix of a prepared model on a device.

    int4-g32 and int8-g32 stay as they are, bit for bit, for activations of 16 bits. All other formats, and all with
    activations of fp32, become dense, rounded to `dtype`.
    """
    if matrix.format in QUANTIZED and dtype != torch.float32:
        return from_panels(matrix).to(device)
    return torch.from_numpy(unpack(matrix.format, matrix.data, matrix.rows, matrix.cols)).to(dtype).to(device)


def matrix_bytes(matrix: Matrix) -> int:
    """Memory that it takes."""
    return matrix.quants.nbytes + matrix.scales.nbytes if isinstance(matrix, GpuMatrix) else matrix.nbytes


def product_plan(
    x: Tensor, matrix: Matrix, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Plan[Tensor]:
    """x [rows, cols] times the transposed matrix, plus a bias [matrix rows], in `out_dtype` (that of x by default)."""
    if isinstance(matrix, GpuMatrix):
        return plan_matmul(x, matrix, bias, out_dtype)
    check_tensor("x", x, [matrix.dtype], [None, matrix.shape[1]], matrix)
    dtype = x.dtype if out_dtype is None else out_dtype
    out = torch.empty((len(x), len(matrix)), dtype=dtype, device=x.device)
    if dtype == x.dtype and (bias is None or bias.dtype == dtype):
        if bias is None:
            return Plan(out, (out,), (Call(lambda: torch.mm(x, matrix.T, out=out)),))
        return Plan(out, (out,), (Call(lambda: torch.addmm(bias, x, matrix.T, out=out)),))
    # Torch rounds a product to the type of its factors.
    if bias is None:
        return Plan(out, (out,), (Call(lambda: out.copy_(torch.mm(x, matrix.T))),))
    return Plan(out, (out,), (Call(lambda: out.copy_(torch.mm(x, matrix.T).float() + bias.float())),))


def rows_plan(tokens: Tensor, matrix: Matrix, dtype: torch.dtype) -> Plan[Tensor]:
    """Rows `tokens` int32 [rows] of an embedding."""
    if isinstance(matrix, GpuMatrix):
        return plan_embed(tokens, matrix, dtype)
    out = torch.empty((len(tokens), matrix.shape[1]), dtype=matrix.dtype, device=tokens.device)
    return Plan(out, (out,), (Call(lambda: torch.index_select(matrix, 0, tokens, out=out)),))

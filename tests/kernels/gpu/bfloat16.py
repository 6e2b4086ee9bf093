"""What Triton's interpreter lacks for bfloat16.

It keeps bfloat16 as uint16, whose bit patterns a product multiplies (triton issue 11584), and cuts float32 off where
the hardware rounds to nearest even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_dot, _cast, _convert = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp


def _create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    a, b = (_cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _dot(self, a, b, *rest)


def _cast_impl(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
    if target.scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
        rounded = torch.from_numpy(source.data.astype(np.float32)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
    if source.dtype.scalar == tl.bfloat16 and target.scalar != tl.bfloat16:
        widened = (source.data.astype(np.uint32) << 16).view(np.float32)
        return _cast(self, TensorHandle(widened, tl.float32), target)
    return _cast(self, source, target)


def _create_fp_to_fp(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype, mode: Any) -> TensorHandle:
    if tl.bfloat16 in (source.dtype.scalar, target.scalar):
        return _cast_impl(self, source, target)
    return _convert(self, source, target, mode)


def teach() -> None:
    """From now on the interpreter computes with the values of bfloat16."""
    InterpreterBuilder.create_dot = _create_dot
    InterpreterBuilder.cast_impl = _cast_impl
    InterpreterBuilder.create_fp_to_fp = _create_fp_to_fp

"""What one kernel launch is, and the checks that every wrapper makes before it.

A wrapper is in two halves: `plan_<kernel>` checks its arguments, makes the buffers and says what would be launched;
`<kernel>` also runs it. A plan can be run again, which is what a captured graph needs, and compiled ahead of time for a
card that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Result = TypeVar("Result")

HALF_DTYPES = (torch.float16, torch.bfloat16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: a Triton function, its grid, and its arguments by name (tensors, numbers, constants, None)."""

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Launches on the current stream; an empty grid is no launch."""
        if all(self.grid):
            self.kernel[self.grid](
                **self.args, num_warps=self.num_warps, num_stages=self.num_stages, enable_fp_fusion=True
            )


@dataclass(frozen=True, slots=True)
class Call:
    """An operation of torch's in place of a launch; it writes a tensor that is there already."""

    function: Callable[[], object]

    def run(self) -> None:
        """Queues it on the current stream."""
        self.function()


@dataclass(frozen=True, slots=True)
class Plan(Generic[Result]):
    """Launches in order, the result they leave, and all buffers they write on the way (uninitialized before)."""

    result: Result
    buffers: tuple[Tensor, ...]
    launches: tuple[Launch | Call, ...]

    def run(self) -> Result:
        """Runs all launches. The result's tensors are the same ones each time."""
        for launch in self.launches:
            launch.run()
        return self.result


def check_tensor(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | None], like: Tensor | None = None
) -> None:
    """Raises ValueError unless the tensor has one of the types, the shape (None: any size) and the device of `like`."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")
    same = tensor.dim() == len(shape) and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not same:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(tensor.shape)}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}: lies on {tensor.device}, expected {like.device}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, got strides {tensor.stride()} for shape {list(tensor.shape)}")


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is not below `count` (at least 1)."""
    return 1 << max(count - 1, 0).bit_length()


def wait_for(device: torch.device) -> None:
    """Waits for all that was queued on the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def on_host(values: Tensor) -> NDArray[np.float32]:
    """fp32 values as an array of their own; waits for the card."""
    if values.device.type != "cuda":
        return values.numpy().copy()
    near = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    near.copy_(values, non_blocking=True)
    wait_for(values.device)
    return near.numpy()

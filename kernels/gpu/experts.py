"""The experts of a mixture on the card, and where the kernels find them.

Each layer that is a mixture has a table on the device, one line an expert: the addresses of its matrices, so that an
expert may lie anywhere, come and go between two launches, and be missing. Kernels read the table when they run; a
captured step whose experts stay goes on finding them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tierd.kernels.gpu.launch import FLOAT_DTYPES, check_contiguous
from tierd.kernels.gpu.layers import Layout, Piece
from tierd.kernels.gpu.packing import GpuMatrix
from tierd.kernels.gpu.products import Matrix, matrix_bytes, to_card
from tierd.kernels.packing import WeightFormat

if TYPE_CHECKING:
    from tierd.kernels.cpu.weights import ExpertsShape, ExpertWeights, Floats

# A line of a table: addresses of codes (or of all of a dense matrix), scales and bias (0: none) of gate_up, then of
# down. An expert that is not there has a line of zeros.
GATE_UP: Final = 0
DOWN: Final = 3
COLUMNS: Final = 6
ALIGN_BYTES = 64  # of every address: 16 elements of fp32, as kernels are told


class Kind(NamedTuple):
    """What a matrix is: all experts of a layer have the same two. `format` None: dense, elements of `dtype`."""

    rows: int
    cols: int
    format: WeightFormat | None
    dtype: torch.dtype

    @staticmethod
    def of(matrix: Matrix, dtype: torch.dtype) -> Kind:
        """Of a matrix for activations of `dtype`."""
        if isinstance(matrix, GpuMatrix):
            return Kind(matrix.rows, matrix.cols, matrix.format, dtype)
        return Kind(len(matrix), matrix.shape[1], None, matrix.dtype)


class GpuExpert(NamedTuple):
    """One expert on the card. `gate_up` holds the gate's rows first, then those of up; biases are fp32 [rows]."""

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @staticmethod
    def load(expert: ExpertWeights, device: torch.device, dtype: torch.dtype) -> GpuExpert:
        """An expert of a prepared model, in memory of its own."""

        def bias(values: Floats | None, rows: int) -> Tensor | None:
            return None if values is None else _own(torch.from_numpy(values[:rows]), device)

        return GpuExpert(
            _aligned(to_card(expert.gate_up, device, dtype)), _aligned(to_card(expert.down, device, dtype)),
            bias(expert.gate_up_bias, expert.gate_up.rows), bias(expert.down_bias, expert.down.rows),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Memory of the matrices."""
        return matrix_bytes(self.gate_up) + matrix_bytes(self.down)


class GpuExperts:
    """The experts of one layer.

    `table` int64 [experts, COLUMNS] stays where it is. Threading: the step thread's, with the compute stream current.
    """

    def __init__(self, shape: ExpertsShape, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._hidden, self._dtype = shape, hidden, dtype
        self._held: list[GpuExpert | None] = [None] * shape.count
        self._kinds: tuple[Kind, Kind] | None = None
        self.table = torch.zeros((shape.count, COLUMNS), dtype=torch.int64, device=device)

    @staticmethod
    def load(
        experts: Sequence[ExpertWeights | None], shape: ExpertsShape, hidden: int, device: torch.device,
        dtype: torch.dtype,
    ) -> GpuExperts:  # fmt: skip
        """Those of a prepared layer; one that is None is missing."""
        found = GpuExperts(shape, hidden, device, dtype)
        for number, expert in enumerate(experts):
            if expert is not None:
                found.put({number: GpuExpert.load(expert, device, dtype)})
        return found

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """Of gate_up and of down. Raises ValueError before any expert was put."""
        if self._kinds is None:
            raise ValueError("no expert of the layer has been on the card yet")
        return self._kinds

    @property
    def all_here(self) -> bool:
        """Whether every expert is on the card."""
        return None not in self._held

    def is_here(self, expert: int) -> bool:
        """Whether one is."""
        return self._held[expert] is not None

    def put(self, experts: Mapping[int, GpuExpert | None]) -> None:
        """Launches that are queued from now on find these experts there, or (None) find them missing; earlier ones are
        not disturbed. The tensors are kept alive until an expert is put elsewhere.

        Raises ValueError, and changes nothing, for matrices of another shape, format, type or device than those of the
        layer's others, and for what does not begin at a multiple of 64 bytes.
        """
        kinds, lines = self._kinds, np.zeros((len(experts), COLUMNS), np.int64)
        for line, expert in zip(lines, experts.values(), strict=True):
            if expert is not None:
                kinds = self._checked(expert, kinds)
                line[:] = _addresses(expert)
        numbers = list(experts)
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self._held):
            raise ValueError(f"experts are 0..{len(self._held) - 1}, got {numbers}")
        at = torch.tensor(numbers, dtype=torch.int64).to(self.table.device)
        self.table.index_copy_(0, at, torch.from_numpy(lines).to(self.table.device))
        self._kinds = kinds
        for number, expert in experts.items():
            self._held[number] = expert

    def _checked(self, expert: GpuExpert, kinds: tuple[Kind, Kind] | None) -> tuple[Kind, Kind]:
        found = Kind.of(expert.gate_up, self._dtype), Kind.of(expert.down, self._dtype)
        width = self._shape.intermediate
        shapes = (2 * width, self._hidden), (self._hidden, width)
        for name, kind, shape, bias in zip(
            ("gate_up", "down"), found, shapes, (expert.gate_up_bias, expert.down_bias), strict=True
        ):
            if kind[:2] != shape:
                raise ValueError(f"{name} of an expert must be {shape[0]} x {shape[1]}, got {kind.rows} x {kind.cols}")
            if kind.dtype != self._dtype or kind.dtype not in FLOAT_DTYPES:
                raise ValueError(f"{name} of an expert: elements of {kind.dtype} for activations of {self._dtype}")
            if (bias is not None) != self._shape.bias:
                raise ValueError(f"{name}_bias of an expert: {'none' if bias is None else 'one'} is not expected")
            if bias is not None and (bias.dtype != torch.float32 or list(bias.shape) != [kind.rows]):
                raise ValueError(f"{name}_bias of an expert must be float32 [{kind.rows}]")
        if kinds is not None and found != kinds:
            raise ValueError(f"experts of one layer must have the same formats, got {found} beside {kinds}")
        for tensor in _tensors(expert):
            check_contiguous("expert", tensor)
            if tensor.device != self.table.device or tensor.data_ptr() % ALIGN_BYTES:
                raise ValueError(f"an expert must lie on {self.table.device}, at multiples of {ALIGN_BYTES} bytes")
        return found


class SlotExpert:
    """An expert whose record comes to lie in a slot, and how it gets from there to a place of its own.

    Args as of `layers.SlotLayer`; `place`: uint8, `layers.place_bytes` of the pieces or more, and its alone as long as
    a launch may find the expert there.

    Raises ValueError for a record without the tensors of an expert, or sizes that don't fit.
    """

    def __init__(self, pieces: Sequence[Piece], slot: Tensor, place: Tensor, dtype: torch.dtype) -> None:
        self._layout = Layout(pieces, slot, place, dtype)
        try:
            self.expert = GpuExpert(**self._layout.found)
        except TypeError as exc:
            raise ValueError(f"a record that is no expert: {exc}") from None

    def lay_out(self) -> GpuExpert:
        """Launches it; the slot has been read when that has run."""
        self._layout.run()
        return self.expert


def _tensors(expert: GpuExpert) -> list[Tensor]:
    """All that an expert consists of."""
    found = []
    for part in expert:
        if isinstance(part, GpuMatrix):
            found += [part.quants, part.scales]
        elif part is not None:
            found.append(part)
    return found


def _addresses(expert: GpuExpert) -> list[int]:
    """Its line of a table."""
    line = []
    for matrix, bias in ((expert.gate_up, expert.gate_up_bias), (expert.down, expert.down_bias)):
        if isinstance(matrix, GpuMatrix):
            line += [matrix.quants.data_ptr(), matrix.scales.data_ptr()]
        else:
            line += [matrix.data_ptr(), 0]
        line.append(0 if bias is None else bias.data_ptr())
    return line


def _aligned(matrix: Matrix) -> Matrix:
    """A dense matrix may be memory of numpy's, where the device is the host."""
    if isinstance(matrix, GpuMatrix) or matrix.data_ptr() % ALIGN_BYTES == 0:
        return matrix
    return _own(matrix, matrix.device)


def _own(values: Tensor, device: torch.device) -> Tensor:
    """A copy in memory of torch's, which is aligned."""
    return torch.empty(values.shape, dtype=values.dtype, device=device).copy_(values)

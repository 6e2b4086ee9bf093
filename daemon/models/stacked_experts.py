"""The experts of gpt-oss in safetensors: all of a layer in one tensor, the rows of gate and up taking turns.

As transformers' module has them: `gate_up_proj` [experts, hidden, 2 width] and `down_proj` [experts, width, hidden],
inputs first. As published: `..._blocks` [experts, rows, groups, 16], in which a byte holds two neighbours of a group of
32, the first one low, and `..._scales` [experts, rows, groups], exponents. These become ggml's blocks of MXFP4, whose
bytes hold elements i and i + 16 of a group behind its exponent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import GgmlType
from tierd.daemon.models.records import PlannedPart
from tierd.daemon.models.safetensors_file import SafeTensor, SafetensorsFile
from tierd.daemon.models.source import SourceTensor
from tierd.daemon.models.spec import ExpertsSpec

U8 = npt.NDArray[np.uint8]
Find = Callable[[str], tuple[SafetensorsFile, SafeTensor]]
_GROUP, _GROUP_BYTES = 32, 16
_TURN = {"gate": 0, "up": 1}  # which of two neighbouring rows


class StackedExperts:
    """Parts of experts. `find` gives a tensor by its name within `mlp.experts` of a layer, or raises ModelFileError.

    Memory: one expert's matrix as it is stored, that which was read last.
    """

    def __init__(self, experts: ExpertsSpec, hidden: int) -> None:
        self._experts = experts
        self._hidden = hidden
        self._matrix = functools.lru_cache(maxsize=1)(_whole)

    def part(self, part: PlannedPart, find: Find, packed: bool) -> SourceTensor:
        """A matrix or bias of an expert. `packed`: as MXFP4. Raises ModelFileError for tensors of another shape."""
        slot = part.slot.removesuffix("_bias")
        name, step = ("down_proj", 1) if slot == "down" else ("gate_up_proj", 2)
        first = _TURN.get(slot, 0)
        if part.slot.endswith("_bias"):
            return self._bias(part, *find(f"{name}_bias"), first, step)
        if packed:
            return self._mxfp4(part, find(f"{name}_blocks"), find(f"{name}_scales"), first, step)
        file, found = find(name)
        _check(found, 3, self._experts.count * part.cols, step * part.rows)

        def read(start: int, stop: int) -> U8:
            whole = self._matrix(file, found, part.expert * part.cols, part.cols)
            size = whole.shape[1] // found.cols  # bytes of an element
            taken = whole.reshape(part.cols, part.rows, step, size)[:, start:stop, first]
            return np.ascontiguousarray(taken.swapaxes(0, 1)).reshape(stop - start, part.cols * size)

        return SourceTensor(found.name, found.kind, part.rows, part.cols, read)

    def _bias(self, part: PlannedPart, file: SafetensorsFile, found: SafeTensor, first: int, step: int) -> SourceTensor:
        _check(found, 2, self._experts.count, step * part.cols)

        def read(start: int, stop: int) -> U8:
            raw = file.read_rows(found, part.expert + start, part.expert + stop)
            taken = raw.reshape(stop - start, part.cols, step, -1)[:, :, first]
            return np.ascontiguousarray(taken).reshape(stop - start, -1)

        return SourceTensor(found.name, found.kind, 1, part.cols, read)

    def _mxfp4(
        self, part: PlannedPart, blocks: tuple[SafetensorsFile, SafeTensor], scales: tuple[SafetensorsFile, SafeTensor],
        first: int, step: int,
    ) -> SourceTensor:  # fmt: skip
        groups, rows = part.cols // _GROUP, self._experts.count * step * part.rows
        _check(blocks[1], 4, rows * groups, _GROUP_BYTES, "U8")
        _check(scales[1], 3, rows, groups, "U8")
        before = part.expert * step * part.rows

        def read(start: int, stop: int) -> U8:
            low, high = before + step * start, before + step * stop
            pairs = blocks[0].read_rows(blocks[1], low * groups, high * groups)
            exponents = scales[0].read_rows(scales[1], low, high)
            taken = pairs.reshape(stop - start, step, groups, _GROUP_BYTES)[:, first]
            return _as_ggml(taken, exponents.reshape(stop - start, step, groups)[:, first])

        return SourceTensor(blocks[1].name, GgmlType.MXFP4, part.rows, part.cols, read)


def _as_ggml(pairs: U8, exponents: U8) -> U8:  # [rows, groups, 16], [rows, groups] -> [rows, groups * 17]
    nibbles = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-1).reshape(*pairs.shape[:2], _GROUP)
    halves = nibbles[..., :_GROUP_BYTES] | nibbles[..., _GROUP_BYTES:] << np.uint8(4)
    return np.concatenate([exponents[..., None], halves], axis=-1).reshape(len(pairs), -1)


def _whole(file: SafetensorsFile, tensor: SafeTensor, first: int, rows: int) -> U8:
    return file.read_rows(tensor, first, first + rows)


def _check(found: SafeTensor, num_dims: int, rows: int, cols: int, dtype: str = "") -> None:
    if (found.num_dims, found.rows, found.cols) != (num_dims, rows, cols) or (dtype and found.dtype != dtype):
        raise ModelFileError(
            f"tensor {found.name} has {found.rows} x {found.cols} elements of {found.dtype}, the configuration asks "
            f"for {rows} x {cols}; the model is inconsistent, fetch it again"
        )

"""A bounded reader of safetensors files and of sharded sets of them.

Layout: u64 little-endian header length, a JSON object `{name: {dtype, shape, data_offsets}}`, then the data, which the
tensors must fill without gap or overlap. Nothing in such a file is ever executed; formats that would be are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from tierd.daemon.models.config_json import parse_object
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.file_reader import FileReader, StoredTensor
from tierd.daemon.models.ggml_types import GgmlType

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
MAX_TENSORS = 65536
MAX_COLONS = 16 * MAX_TENSORS  # an entry has 4; the rest is for __metadata__
MAX_ENTRY_BYTES = 4096
MAX_NAME_CHARS = 1024
MAX_INDEX_BYTES = 16 << 20
MAX_DIMS = 8
MAX_SHARDS = 4096
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_WEIGHT_TYPES = {"F32": GgmlType.F32, "F16": GgmlType.F16, "BF16": GgmlType.BF16}
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One tensor of the JSON header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SafeTensor(StoredTensor):
    """Where a tensor lies, and its element type by the name of the format."""

    dtype: str

    @property
    def kind(self) -> GgmlType:
        """The element type. Raises ModelFileError if weights of that type aren't supported."""
        if self.dtype not in _WEIGHT_TYPES:
            raise ModelFileError(
                f"tensor {self.name} is {self.dtype}; supported are {', '.join(_WEIGHT_TYPES)}, or take a GGUF file"
            )
        return _WEIGHT_TYPES[self.dtype]


class SafetensorsFile:
    """One open safetensors file: `tensors` by name."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises ModelFileError for anything that isn't a sound safetensors file."""
        self._reader = FileReader(path)
        try:
            self.tensors = _read_header(self._reader)
        except BaseException:
            self._reader.close()
            raise

    @property
    def path(self) -> Path:
        """The file."""
        return self._reader.path

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def read_rows(self, tensor: SafeTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:  # [stop - start, bytes]
        """See `FileReader.read_rows`."""
        return self._reader.read_rows(tensor, start, stop)


def model_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory. Raises ModelFileError if there are none or a name escapes it."""
    index = directory / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    single = directory / SINGLE_NAME
    if single.is_file():
        return [single]
    found = sorted(p for p in directory.glob("*.safetensors") if p.is_file())
    if len(found) == 1:
        return found
    if found:
        raise ModelFileError(f"{directory.name} has several safetensors files but no {INDEX_NAME}; fetch it again")
    refuse_without_weights(directory)


def refuse_without_weights(directory: Path) -> NoReturn:
    """Say why a directory without safetensors can't be used."""
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise ModelFileError(
            f"{pickles[0]} can run code when it is loaded, so it is never opened; "
            "take the safetensors or GGUF form of this model"
        )
    raise ModelFileError(f"{directory.name} has no safetensors file; give a model directory or a .gguf file")


def _indexed_files(index: Path) -> list[Path]:
    with FileReader(index) as reader:
        if reader.size_bytes > MAX_INDEX_BYTES:
            raise ModelFileError(f"{INDEX_NAME} is too large; fetch the model again")
        data = parse_object(reader.read(0, reader.size_bytes, "the index").tobytes(), INDEX_NAME)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{INDEX_NAME} has no weight_map; fetch the model again")
    names = sorted({str(name) for name in weight_map.values()})
    if len(names) > MAX_SHARDS:
        raise ModelFileError(f"{INDEX_NAME} names {len(names):,} files, more than the {MAX_SHARDS:,} allowed")
    for name in names:
        if not _SHARD_NAME.fullmatch(name):
            raise ModelFileError(f"{INDEX_NAME} names the file {name[:80]!r}, which is no plain file name")
        if not (index.parent / name).is_file():
            raise ModelFileError(f"{name} is missing; fetch the model again")
    return [index.parent / name for name in names]


def _read_header(reader: FileReader) -> dict[str, SafeTensor]:
    name = reader.path.name
    length = int.from_bytes(reader.read(0, 8, "the header length").tobytes(), "little")
    if length > MAX_HEADER_BYTES or 8 + length > reader.size_bytes:
        raise ModelFileError(
            f"{name} claims a header of {length:,} bytes in a file of {reader.size_bytes:,}; "
            "it is damaged, or no safetensors file"
        )
    raw = reader.read(8, length, "the header").tobytes()
    if not raw.startswith(b"{"):
        raise ModelFileError(f"{name} isn't a safetensors file; take a model whose weights are safetensors or GGUF")
    # Counted before decoding: a hostile header must not become millions of objects first.
    if raw.count(b":") > MAX_COLONS:
        raise ModelFileError(f"the header of {name} has too many entries; it is damaged, or no safetensors file")
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelFileError(f"the header of {name} isn't valid JSON ({exc}); fetch it again") from None
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ModelFileError(f"{name} has {len(header):,} tensors, more than the {MAX_TENSORS:,} allowed")
    data_bytes = reader.size_bytes - 8 - length
    tensors = [_tensor(name, key, entry, 8 + length, data_bytes) for key, entry in header.items()]
    position = 8 + length
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.size_bytes)):
        if tensor.offset != position:
            raise ModelFileError(f"{name}: tensor {tensor.name[:80]!r} overlaps another or leaves a gap; it is damaged")
        position += tensor.size_bytes
    if position != reader.size_bytes:
        raise ModelFileError(f"{name} is longer or shorter than its tensors; it is damaged, fetch it again")
    return {t.name: t for t in tensors}


def _tensor(file: str, name: str, raw: msgspec.Raw, base: int, data_bytes: int) -> SafeTensor:
    """One checked entry of the header."""
    where = f"{file}: tensor {name[:80]!r}"
    if len(name) > MAX_NAME_CHARS or len(memoryview(raw)) > MAX_ENTRY_BYTES:
        raise ModelFileError(f"{where} has a description that is too long; the file is damaged")
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelFileError(f"{where}: {exc}; the file is damaged, fetch it again") from None
    if entry.dtype not in _DTYPE_BYTES:
        raise ModelFileError(f"{where} has unknown type {entry.dtype[:20]!r}")
    if len(entry.shape) > MAX_DIMS or any(d < 0 for d in entry.shape):
        raise ModelFileError(f"{where} has a shape that isn't valid; the file is damaged")
    cols = entry.shape[-1] if entry.shape else 1
    rows = 1
    for dim in entry.shape[:-1]:
        rows *= dim
    start, end = entry.data_offsets
    size_bytes = rows * cols * _DTYPE_BYTES[entry.dtype]
    if not 0 <= start <= end <= data_bytes or end - start != size_bytes:
        raise ModelFileError(
            f"{where} of {size_bytes:,} bytes lies at {start:,} to {end:,} of {data_bytes:,}; the file is damaged or "
            "truncated, fetch it again"
        )
    return SafeTensor(name, rows, cols, len(entry.shape), base + start, size_bytes, entry.dtype)

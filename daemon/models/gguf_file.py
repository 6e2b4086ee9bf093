"""A bounded reader of GGUF v2 and v3 headers.

Layout (little-endian): magic `GGUF`, u32 version, u64 tensors, u64 keys; then key/value pairs; then one description a
tensor (name, u32 dims, u64 each dim with the fastest first, u32 type, u64 offset); then, aligned, the data. Every
count, length, offset and size is compared with the file before it is used, so a hostile header costs an error.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.file_reader import FileReader, StoredTensor
from tierd.daemon.models.ggml_types import row_bytes

MAX_KEYS = 4096
MAX_TENSORS = 65536
MAX_NAME_BYTES = 1024  # keys and tensor names
MAX_STRING_BYTES = 4 << 20  # chat templates are the longest strings, about 20 KB
MAX_ARRAY_NUMBERS = 4 << 20
MAX_ARRAY_STRINGS = 1 << 20  # over all arrays: the largest vocabularies have 262,144 tokens and twice as many merges
MAX_HEADER_BYTES = 96 << 20
MAX_ALIGNMENT_BYTES = 1 << 20
MAX_DIMS = 4
DEFAULT_ALIGNMENT_BYTES = 32
_READ_AHEAD_BYTES = 1 << 20

Value = int | float | bool | str | list[str] | npt.NDArray[np.generic]


class _Kind(enum.IntEnum):
    """Value types of the format."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_SCALARS: dict[_Kind, str] = {
    _Kind.UINT8: "<B",
    _Kind.INT8: "<b",
    _Kind.UINT16: "<H",
    _Kind.INT16: "<h",
    _Kind.UINT32: "<I",
    _Kind.INT32: "<i",
    _Kind.FLOAT32: "<f",
    _Kind.BOOL: "<?",
    _Kind.UINT64: "<Q",
    _Kind.INT64: "<q",
    _Kind.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor(StoredTensor):
    """Where a tensor lies, and its element type by the number of the format."""

    type_id: int


class _Cursor:
    """Reads a header forward, buffering a chunk at a time and never more than `MAX_HEADER_BYTES` in all."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._buffer = bytearray()
        self.position = 0

    def _need(self, count_bytes: int, what: str) -> int:
        """Make the next `count_bytes` available; returns where they start in the buffer and moves past them."""
        start, end = self.position, self.position + count_bytes
        self._reader.check(start, count_bytes, what)
        if end > MAX_HEADER_BYTES:
            raise self.error(f"its header is larger than {MAX_HEADER_BYTES:,} bytes at {what}")
        if end > len(self._buffer):
            have = len(self._buffer)
            wanted = min(max(end - have, _READ_AHEAD_BYTES), self._reader.size_bytes - have)
            self._buffer += self._reader.read(have, wanted, what).data
        self.position = end
        return start

    def error(self, problem: str) -> ModelFileError:
        """A ModelFileError that names the file."""
        return ModelFileError(f"{self._reader.path.name}: {problem}; the file is damaged, fetch it again")

    def scalar(self, code: str, what: str) -> int | float | bool:
        """One number of `struct` format `code`."""
        start = self._need(struct.calcsize(code), what)
        value: int | float | bool = struct.unpack_from(code, self._buffer, start)[0]
        return value

    def count(self, code: str, limit: int, what: str) -> int:
        """An unsigned count that may not exceed `limit`."""
        value = int(self.scalar(code, what))
        if value > limit:
            raise self.error(f"{what} is {value:,}, more than the {limit:,} allowed")
        return value

    def text(self, limit: int, what: str) -> str:
        """A length-prefixed UTF-8 string of at most `limit` bytes."""
        length = self.count("<Q", limit, f"the length of {what}")
        start = self._need(length, what)
        try:
            return self._buffer[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} isn't UTF-8") from None

    def texts(self, count: int, what: str) -> list[str]:
        """`count` strings. The short way, for what is buffered already, is 4 times as fast as `text` alone."""
        items: list[str] = []
        length_at = struct.Struct("<Q").unpack_from
        while len(items) < count:
            buffer, position, end = self._buffer, self.position, len(self._buffer)
            while len(items) < count and position + 8 <= end:
                stop = position + 8 + length_at(buffer, position)[0]
                if stop > end:
                    break
                try:
                    items.append(buffer[position + 8 : stop].decode())
                except UnicodeDecodeError:
                    raise self.error(f"{what} isn't UTF-8") from None
                position = stop
            self.position = position
            if len(items) < count:
                items.append(self.text(MAX_STRING_BYTES, what))
        return items

    def numbers(self, kind: _Kind, count: int, what: str) -> npt.NDArray[np.generic]:
        """`count` numbers of one kind."""
        dtype = np.dtype(_SCALARS[kind])
        size_bytes = count * dtype.itemsize
        start = self._need(size_bytes, what)
        return np.frombuffer(bytes(self._buffer[start : start + size_bytes]), dtype)

    def kind(self, what: str) -> _Kind:
        """A value type."""
        number = int(self.scalar("<I", what))
        try:
            return _Kind(number)
        except ValueError:
            raise self.error(f"{what} has unknown value type {number}") from None


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name. Close it or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises ModelFileError for anything that isn't a sound GGUF v2 or v3 file."""
        self._reader = FileReader(path)
        try:
            cursor = _Cursor(self._reader)
            num_tensors, num_keys = _read_preamble(cursor)
            self.metadata = _read_metadata(cursor, num_keys)
            self.tensors = _read_tensors(cursor, num_tensors, _alignment(self.metadata, cursor), self._reader)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def read_rows(self, tensor: GgufTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:  # [stop - start, bytes]
        """See `FileReader.read_rows`."""
        return self._reader.read_rows(tensor, start, stop)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and the two counts: (tensors, keys)."""
    magic = cursor.scalar("<I", "the magic number")
    if magic != 0x46554747:
        raise cursor.error("it doesn't start with GGUF, so it isn't a GGUF file")
    version = int(cursor.scalar("<I", "the version"))
    if version & 0xFFFF == 0:
        raise cursor.error("it is a big-endian GGUF file, which isn't supported")
    if version not in (2, 3):
        raise cursor.error(f"it is GGUF version {version}; versions 2 and 3 are supported")
    num_tensors = cursor.count("<Q", MAX_TENSORS, "the number of tensors")
    return num_tensors, cursor.count("<Q", MAX_KEYS, "the number of keys")


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    strings_left = MAX_ARRAY_STRINGS
    for _ in range(num_keys):
        key = cursor.text(MAX_NAME_BYTES, "a key")
        if key in metadata:
            raise cursor.error(f"key {key!r} occurs twice")
        kind = cursor.kind(f"key {key!r}")
        if kind is _Kind.ARRAY:
            metadata[key] = value = _read_array(cursor, key, strings_left)
            strings_left -= len(value) if isinstance(value, list) else 0
        elif kind is _Kind.STRING:
            metadata[key] = cursor.text(MAX_STRING_BYTES, f"key {key!r}")
        else:
            metadata[key] = cursor.scalar(_SCALARS[kind], f"key {key!r}")
    return metadata


def _read_array(cursor: _Cursor, key: str, strings_left: int) -> list[str] | npt.NDArray[np.generic]:
    """An array value. Arrays of arrays are refused: no known key has one."""
    kind = cursor.kind(f"the items of {key!r}")
    if kind is _Kind.ARRAY:
        raise cursor.error(f"key {key!r} nests arrays")
    limit = strings_left if kind is _Kind.STRING else MAX_ARRAY_NUMBERS
    count = cursor.count("<Q", limit, f"the number of items of {key!r}")
    if kind is _Kind.STRING:
        return cursor.texts(count, f"an item of {key!r}")
    return cursor.numbers(kind, count, f"key {key!r}")


def _alignment(metadata: dict[str, Value], cursor: _Cursor) -> int:
    """Bytes to which tensor data is aligned: a power of two, at most `MAX_ALIGNMENT_BYTES`."""
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(value, int) or isinstance(value, bool):
        raise cursor.error("general.alignment isn't a number")
    if not 1 <= value <= MAX_ALIGNMENT_BYTES or value & (value - 1):
        raise cursor.error(f"general.alignment is {value}; it must be a power of two up to {MAX_ALIGNMENT_BYTES:,}")
    return value


def _read_tensors(
    cursor: _Cursor, num_tensors: int, alignment_bytes: int, reader: FileReader
) -> dict[str, GgufTensor]:
    """All tensor descriptions, with absolute offsets, checked to lie in the file and not to overlap."""
    found: list[tuple[str, int, int, int, int, int]] = []
    for _ in range(num_tensors):
        name = cursor.text(MAX_NAME_BYTES, "a tensor name")
        num_dims = int(cursor.scalar("<I", f"the dimensions of {name!r}"))
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.error(f"tensor {name!r} has {num_dims} dimensions, 1 to {MAX_DIMS} are allowed")
        dims = [cursor.count("<Q", reader.size_bytes * 8, f"a dimension of {name!r}") for _ in range(num_dims)]
        if 0 in dims:
            raise cursor.error(f"tensor {name!r} has an empty dimension")
        rows = 1
        for dim in dims[1:]:
            rows *= dim
        type_id = int(cursor.scalar("<I", f"the type of {name!r}"))
        offset = int(cursor.scalar("<Q", f"the offset of {name!r}"))
        if offset % alignment_bytes:
            raise cursor.error(f"tensor {name!r} isn't aligned to {alignment_bytes} bytes")
        found.append((name, rows, dims[0], type_id, offset, num_dims))
    base = -(-cursor.position // alignment_bytes) * alignment_bytes
    tensors: dict[str, GgufTensor] = {}
    for name, rows, cols, type_id, offset, num_dims in found:
        if name in tensors:
            raise cursor.error(f"tensor {name!r} occurs twice")
        try:
            size_bytes = rows * row_bytes(type_id, cols)
        except ModelFileError as exc:
            raise cursor.error(f"tensor {name!r}: {exc}") from None
        reader.check(base + offset, size_bytes, f"tensor {name!r}")
        tensors[name] = GgufTensor(name, rows, cols, num_dims, base + offset, size_bytes, type_id)
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.offset + before.size_bytes > after.offset:
            raise cursor.error(f"tensors {before.name!r} and {after.name!r} overlap")
    return tensors

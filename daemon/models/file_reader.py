"""Bounded reads of a file that may be damaged: no read beyond its size, no allocation before the check."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from tierd.daemon.models.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `rows` x `cols` (a vector has one row), `offset` from the start of the file."""

    name: str
    rows: int
    cols: int
    num_dims: int
    offset: int
    size_bytes: int


class FileReader:
    """A regular file, opened read-only, read with `pread`.

    Not `mmap`: a file that shrinks while it is mapped kills the process with SIGBUS, and mapped pages would count as
    resident memory. Threading: one reader may be used from several threads, since `pread` has no position.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises ModelFileError if it isn't a readable regular file."""
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as exc:
            raise ModelFileError(f"can't open {path.name}: {exc.strerror}; check the path and its permissions") from exc
        info = os.fstat(self._fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(self._fd)
            raise ModelFileError(f"{path.name} isn't a regular file; give the path of a model file")
        self.path = path
        self.size_bytes = info.st_size

    def close(self) -> None:
        """Close the file; harmless when closed already."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def check(self, offset: int, count_bytes: int, what: str) -> None:
        """Raises ModelFileError unless `[offset, offset + count_bytes)` lies inside the file."""
        if offset < 0 or count_bytes < 0 or offset + count_bytes > self.size_bytes:
            raise ModelFileError(
                f"{self.path.name}: {what} needs bytes up to {offset + count_bytes:,} of a file of "
                f"{self.size_bytes:,}; the file is truncated or damaged, fetch it again"
            )

    def read(self, offset: int, count_bytes: int, what: str) -> npt.NDArray[np.uint8]:
        """`count_bytes` bytes at `offset` as a fresh array. Raises ModelFileError if the file hasn't got them."""
        self.check(offset, count_bytes, what)
        out = np.empty(count_bytes, np.uint8)
        view = out.data
        done = 0
        while done < count_bytes:
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if got == 0:
                raise ModelFileError(f"{self.path.name} became shorter while {what} was read; fetch it again")
            done += got
        return out

    def read_rows(self, tensor: StoredTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:  # [stop - start, bytes]
        """Rows `start` to `stop` of a tensor as they lie in the file, one row of bytes each."""
        if not 0 <= start <= stop <= tensor.rows:
            raise ValueError(f"rows {start}:{stop} of {tensor.rows}")
        size = tensor.size_bytes // tensor.rows
        raw = self.read(tensor.offset + start * size, (stop - start) * size, f"tensor {tensor.name}")
        return raw.reshape(stop - start, size)

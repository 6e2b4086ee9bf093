"""Many reads of a file with two system calls: Linux's own asynchronous I/O (`io_submit`), for files with O_DIRECT.

A thread of Python that waits for one read at a time gives the interpreter up and takes it back for each, which on a
busy machine costs more than the read. Here it does so once for a batch, and the disk sees the whole batch at once.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

MAX_BATCH = 128  # pieces of one batch
MAX_CONTEXTS = 16  # kept for the next batch: one for each thread that is at it
_IOCB_CMD_PREADV = 7

# Called with the number of a piece, and the bytes read or a negative errno.
Arrived: TypeAlias = Callable[[int, int], None]

# Numbers of io_setup, io_destroy, io_getevents, io_submit.
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}

# struct iocb and struct io_event of <linux/aio_abi.h>, little endian.
_IOCB = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<i4"), ("opcode", "<u2"), ("priority", "<i2"), ("fd", "<u4"),
        ("buf", "<u8"), ("nbytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"), ("resfd", "<u4"),
    ]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("res", "<i8"), ("res2", "<i8")])


class AioReader:
    """Reads in batches. Any thread, several at once; each batch has a kernel context of its own."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        # A 32-bit process on such a machine has other numbers, and another system other calls.
        known = sys.platform == "linux" and sys.maxsize > 1 << 32
        self._calls = _CALLS.get(platform.machine()) if known else None
        self._contexts: deque[int] = deque()

    def read(
        self,
        fd: int,
        offsets: npt.NDArray[np.int64],
        vectors: npt.NDArray[np.uint64],
        arrived: Arrived | None = None,
    ) -> npt.NDArray[np.int64]:
        """Read pieces of a file: bytes read or a negative errno for each. The memory must stay until this returns.

        Args:
            offsets: where each piece starts. [n]
            vectors: address and length of the buffers that each fills in turn. [n, buffers, 2]
            arrived: told of each piece when it has come, while the disk works on the others.

        Raises OSError when batches can't be had here at all.
        """
        count, buffers = vectors.shape[:2]
        if count > MAX_BATCH:
            raise ValueError(f"a batch of {count} pieces, at most {MAX_BATCH}")
        vectors = np.ascontiguousarray(vectors)
        blocks = np.zeros(count, dtype=_IOCB)
        blocks["data"] = np.arange(count)
        blocks["opcode"] = _IOCB_CMD_PREADV
        blocks["fd"] = fd
        blocks["buf"] = vectors.ctypes.data + np.arange(count, dtype=np.uint64) * np.uint64(buffers * 16)
        blocks["nbytes"] = buffers
        blocks["offset"] = offsets
        context = self._take()
        try:
            results = self._run(context, blocks, arrived)
        except BaseException:
            self._destroy(context)  # waits for what is under way: it writes into the caller's memory
            raise
        self._contexts.append(context)
        while len(self._contexts) > MAX_CONTEXTS:
            self._destroy(self._contexts.popleft())
        return results

    def close(self) -> None:
        """Give the kernel's contexts back. No batch is running."""
        while self._contexts:
            self._destroy(self._contexts.pop())

    def _run(
        self, context: int, blocks: npt.NDArray[np.void], arrived: Arrived | None
    ) -> npt.NDArray[np.int64]:
        assert self._calls is not None
        _, _, getevents, submit = self._calls
        count = len(blocks)
        pointers = blocks.ctypes.data + np.arange(count, dtype=np.uint64) * np.uint64(_IOCB.itemsize)
        events = np.zeros(count, dtype=_EVENT)
        results = np.full(count, -errno.EIO, dtype=np.int64)
        sent = ended = 0
        while ended < count:
            if sent < count:
                sent += self._call(submit, context, count - sent, pointers.ctypes.data + 8 * sent)
            least = sent - ended if arrived is None else 1
            got = self._call(getevents, context, least, sent - ended, events.ctypes.data, 0)
            results[events["data"][:got].astype(np.int64)] = events["res"][:got]
            ended += got
            if arrived is not None:
                for number, moved in zip(events["data"][:got].tolist(), events["res"][:got].tolist(), strict=True):
                    arrived(number, moved)
        return results

    def _take(self) -> int:
        try:
            return self._contexts.pop()
        except IndexError:
            pass
        if self._calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        context = ctypes.c_ulong(0)
        self._call(self._calls[0], MAX_BATCH, ctypes.addressof(context))
        return context.value

    def _destroy(self, context: int) -> None:
        if self._calls is not None:
            self._libc.syscall(self._calls[1], ctypes.c_ulong(context))

    def _call(self, number: int, *arguments: int) -> int:
        while True:
            found: int = self._libc.syscall(number, *(ctypes.c_ulong(argument) for argument in arguments))
            code = ctypes.get_errno()
            if found >= 0:
                return found
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

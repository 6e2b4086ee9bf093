"""The one place that asks the system for blocks of memory: arenas, rings and transfer buffers come from here.

So one seam makes memory run out in a test, and one rule holds: what was asked for is there or the caller hears ENOMEM.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import sys

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux: the same number on x86-64 and arm64; Python 3.11 lacks it
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_PIECE_BYTES = 8 << 20  # the kernel holds the lock of the address space meanwhile
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def block(size_bytes: int, *, reserve: bool = False, large_pages: bool = False) -> mmap.mmap:
    """Zeroed memory on a page boundary. Raises OSError (ENOMEM) when the system refuses it.

    Args:
        reserve: only address space: not counted against the system's commit limit until it is touched.
        large_pages: where the system has them. For memory that kernels read in pieces.

    Private, not shared: only then does MADV_DONTNEED return memory, and large pages need no setting of the system's.
    """
    try:
        found = mmap.mmap(-1, max(size_bytes, 1), flags=_PRIVATE | (_NORESERVE if reserve else 0))
    except OverflowError:
        raise OSError(errno.ENOMEM, "more than an address can hold") from None
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            found.madvise(mmap.MADV_HUGEPAGE)
    return found


def populate(address: int, size_bytes: int) -> None:
    """Have memory made now for addresses that were only reserved; what is in it already stays. Any thread, without GIL.

    Address and size in whole pages. Where the system can't, nothing happens: it makes the memory when it is touched.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    for start in range(address, address + size_bytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, address + size_bytes - start)
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
            return

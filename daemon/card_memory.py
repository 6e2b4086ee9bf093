"""Whether there is a card that tierd can compute on, and how much of its memory is free: asked before a model loads.

By NVML through ctypes: milliseconds and little memory, where CUDA itself would take hundreds of both. Without that
library there is no card, which is found out in no time.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

log = logging.getLogger("tierd.card")

LIBRARY = "libnvidia-ml.so.1"
ANSWER_S = 10.0  # for the driver: a card whose driver hangs can't be computed on
MIN_CAPABILITY = (8, 0)  # as `engine.backend_cuda`


class CardMemory(NamedTuple):
    """A card that can be computed on, in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


def probe_card(
    load: Callable[[str], Any] | None = None, env: Mapping[str, str] = os.environ,
    installed: Callable[[str], bool] | None = None, answer_s: float = ANSWER_S,
) -> CardMemory | None:  # fmt: skip
    """The first card that CUDA would show an engine; None without one, or without torch and Triton to use it, or when
    the driver does not answer within `answer_s`.

    Args:
        load: gives the library; tests hand one in.
        installed: whether a module can be imported.
    """
    import ctypes  # 4 ms, which every command would pay

    shown = env.get("CUDA_VISIBLE_DEVICES")
    first = "0" if shown is None else shown.split(",")[0].strip()
    if first in ("", "-1"):
        return None
    try:
        library = (load or ctypes.CDLL)(LIBRARY)
    except OSError:
        return None
    if not all((installed or _is_installed)(name) for name in ("torch", "triton")):
        return None
    from tierd.daemon.aside import within  # a thread: only where there may be a card

    with contextlib.suppress(TimeoutError):
        return within(lambda: _opened(library, first), answer_s)
    log.warning("the driver of the card did not answer within %g s: no card is used", answer_s)
    return None


def _opened(library: Any, which: str) -> CardMemory | None:
    if library.nvmlInit_v2():
        return None
    try:
        return _look(library, which)
    finally:
        library.nvmlShutdown()


def _look(library: Any, which: str) -> CardMemory | None:
    """The card of an index or a UUID; None when the library refuses anything, or the card is too old."""
    import ctypes

    card, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    major, minor = ctypes.c_int(), ctypes.c_int()
    if which.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(which)), ctypes.byref(card))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(which.encode(), ctypes.byref(card))
    failed = (
        failed
        or library.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory))
        or library.nvmlDeviceGetName(card, name, ctypes.c_uint(len(name)))
        or library.nvmlDeviceGetCudaComputeCapability(card, ctypes.byref(major), ctypes.byref(minor))
    )
    if failed or (major.value, minor.value) < MIN_CAPABILITY:
        return None
    return CardMemory(name.value.decode("utf-8", "replace"), int(memory[0]), int(memory[1]))


def _is_installed(name: str) -> bool:
    import importlib.util

    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(name) is None:
            return False
        return name != "torch" or not _torch_is_for_cpus()
    return False


def _torch_is_for_cpus() -> bool:
    from importlib.metadata import PackageNotFoundError, version  # 20 ms: only where there is a card

    try:
        return "+cpu" in version("torch")
    except PackageNotFoundError:
        return False

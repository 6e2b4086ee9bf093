"""Whether there is a card that tierd can compute on, and how much of its memory is free: asked before a model loads.

By NVML through ctypes: milliseconds and little memory, where CUDA itself would take hundreds of both. Without that
library there is no card, which is found out in no time. Where there are several, CUDA says which of them it shows first
(`cuda_order`): the two count them differently.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tierd.daemon.cuda_order import first_bus_id

log = logging.getLogger("tierd.card")

LIBRARY = "libnvidia-ml.so.1"
ANSWER_S = 10.0  # for the driver: a card whose driver hangs can't be computed on
MIN_CAPABILITY = (8, 0)  # as `engine.backend_cuda`
_UUIDS = ("GPU-", "MIG-")


class CardMemory(NamedTuple):
    """A card that can be computed on, in bytes."""

    name: str
    total_bytes: int
    free_bytes: int


def probe_card(
    load: Callable[[str], Any] | None = None, env: Mapping[str, str] = os.environ,
    installed: Callable[[str], bool] | None = None, answer_s: float = ANSWER_S,
    first: Callable[[Mapping[str, str]], str | None] = first_bus_id,
) -> CardMemory | None:  # fmt: skip
    """The first card that CUDA would show an engine; None without one, or without torch and Triton to use it, or when
    the driver does not answer within `answer_s`.

    Args:
        load: gives the library; tests hand one in.
        installed: whether a module can be imported.
        first: asks CUDA for the PCI bus id of its first card; needed where there are several.
    """
    import ctypes  # 4 ms, which every command would pay

    shown = env.get("CUDA_VISIBLE_DEVICES")
    wanted = "0" if shown is None else shown.split(",")[0].strip()
    if wanted in ("", "-1"):
        return None
    try:
        library = (load or ctypes.CDLL)(LIBRARY)
    except OSError:
        return None
    if not all((installed or _is_installed)(name) for name in ("torch", "triton")):
        return None
    from tierd.daemon.aside import within  # a thread: only where there may be a card

    with contextlib.suppress(TimeoutError):
        return within(lambda: _opened(library, wanted, lambda: first(env)), answer_s)
    log.warning("the driver of the card did not answer within %g s: no card is used", answer_s)
    return None


def _opened(library: Any, wanted: str, first: Callable[[], str | None]) -> CardMemory | None:
    if library.nvmlInit_v2():
        return None
    try:
        card = _found(library, wanted, first)
        return None if card is None else _look(library, card)
    finally:
        library.nvmlShutdown()


def _found(library: Any, wanted: str, first: Callable[[], str | None]) -> Any:
    """The handle of the card that CUDA shows first, where `wanted` is the first that it is to show: an index of its
    own, or a UUID or the beginning of one. None without one.
    """
    import ctypes

    card, count = ctypes.c_void_p(), ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    if count.value > 1 and not wanted.startswith(_UUIDS) and (bus_id := first()) is not None:
        failed = library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(card))
        return None if failed else card
    if wanted.startswith("MIG-"):
        return None if library.nvmlDeviceGetHandleByUUID(wanted.encode(), ctypes.byref(card)) else card
    if wanted.isdigit():
        if count.value > 1:
            log.warning("CUDA does not say which card it shows first: it is taken for card %s of the driver's", wanted)
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(wanted)), ctypes.byref(card))
        return None if failed else card
    matching = []
    for index in range(count.value):
        card, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(card))
        failed = failed or library.nvmlDeviceGetUUID(card, uuid, ctypes.c_uint(len(uuid)))
        if not failed and uuid.value.decode("ascii", "replace").startswith(wanted):
            matching.append(card)
    return matching[0] if len(matching) == 1 else None  # CUDA refuses what several could be


def _look(library: Any, card: Any) -> CardMemory | None:
    """A card; None when the library refuses anything, or it is too old."""
    import ctypes

    name = ctypes.create_string_buffer(96)
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = (
        library.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory))
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

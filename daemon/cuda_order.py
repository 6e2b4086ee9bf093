"""Which card CUDA shows a process first: `python -m tierd.daemon.cuda_order` prints its PCI bus id.

NVML counts cards by their place on the bus, CUDA the fastest first unless `CUDA_DEVICE_ORDER` says otherwise, and of
those that `CUDA_VISIBLE_DEVICES` leaves. What that comes to CUDA alone knows. It is asked in a process of its own, for
its library takes memory that would never be given back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

LIBRARY = "libcuda.so.1"
ANSWER_S = 8.0  # less than the daemon waits for both libraries together
_BUS_ID_BYTES = 32


def first_bus_id(env: Mapping[str, str]) -> str | None:
    """As a process with this environment would find it; None when CUDA does not answer, or shows none."""
    import subprocess  # only where there are several cards

    command = [sys.executable, "-m", "tierd.daemon.cuda_order"]
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def ask(load: Callable[[str], Any] | None = None) -> str:
    """The PCI bus id of CUDA's first card in this process; "" without one."""
    import ctypes

    try:
        library = (load or ctypes.CDLL)(LIBRARY)
    except OSError:
        return ""
    card, name = ctypes.c_int(), ctypes.create_string_buffer(_BUS_ID_BYTES)
    failed = (
        library.cuInit(ctypes.c_uint(0))
        or library.cuDeviceGet(ctypes.byref(card), ctypes.c_int(0))
        or library.cuDeviceGetPCIBusId(name, ctypes.c_int(len(name)), card)
    )
    return "" if failed else name.value.decode("ascii", "replace")


if __name__ == "__main__":
    sys.stdout.write(ask() + "\n")

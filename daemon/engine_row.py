"""One engine as `ps`, `status` and `/metrics` tell it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from tierd.daemon.child import EngineProcess, EngineState
from tierd.daemon.errors import TierdError

STATUS_TIMEOUT_S = 0.25  # `status` answers at once, with the last figures when an engine is slow


async def refresh(engine: EngineProcess) -> None:
    """Ask an engine how it is; nothing new is known when it does not answer at once."""
    if engine.state is not EngineState.READY:
        return
    with contextlib.suppress(TierdError):
        engine.status = await engine.call("status", {}, STATUS_TIMEOUT_S)


def row(engine: EngineProcess, idle_s: float, expires_in_s: float | None) -> dict[str, Any]:
    """What was last known. `expires_in_s`: None for an engine that stays."""
    return {
        "model": engine.model,
        "pid": engine.pid,
        "state": str(engine.state),
        "progress": engine.progress,
        "rss_bytes": _rss_bytes(engine.pid),
        "idle_s": round(idle_s, 3),
        "expires_in_s": None if expires_in_s is None else round(expires_in_s, 3),
        "running": engine.status.get("running", engine.streams) if engine.streams else 0,
        "waiting": engine.status.get("waiting", 0) if engine.streams else 0,
        "notices": list(engine.notices),
        "writes": engine.status.get("writes", {}),
        "weights": engine.status.get("weights", {}),
        "speculation": engine.status.get("speculation", {}),
        "chosen": engine.chosen,
    }


def _rss_bytes(pid: int | None) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0

"""A front whose engines share the memory of a machine that is made up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from front_harness import Front, make_settings, running

from tierd.daemon.machine import Machine
from tierd.daemon.room import Arenas

GB = 4096 * 250_000


def roomy_front(
    tmp_path: Path, machine: Machine | Callable[[], Machine], **changes: Any
) -> AbstractAsyncContextManager[Front]:
    """As many models as fit."""
    return running(make_settings(tmp_path, **changes), max_loaded=0, machine=machine)


def arenas_of(front: Front, name: str) -> Arenas:
    """What an engine of the front was given last: at its start, or by a resize."""
    return front.prepare.books.held[name].arenas

"""Pulls on behalf of clients: each in a process of its own, a few at once, ended with their client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from tierd.daemon.config import Settings
from tierd.daemon.errors import LOGS_HINT, BadRequest, DownloadFailed, TooBusy, from_wire
from tierd.daemon.models import catalog

COMMAND = (sys.executable, "-m", "tierd.daemon.pull_process")
MAX_PULLS = 2
LINE_BYTES = 64 << 10
EXIT_S = 5.0
# What the choice of a weight format depends on. Not all: an order can be read by whoever lists processes.
_CHOOSING = ("device_mem", "host_mem", "nvme_mem", "nvme_min_free", "weights_mem", "threads", "kv_format", "ctx",
             "max_batch", "max_streams", "card")  # fmt: skip


class Puller:
    """Threading: for one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running = 0

    async def pull(self, ref: str) -> AsyncGenerator[dict[str, Any], None]:
        """`{stage, done, total}` again and again, some with a `text` for people, and `{name}` at the end.

        Closing the iterator ends the pull. Raises BadRequest for a reference that is a path, TooBusy, and what the pull
        fails with.
        """
        check_ref(ref)
        if self._running >= MAX_PULLS:
            raise TooBusy(f"{MAX_PULLS} models are being pulled already", hint="try again when one of them is there")
        self._running += 1
        try:
            async with contextlib.aclosing(self._lines(ref)) as lines:
                async for line in lines:
                    if "error" in line:
                        raise from_wire(line["error"])
                    yield line
                    if "name" in line:
                        return
            raise DownloadFailed(f"the pull of {ref} ended without a word", hint=LOGS_HINT)
        finally:
            self._running -= 1

    async def _lines(self, ref: str) -> AsyncGenerator[dict[str, Any], None]:
        order = {
            "ref": ref, "models_dir": str(self._settings.models_dir), "cache_dir": str(self._settings.cache_dir),
            "offline": self._settings.offline,
            "settings": {name: getattr(self._settings, name) for name in _CHOOSING},
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *COMMAND, msgspec.json.encode(order).decode(), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES,
            start_new_session=True,  # what it starts itself, pip for one, ends with it
        )  # fmt: skip
        try:
            while process.stdout is not None and (line := await process.stdout.readline()):
                yield msgspec.json.decode(line)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def check_ref(ref: str) -> None:
    """Raises BadRequest unless a client may ask for it: a path would let it read any file of the daemon's user."""
    if catalog.HUB_REF.fullmatch(ref):
        return
    catalog.parse_ref(ref)
    if ref.lower().endswith(".gguf"):
        raise BadRequest("a file can't be pulled from here", hint="`tierd pull PATH` does that", param="model")

"""A process that stands for the daemon's socket, such as `ssh HOST tierd proxy`: its pipes, its words, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Self

from tierd.clients.common import RECEIVE_BYTES

END_S = 2.0  # how long it may take to end
WORDS_BYTES = 8192  # of what it says beside its work, the newest: why it ended stands there


class Bridge:
    """`start` makes one. Threading: one event loop."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.writer, self.reader = process.stdin, process.stdout
        self.words = bytearray()
        self._process = process
        self._listening = asyncio.create_task(self._listen(process.stderr), name="tierd-client-bridge")

    @classmethod
    async def start(cls, command: Sequence[str]) -> Self:
        """Start it. It has no terminal: what asks for a password fails instead of writing over a screen.

        Raises OSError.
        """
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        )

    async def _listen(self, pipe: asyncio.StreamReader) -> None:
        """All the time: a pipe that is full stops who writes into it."""
        while data := await pipe.read(RECEIVE_BYTES):
            self.words += data
            del self.words[:-WORDS_BYTES]

    async def last_words(self) -> str | None:
        """The last line of what it said, when it has ended; None when it does not end in time."""
        if not (await asyncio.wait([self._listening], timeout=END_S))[0]:
            return None
        lines = (line.strip() for line in reversed(self.words.decode(errors="replace").splitlines()))
        return next((line for line in lines if line), "it said nothing")

    async def aclose(self) -> None:
        """Its input is closed, so it ends by itself; what does not is ended."""
        try:
            for stop in (self._process.terminate, self._process.kill):
                if await self._has_ended():
                    return
                with contextlib.suppress(ProcessLookupError):
                    stop()
            await self._process.wait()
        finally:
            self._listening.cancel()
            await asyncio.wait([self._listening])

    async def _has_ended(self) -> bool:
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

"""Exact turns: the tokens that were sampled for an answer, found again by what the client saw of it.

A client sends text and calls back, not tokens. Tokenized anew they may differ from those that were sampled (another
split of a word, other white space in a call's JSON), and from the first difference on no page fits. So the tokens of an
answer are kept under a digest of the conversation before it and of what was told, and put in the place of the text.

Kept in memory and in a SQLite file beside the pages. The file is a cache: one that can't be read is begun again, one
that can't be written is given up.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierd.daemon.engine.answer import parse
from tierd.daemon.engine.fair import Fair
from tierd.daemon.protocol import Message, Tool, ToolCall

log = logging.getLogger(__name__)

FILE_NAME = "turns.sqlite"
MAX_TOKENS = 2 << 20  # of all turns: 8 MiB
_TURN_COST = 64  # tokens that a turn counts beside its own: key, tail, row
_DIGEST_BYTES = 16
TAIL_CHARS = 96
_VERSION = 2
_SCHEMA = """CREATE TABLE turns (key BLOB PRIMARY KEY, place INTEGER NOT NULL, tail TEXT NOT NULL,
    thought INTEGER NOT NULL, tokens BLOB NOT NULL, tenant BLOB NOT NULL)"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. `tail`: the last characters of the prompt it was sampled after. `thought`: it holds reasoning."""

    tokens: tuple[int, ...]
    tail: str
    thought: bool


@dataclass(frozen=True, slots=True)
class _Kept:
    turn: Turn
    tenant: bytes


def start(salt: bytes, tools: Sequence[Tool]) -> bytes:
    """The digest of a conversation that has no messages yet."""
    shown = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return _digest(salt, json.dumps(shown, sort_keys=True).encode())


def after(before: bytes, message: Message) -> bytes:
    """The digest of a conversation with one message more.

    Ids of calls and white space around an answer do not count: clients make and trim them as they like. Nor does
    reasoning: most don't send it back.
    """
    content, calls = message.content, [[call.name, _canonical(call)] for call in message.tool_calls]
    if message.role == "assistant":
        content = content.strip()
    return _digest(before, json.dumps([message.role, content, calls]).encode())


def _canonical(call: ToolCall) -> str:
    value = parse(call.arguments) if call.arguments.strip() else {}
    return call.arguments if value is None else json.dumps(value, sort_keys=True)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class Turns:
    """The turns of one model. `path` is their file, None to keep them in memory only.

    Threading: `put` and `get` from any thread; `flush`, `clear` and `close` from one at a time.
    """

    def __init__(self, path: Path | None, max_tokens: int = MAX_TOKENS) -> None:
        self._lock = threading.Lock()
        self._turns: Fair[bytes, _Kept] = Fair(max_tokens)
        self._changed: set[bytes] = set()  # to be written, or to be removed if they are gone; bounded by the turns
        self._place = 0
        self._file = _open(path) if path is not None else None
        if self._file is not None:
            self._read(self._file)

    def __len__(self) -> int:
        return len(self._turns)

    def get(self, key: bytes) -> Turn | None:
        """The turn with this digest."""
        with self._lock:
            found = self._turns.get(key)
        return None if found is None else found.turn

    def put(self, key: bytes, turn: Turn, tenant: bytes = b"") -> None:
        """Keep a turn of a tenant; the least recently used of the tenant with the most of them make room."""
        with self._lock:
            gone = self._turns.put(key, _Kept(turn, tenant), tenant, len(turn.tokens) + _TURN_COST)
            self._changed.update((key, *gone))

    def flush(self) -> None:
        """Write what has changed."""
        with self._lock:
            changed, self._changed = self._changed, set()
            rows = [(key, self._turns.peek(key)) for key in changed]
        if self._file is None or not rows:
            return
        try:
            with self._file:
                for key, kept in rows:
                    if kept is None:
                        self._file.execute("DELETE FROM turns WHERE key = ?", (key,))
                    else:
                        self._place += 1
                        turn, packed = kept.turn, array("i", kept.turn.tokens).tobytes()
                        self._file.execute(
                            "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?)",
                            (key, self._place, turn.tail, turn.thought, packed, kept.tenant),
                        )
        except (sqlite3.Error, UnicodeEncodeError) as exc:
            log.warning("turns are kept in memory only from now on: %s", exc)
            self.close()

    def clear(self) -> None:
        """Forget all turns, on the disk too."""
        with self._lock:
            self._turns.clear()
            self._changed.clear()
        if self._file is not None:
            try:
                with self._file:
                    self._file.execute("DELETE FROM turns")
                self._file.execute("VACUUM")
            except sqlite3.Error as exc:
                log.warning("turns could not be removed from their file: %s", exc)

    def close(self) -> None:
        """Close the file. What was not flushed is lost."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _read(self, file: sqlite3.Connection) -> None:
        rows: Iterable[tuple[bytes, int, str, int, bytes, bytes]] = file.execute("SELECT * FROM turns ORDER BY place")
        try:
            for key, place, tail, thought, packed, tenant in rows:
                tokens = array("i")
                tokens.frombytes(packed)
                self.put(key, Turn(tuple(tokens), tail, bool(thought)), tenant)
                self._place = place
        except (sqlite3.Error, ValueError, TypeError) as exc:
            log.warning("some turns could not be read: %s", exc)
        self._changed = {key for key in self._changed if key not in self._turns}  # left are those that had to make room


def _open(path: Path) -> sqlite3.Connection | None:
    """The file of turns, begun again when it is damaged; None when there can be none."""
    for attempt in range(2):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            file = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
            try:
                if file.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                    file.execute("DROP TABLE IF EXISTS turns")
                    file.execute(_SCHEMA)
                    file.execute(f"PRAGMA user_version = {_VERSION}")
                file.execute("PRAGMA secure_delete = ON")
                file.execute("SELECT count(*) FROM turns").fetchone()
            except BaseException:
                file.close()
                raise
            return file
        except (sqlite3.Error, OSError) as exc:
            if attempt:
                log.warning("turns are kept in memory only: %s", exc)
            with contextlib.suppress(OSError):
                path.unlink()
    return None

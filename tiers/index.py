"""The index of the store: which page lies in which slot, in one SQLite file.

The index is the truth about what is stored: a slot whose row is not committed does not exist. It is trusted as little
as the slots are: everything a row says is checked against the slot's header before a page is used.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import stat
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tierd.tiers.errors import StoreBroken, StoreFull
from tierd.tiers.keys import KEY_BYTES, TOKEN_BYTES
from tierd.tiers.page import PageKey
from tierd.tiers.slot import FORMAT_VERSION, MAX_PAGE_TOKENS
from tierd.tiers.store_io import StoreIO

INDEX_NAME = "index.sqlite"
ASIDE_NAME = "index.sqlite.aside"  # one, the newest: for a look at what went wrong
SIDE_FILES = ("-wal", "-shm", "-journal")
ASIDE_NAMES = [ASIDE_NAME + suffix for suffix in ("", *SIDE_FILES)]

_SCHEMA = {
    "identity": "CREATE TABLE identity (namespace BLOB NOT NULL, record_bytes INTEGER NOT NULL,"
    " sections INTEGER NOT NULL, section_bytes INTEGER NOT NULL, file_slots INTEGER NOT NULL, opens INTEGER NOT NULL)",
    "pages": "CREATE TABLE pages (slot INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, parent BLOB NOT NULL,"
    " tokens BLOB NOT NULL, generation INTEGER NOT NULL, hits INTEGER NOT NULL, last_use_s REAL NOT NULL)",
}
# What every row must be; a row that is not is a damaged one, and its page a miss.
_SOUND_ROW = f"""typeof(slot) = 'integer' AND slot >= 0
    AND typeof(key) = 'blob' AND length(key) = {KEY_BYTES} AND typeof(parent) = 'blob' AND length(parent) = {KEY_BYTES}
    AND typeof(tokens) = 'blob' AND length(tokens) % {TOKEN_BYTES} = 0
    AND length(tokens) BETWEEN {TOKEN_BYTES} AND {TOKEN_BYTES * MAX_PAGE_TOKENS}
    AND typeof(generation) = 'integer' AND generation >= 0 AND typeof(hits) = 'integer' AND hits >= 0
    AND typeof(last_use_s) = 'real' AND abs(last_use_s) < 1e300"""
_MAX_OPENS = (1 << 31) - 1  # the upper half of a generation, which SQLite holds in 63 bits
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT)
_SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # the latter when a message quotes damaged names
_CHUNK_ROWS = 4096
MAX_TOUCHES = 4096  # kept in memory: they are worth no sync of their own, and a crash may forget them
# Codes that speak of the disk or the process. Any other while opening means that the content is not to be used; so does
# "read only", which a flipped byte of the file's header causes (a directory that can't be written fails before).
_NOT_CONTENT = (
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageMeta:
    """What is known of a stored page besides its bytes.

    Args:
        tokens: ids of the page's tokens, 1 up to the tokens of a page; fewer for a partial tail page.
        hits: how often it was used.
        last_use_s: when, on the clock of the caller.
    """

    key: PageKey
    parent: PageKey
    tokens: tuple[int, ...]
    hits: int
    last_use_s: float


class Row(NamedTuple):
    """The part of a row that a slot is checked against. `tokens` are little-endian 32-bit ids."""

    slot: int
    key: bytes
    parent: bytes
    tokens: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What the rows of an index are about; another identity means another store."""

    namespace: bytes
    record_bytes: int
    sections: int
    section_bytes: int
    file_slots: int


class IndexUnusable(Exception):
    """The file is damaged or of another store: set it aside."""


class Index:
    """One SQLite file with two connections: the owner's for changes, another for look-ups.

    Notes:
        `lookup` may be called from any thread, also while the owner commits (WAL readers never wait for the writer).
        Everything else is called under the store's lock.
        Raises StoreFull when SQLite finds no space, else StoreBroken; a change that raised is rolled back.
    """

    def __init__(self, writer: sqlite3.Connection, reader: sqlite3.Connection, opens: int) -> None:
        self.opens = opens  # how often this index was opened, this time included
        self._writer = writer
        self._reader = reader
        self._reader_lock = threading.Lock()
        self._touch_lock = threading.Lock()
        self._touched: dict[PageKey, tuple[int, float]] = {}

    @classmethod
    def open(cls, io: StoreIO, directory: Path, dir_fd: int, identity: Identity) -> Self:
        """Open the index, or make a new one where there is none.

        Raises IndexUnusable when its content is not to be used, StoreFull or StoreBroken when the disk fails.
        """
        path = directory / INDEX_NAME
        fresh = _reserve_name(io, path, dir_fd)
        with contextlib.ExitStack() as stack, _sqlite_errors():
            try:
                writer = io.connect(path)
                stack.callback(_close, writer)
                _configure(writer)
                if fresh:
                    _create(writer, identity)
                opens = _examine(writer, identity)
                reader = io.connect(path)
                stack.callback(_close, reader)
                _configure(reader)
            except _SQLITE_ERRORS as exc:
                if _code(exc) not in _NOT_CONTENT:
                    raise IndexUnusable(f"it is damaged ({exc})") from exc
                raise
            stack.pop_all()
            return cls(writer, reader, opens)

    def lookup(self, key: bytes) -> Row | None:
        """The row of a page. Any thread."""
        return self.lookup_many([key]).get(key)

    def lookup_many(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows of some pages by key, without the unknown ones. Any thread."""
        query = f"SELECT slot, key, parent, tokens, generation FROM pages WHERE key IN ({','.join('?' * len(keys))})"
        try:
            with self._reader_lock:
                found = self._reader.execute(query, keys).fetchall()
        except _SQLITE_ERRORS as exc:
            raise _store_error(exc) from exc
        return {row[1]: Row._make(row) for row in found}

    def slots(self) -> npt.NDArray[np.int64]:
        """Every slot with a row, ascending. int64[n]"""
        with _sqlite_errors():
            rows = self._writer.execute("SELECT slot FROM pages ORDER BY slot")
            return np.fromiter((slot for (slot,) in rows), dtype=np.int64)

    def rows_after(self, slot: int, count: int) -> list[Row]:
        """The next rows by slot, no more than so many."""
        query = "SELECT slot, key, parent, tokens, generation FROM pages WHERE slot > ? ORDER BY slot LIMIT ?"
        with _sqlite_errors():
            return [Row._make(row) for row in self._writer.execute(query, (slot, count))]

    def metas(self) -> Iterator[PageMeta]:
        """Every page, by slot, in chunks: no transaction stays open between two of them."""
        unpack = [struct.Struct(f"<{count}I").unpack for count in range(MAX_PAGE_TOKENS + 1)]
        query = "SELECT slot, key, parent, tokens, hits, last_use_s FROM pages WHERE slot > ? ORDER BY slot LIMIT ?"
        after = -1
        while True:
            with _sqlite_errors():
                chunk = self._writer.execute(query, (after, _CHUNK_ROWS)).fetchall()
            for _, key, parent, tokens, hits, last_use_s in chunk:
                yield PageMeta(key, parent, unpack[len(tokens) // TOKEN_BYTES](tokens), hits, last_use_s)
            if len(chunk) < _CHUNK_ROWS:
                return
            after = chunk[-1][0]

    def add(self, rows: Sequence[tuple[Row, PageMeta]]) -> list[int]:
        """Commit rows and the touches so far, all or none; returns the slots of rows that these replace."""
        replaced = []
        with self._transaction():
            self._write_touches()  # before the rows: they speak of what a row may replace
            for row, meta in rows:
                replaced += self._delete_key(row.key)
                self._writer.execute(
                    "INSERT INTO pages VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, meta.hits, float(meta.last_use_s))
                )
        return replaced

    def remove(self, keys: Iterable[bytes]) -> list[int]:
        """Commit the removal of pages; returns the slots they had. Unknown keys are skipped."""
        slots: list[int] = []
        with self._transaction():
            for key in keys:
                slots += self._delete_key(key)
        return slots

    def remove_row(self, row: Row) -> bool:
        """Commit the removal of this very row; False when it is gone or the page has been written anew since."""
        with self._transaction():
            cursor = self._writer.execute(
                "DELETE FROM pages WHERE slot = ? AND key = ? AND generation = ?", (row.slot, row.key, row.generation)
            )
            return cursor.rowcount == 1

    def remove_ranges(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Commit the removal of all rows whose slot is in [first, end) of a range; returns how many."""
        count = 0
        with self._transaction():
            for first, end in ranges:
                count += self._writer.execute("DELETE FROM pages WHERE slot BETWEEN ? AND ?", (first, end - 1)).rowcount
        return count

    def touch(self, usage: Mapping[PageKey, tuple[int, float]]) -> None:
        """Note (hits, last_use_s) of pages, in memory until the next `add` or `flush_touches`. Any thread."""
        for hits, last_use_s in usage.values():
            check_usage(hits, last_use_s)
        with self._touch_lock:
            self._touched.update(usage)
            while len(self._touched) > MAX_TOUCHES:
                self._touched.pop(next(iter(self._touched)))

    def flush_touches(self) -> None:
        """Commit the touches so far; those of unknown keys are skipped."""
        if self._touched:
            with self._transaction():
                self._write_touches()

    def clear(self) -> list[int]:
        """Commit the removal of every row; returns their slots. `compact` wipes the traces they leave in the file."""
        slots: list[int] = self.slots().tolist()
        with self._transaction():
            self._writer.execute("DELETE FROM pages")
        return slots

    def compact(self) -> None:
        """Rewrite the file without its free pages and empty the write-ahead log. Look-ups go on for most of it."""
        with _sqlite_errors():
            self._writer.execute("VACUUM")
            with self._reader_lock:  # a reader in the middle of a query would keep the log alive
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def rebuild(self) -> None:
        """Make the look-up by key anew from the rows."""
        with _sqlite_errors():
            self._writer.execute("REINDEX")

    def check(self) -> list[str]:
        """Findings of SQLite's own full check; empty when right."""
        with _sqlite_errors():
            found = [str(row[0]) for row in self._writer.execute("PRAGMA integrity_check(20)")]
        return [] if found == ["ok"] else [f"index: {line}" for line in found]

    def close(self) -> None:
        """Close both connections; the log is folded into the file."""
        with self._reader_lock:
            _close(self._reader)
        _close(self._writer)

    def _delete_key(self, key: bytes) -> list[int]:
        slots = [row[0] for row in self._writer.execute("SELECT slot FROM pages WHERE key = ?", (key,))]
        for slot in slots:
            self._writer.execute("DELETE FROM pages WHERE slot = ?", (slot,))
        return slots

    def _write_touches(self) -> None:
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        self._writer.executemany(
            "UPDATE pages SET hits = ?, last_use_s = ? WHERE key = ?",
            [(hits, float(last_use_s), key) for key, (hits, last_use_s) in touched.items()],
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with _sqlite_errors():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._writer.execute("COMMIT")
            except BaseException:
                # The error that counts is the first one; a rollback that fails leaves the store to close itself.
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                raise


def is_damage(exc: StoreBroken) -> bool:
    """True when the content of the index is at fault, not the disk."""
    cause = exc.__cause__
    if isinstance(cause, sqlite3.DatabaseError):
        return _code(cause) in _DAMAGE
    return isinstance(cause, UnicodeDecodeError)


def check_usage(hits: int, last_use_s: float) -> None:
    """Raise ValueError unless these can be stored."""
    if not 0 <= hits < 1 << 62 or not math.isfinite(last_use_s):
        raise ValueError(f"hits {hits}, last use {last_use_s}: not a count and a time")


def _reserve_name(io: StoreIO, path: Path, dir_fd: int) -> bool:
    """Create the file, private from its first moment, or look that it is an ordinary one; True when it is new."""
    try:
        io.close(io.open(INDEX_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=dir_fd))
        for suffix in SIDE_FILES:  # a leftover log would be replayed into the new file
            with contextlib.suppress(FileNotFoundError):
                io.unlink(INDEX_NAME + suffix, dir_fd=dir_fd)
        io.fsync(dir_fd)
        return True
    except FileExistsError:
        # SQLite opens its files by name and follows links; in a private directory only we could have put one there.
        for suffix in ("", *SIDE_FILES):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(io.lstat(path.with_name(INDEX_NAME + suffix)).st_mode):
                    raise IndexUnusable(f"{INDEX_NAME}{suffix} is not a file") from None
        return False


def _configure(connection: sqlite3.Connection) -> None:
    for pragma in (
        "trusted_schema = OFF",
        "cell_size_check = ON",
        "wal_autocheckpoint = 256",  # the log stays at about 1 MiB: it is not counted in the capacity
        "mmap_size = 0",  # a file that is cut under a mapping kills the process
        "journal_mode = WAL",
        "synchronous = FULL",  # a commit is durable when it returns, not merely ordered
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()


def _create(connection: sqlite3.Connection, identity: Identity) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA.values():
        connection.execute(statement)
    connection.execute("INSERT INTO identity VALUES (?, ?, ?, ?, ?, 0)", astuple(identity))
    connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
    connection.execute("COMMIT")


def _examine(connection: sqlite3.Connection, identity: Identity) -> int:
    """Check everything but the rows' truth; drop damaged rows; count the opening. Raises IndexUnusable."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != FORMAT_VERSION:
        raise IndexUnusable(f"it has version {version}, this program writes {FORMAT_VERSION}")
    found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    if dict(found) != _SCHEMA:
        raise IndexUnusable("its tables are not ours")
    # The full check compares the look-up by key entry by entry: 3.5 s for a million rows, this one 0.3 s. An entry that
    # is wrong makes its page a miss; one that trips SQLite turns the store off and has the index set aside.
    verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise IndexUnusable(f"it is damaged ({verdict})")
    rows = connection.execute("SELECT * FROM identity").fetchall()
    if len(rows) != 1 or Identity(*rows[0][:-1]) != identity:
        raise IndexUnusable("it belongs to another model, page layout or file size")
    opens = rows[0][-1]
    if not isinstance(opens, int) or not 0 <= opens < _MAX_OPENS:
        raise IndexUnusable("its count of openings is out of range")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE identity SET opens = opens + 1")
    connection.execute(f"DELETE FROM pages WHERE NOT ({_SOUND_ROW})")
    connection.execute("COMMIT")
    return opens + 1


def _close(connection: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):  # what was committed is durable, whatever closing says
        connection.close()


def _code(exc: Exception) -> int:
    """The primary result code; errors of the Python layer have none."""
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF


@contextlib.contextmanager
def _sqlite_errors() -> Iterator[None]:
    try:
        yield
    except _SQLITE_ERRORS as exc:
        raise _store_error(exc) from exc


def _store_error(exc: Exception) -> StoreFull | StoreBroken:
    # The memory that connections share lies in a file, too: it says that there is no space in its own way.
    if _code(exc) == sqlite3.SQLITE_FULL or getattr(exc, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHMSIZE:
        return StoreFull(f"no space for the index ({exc})")
    return StoreBroken(f"the index failed ({exc})")

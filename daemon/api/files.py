"""Files that clients upload for batches, and those that batches write: kept on disk, bounded, each its tenant's own.

A file is its content and a small JSON beside it, written last: content without one is what an upload left that was
cut off, and goes at the next start. Until then it is a file to come, which counts like the others. Names on disk are
ids made here, never names of clients.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from tierd.daemon.errors import BadRequest, NotFound, OutOfSpace
from tierd.daemon.paths import make_private_dir

MAX_FILE_BYTES = 200 << 20  # of one upload, as OpenAI has it for batches
MAX_TOTAL_BYTES = 2 << 30  # of all files of all tenants: then nothing more is written
MAX_FILES = 1000  # likewise
MAX_NAME_CHARS = 255
MAX_PAGE = 10_000  # files in one listing
INPUT, OUTPUT = "batch", "batch_output"  # purposes
_ID = re.compile(r"file-[0-9a-f]{24}")
_CONTENT, _FACTS = ".jsonl", ".json"
FRESH = ".new"  # how a small file is called until it is whole


class File(msgspec.Struct, frozen=True):
    """A file as OpenAI describes it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileDeleted(msgspec.Struct, frozen=True):
    """The answer to a removal."""

    id: str
    object: str = "file"
    deleted: bool = True


class Kept(msgspec.Struct, frozen=True):
    """What the JSON beside a file holds."""

    tenant: str
    file: File
    created_s: float  # its `created_at` in full, for the order


class FileList(msgspec.Struct, frozen=True):
    """A part of a listing."""

    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Files:
    """The files of one directory. Every call may wait for the disk. Threading: one thread at a time."""

    def __init__(
        self, directory: Path, *, max_total_bytes: int = MAX_TOTAL_BYTES, max_files: int = MAX_FILES
    ) -> None:
        """Reads what is there. Raises PermissionDenied for a directory that is not ours."""
        self.directory = make_private_dir(directory)
        self._max_total_bytes = max_total_bytes
        self._max_files = max_files
        self._kept: dict[str, Kept] = {}
        self._coming: dict[str, int] = {}  # files that are being written: bytes so far
        for path in sorted(self.directory.glob(f"file-*{_FACTS}")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                kept = msgspec.json.decode(path.read_bytes(), type=Kept)
                if kept.file.id == path.stem and _ID.fullmatch(path.stem) and self.path(path.stem).exists():
                    self._kept[kept.file.id] = kept

    def tidy(self, to_come: Iterable[str]) -> None:
        """Remove what belongs to no file: uploads that were cut off. `to_come`: what batches go on to write to."""
        for file_id in set(to_come) - self._kept.keys():
            path = self.path(file_id)
            self._coming[file_id] = path.stat().st_size if path.exists() else 0
        known = self._kept.keys() | self._coming.keys()
        for path in self.directory.glob("file-*"):
            if path.name.partition(".")[0] not in known or path.name.endswith(FRESH):
                path.unlink(missing_ok=True)

    def path(self, file_id: str) -> Path:
        """Where the content of a file lies, or will lie. `file_id`: one of ours."""
        return self.directory / (file_id + _CONTENT)

    def book(self, count: int = 1) -> list[str]:
        """Names for files to come. Each is later added, or dropped. Raises OutOfSpace when they are too many."""
        number = len(self._kept) + len(self._coming) + count
        if number > self._max_files or self._total_bytes() >= self._max_total_bytes:
            raise self._full()
        ids = [f"file-{secrets.token_hex(12)}" for _ in range(count)]
        self._coming.update(dict.fromkeys(ids, 0))
        return ids

    def grow(self, file_id: str, more_bytes: int) -> None:
        """Ask for room before a file to come gets so many bytes more. Raises OutOfSpace."""
        if self._total_bytes() + more_bytes > self._max_total_bytes:
            raise self._full()
        self._coming[file_id] = self._coming.get(file_id, 0) + more_bytes

    def add(self, tenant: str, file: File, created_s: float) -> None:
        """Know a file whose content is on the disk. Raises OSError."""
        kept = Kept(tenant, file, created_s)
        write_durably(self.directory / (file.id + _FACTS), msgspec.json.encode(kept))
        self._kept[file.id] = kept
        self._coming.pop(file.id, None)

    def drop(self, file_id: str) -> None:
        """Of a file that did not come to be known, leave nothing; one that did stays. Raises OSError."""
        if file_id not in self._kept:
            self._unlink(file_id)
            self._coming.pop(file_id, None)

    def get(self, file_id: str, tenant: str, param: str | None = None) -> File:
        """A file of this tenant. Raises NotFound."""
        kept = self._kept.get(file_id)
        if kept is None or kept.tenant != tenant:
            raise NotFound(f"there is no file {file_id[:64]!r}", hint="`GET /v1/files` lists yours", param=param)
        return kept.file

    def delete(self, file_id: str, tenant: str) -> FileDeleted:
        """Forget a file. Raises NotFound."""
        self.get(file_id, tenant)
        self._unlink(file_id)
        del self._kept[file_id]
        return FileDeleted(file_id)

    def page(self, tenant: str, *, limit: int, after: str | None, purpose: str | None, newest_first: bool) -> FileList:
        """Some of the files of a tenant. Raises BadRequest, NotFound for an `after` that is none of them."""
        mine = [kept for kept in self._kept.values() if kept.tenant == tenant and purpose in (None, kept.file.purpose)]
        mine.sort(key=lambda kept: (kept.created_s, kept.file.id), reverse=newest_first)
        data, has_more = paged([kept.file for kept in mine], limit, after, MAX_PAGE)
        return FileList(data, data[0].id if data else None, data[-1].id if data else None, has_more)

    def _unlink(self, file_id: str) -> None:
        # The facts first: content alone is tidied away, facts alone would promise what is not there.
        (self.directory / (file_id + _FACTS)).unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def _total_bytes(self) -> int:
        return sum(kept.file.bytes for kept in self._kept.values()) + sum(self._coming.values())

    def _full(self) -> OutOfSpace:
        return OutOfSpace(
            f"the files of batches may have {self._max_total_bytes >> 20} MiB together, and be {self._max_files}",
            hint="delete some that are not needed any more",
        )


class _Named(Protocol):
    """What a listing is of."""

    @property
    def id(self) -> str:
        """Its own."""


_T = TypeVar("_T", bound=_Named)


def paged(found: list[_T], limit: int, after: str | None, most: int) -> tuple[list[_T], bool]:
    """The entries behind the one whose id is `after`, and whether there are more. Raises BadRequest, NotFound."""
    if not 1 <= limit <= most:
        raise BadRequest(f"limit must be from 1 to {most}, not {limit}", param="limit")
    start = 0
    if after is not None:
        ids = [one.id for one in found]
        if after not in ids:
            raise NotFound(f"there is no {after[:64]!r} to go on after", param="after")
        start = ids.index(after) + 1
    return found[start : start + limit], len(found) > start + limit


def safe_name(name: str | None) -> str:
    """The name of an upload, as it is told again; it touches no path. Raises BadRequest."""
    name = (name or "").replace("\\", "/").rpartition("/")[2]
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise BadRequest(f"the file needs a printable name of at most {MAX_NAME_CHARS} characters", param="file")
    return name


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file by another content: whoever reads sees one of the two, also after a power cut."""
    fresh = path.with_name(path.name + FRESH)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fdatasync(file.fileno())
    fresh.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

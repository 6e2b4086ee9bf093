"""The cap over all page stores below one directory.

Each engine owns the store of its model, `<root>/<namespace>/`, and keeps it within the bytes it is given. The front
gives them out: what the other namespaces hold is taken off the cap, and when too little is left, those go first that
were used the longest ago and that no process has open. Which namespace belongs to which model and page format is noted
in `owners.json`; that file may be lost, then every namespace counts as somebody else's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

LOCK_NAME = "lock"  # as tiers.store_io: the owner of a store holds its flock
PINS_NAME = "pinned.json"  # as tiers.pins_file
OWNERS_NAME = "owners.json"
FLOOR_BYTES = 256 << 20  # a store below this holds too little to be worth having
_NAMESPACE = re.compile(r"[0-9a-f]{16,64}")


class Owner(msgspec.Struct, frozen=True):
    """Whose store it is: a model computed in one way has one."""

    model: str
    kv_format: str


class Namespace(msgspec.Struct, frozen=True):
    """A page store on disk. `open`: a process holds it. `model`: who filled it, empty if unknown."""

    name: str
    bytes: int
    last_use_s: float
    open: bool
    model: str = ""
    kv_format: str = ""


def namespaces(root: Path) -> list[Namespace]:
    """Every store below the root, the least recently used first. A root that is not there has none."""
    owners = _read_owners(root)
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and _NAMESPACE.fullmatch(entry.name):
                path = Path(entry.path)
                used_bytes, last_use_s = _measure(path)
                owner = owners.get(entry.name, Owner("", ""))
                found.append(
                    Namespace(entry.name, used_bytes, last_use_s, is_open(path), owner.model, owner.kv_format)
                )
    return sorted(found, key=lambda namespace: namespace.last_use_s)


def pins(root: Path, name: str) -> int:
    """Prefixes that somebody pinned in a store; none where that can't be read."""
    try:
        found = msgspec.json.decode((root / name / PINS_NAME).read_bytes())
        return len(found["pinned"] if isinstance(found, dict) else found)  # a list: before pins could end
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return 0


def is_open(directory: Path) -> bool:
    """Whether a process holds the store."""
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not take each other for an owner
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def share(root: Path, owner: Owner, cap_bytes: int, floor_bytes: int = FLOOR_BYTES) -> int:
    """Bytes that the store of a model may use. Removes unused stores of others while fewer than the floor are left."""
    floor_bytes = min(floor_bytes, cap_bytes)
    others = [found for found in namespaces(root) if (found.model, found.kv_format) != (owner.model, owner.kv_format)]
    left_bytes = cap_bytes - sum(namespace.bytes for namespace in others)
    for namespace in others:
        if left_bytes >= floor_bytes:
            break
        if not namespace.open and remove(root, namespace.name):
            left_bytes += namespace.bytes
    return max(left_bytes, floor_bytes)


def remove(root: Path, name: str) -> bool:
    """Remove a store that no process has open. False when one has, or when it is not there."""
    path = root / name
    if not _NAMESPACE.fullmatch(name):
        return False
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return False
    try:
        # Held while it goes, so that no engine opens it half removed. One that had opened the lock file just before
        # goes on in a directory without a name: its pages are lost when it ends, which is a miss.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return not path.exists()


def note_owner(root: Path, name: str, owner: Owner) -> None:
    """Remember whose store this is. One it had before, of other weights by the same name, is nobody's from now on."""
    owners = _read_owners(root)
    if owners.get(name) == owner or not _NAMESPACE.fullmatch(name):
        return
    kept = {known: other for known, other in owners.items() if other != owner and (root / known).is_dir()}
    owners = {**kept, name: owner}
    temporary = root / f"{OWNERS_NAME}.{os.getpid()}"
    with contextlib.suppress(OSError):  # only a hint
        temporary.write_bytes(msgspec.json.encode(owners))
        os.replace(temporary, root / OWNERS_NAME)


def _read_owners(root: Path) -> dict[str, Owner]:
    try:
        return msgspec.json.decode((root / OWNERS_NAME).read_bytes(), type=dict[str, Owner])
    except (OSError, msgspec.DecodeError):
        return {}


def _measure(directory: Path) -> tuple[int, float]:
    """Bytes on disk and the time of the last change of anything in a directory."""
    used_bytes, last_s = 0, 0.0
    for status in _statuses(directory):
        used_bytes += status.st_blocks * 512
        last_s = max(last_s, status.st_mtime)
    return used_bytes, last_s


def _statuses(directory: Path) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it may go while we look
                if entry.is_dir(follow_symlinks=False):
                    yield from _statuses(Path(entry.path))
                else:
                    yield entry.stat(follow_symlinks=False)

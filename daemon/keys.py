"""API keys of the HTTP door: made, listed and removed by the command line, read by a running daemon as they change.

The file holds names, limits and SHA-256 digests, never a key: a key is shown once, when it is made. Its secret part is
256 random bits, so that nothing is gained by a slow hash. Each change writes a new file and renames it over the old
one, under a lock; a reader sees either of the two.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tierd.daemon.config import Settings, is_loopback, split_listen
from tierd.daemon.errors import BadConfig, BadRequest, Conflict, NotFound, PermissionDenied

log = logging.getLogger("tierd.keys")

PREFIX = "tierd"
MAX_KEYS = 1024
MAX_FILE_BYTES = 1 << 20
_ID_BYTES, _SECRET_BYTES = 6, 32
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW
_MODE_HINT = "check its owner and mode"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a key. `id` is the second part of it, and names its tenant. A limit of 0 is none."""

    id: str
    name: str
    sha256: str
    created_s: float
    quota_pages: int = 0
    max_requests: int = 0


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int = 1
    keys: tuple[ApiKey, ...] = ()


def read(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file; none if it is not there. Raises PermissionDenied for one that others could have written."""
    try:
        fd = os.open(path, os.O_RDONLY | _SAFELY)
    except FileNotFoundError:
        return ()
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077 or not stat.S_ISREG(info.st_mode):
            raise PermissionDenied(f"the keys {path} are open to others", hint=f"`chmod 600 {path}`, and make new keys")
        try:
            data = file.read(MAX_FILE_BYTES + 1)
        except OSError as exc:
            raise _unreadable(path, exc) from exc
    try:
        if len(data) > MAX_FILE_BYTES:
            raise msgspec.DecodeError("it is too long")
        return msgspec.json.decode(data, type=_File).keys
    except (msgspec.DecodeError, UnicodeError) as exc:
        hint = "move it away and make new keys"
        raise PermissionDenied(f"{path} is no file of keys: {exc}", hint=hint) from None


def check_reach(settings: Settings) -> None:
    """Raises BadConfig when HTTP would listen for other machines and no key is there to keep them out."""
    if not settings.listen or settings.api_key or is_loopback(split_listen(settings.listen)[0]):
        return
    if not read(settings.keys_file):
        hint = "`tierd key add NAME` makes one; or listen on 127.0.0.1"
        raise BadConfig(f"listening at {settings.listen} needs an API key", hint=hint, param="listen")


def _unreadable(path: Path, exc: OSError) -> PermissionDenied:
    return PermissionDenied(f"cannot read the keys {path}: {exc.strerror}", hint=_MODE_HINT)


def add(path: Path, name: str, *, quota_pages: int = 0, max_requests: int = 0) -> tuple[ApiKey, str]:
    """Make a key; returns what is kept and the key itself, which nobody can show again.

    Raises BadRequest for a name that is none, Conflict for one that is taken, PermissionDenied.
    """
    if not _NAME.fullmatch(name):
        raise BadRequest("a key's name has 1 to 64 letters, digits, dots, hyphens and underscores", param="name")
    with _changing(path) as keys:
        if any(key.name == name for key in keys):
            raise Conflict(f"there is a key named {name}", hint=f"`tierd key rm {name}` removes it")
        if len(keys) >= MAX_KEYS:
            raise Conflict(f"there are {MAX_KEYS} keys already", hint="`tierd key rm` removes one")
        key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
        text = f"{PREFIX}_{key_id}_{secret}"
        key = ApiKey(key_id, name, digest(text), time.time(), quota_pages, max_requests)
        keys.append(key)
    return key, text


def remove(path: Path, name: str) -> ApiKey:
    """Remove a key by its name or id; requests with it are refused from then on. Raises NotFound."""
    with _changing(path) as keys:
        for place, key in enumerate(keys):
            if name in (key.name, key.id):
                return keys.pop(place)
    raise NotFound(f"there is no key {name[:64]!r}", hint="`tierd key ls` lists them")


def digest(text: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """The keys as the daemon sees them: the file is read again when it has changed. Threading: one owner.

    A file that can't be trusted opens nothing: until it is mended no key fits, and none is not enough either.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told = ""  # what was said of a file that can't be read
        self._stamp: tuple[int, ...] | None = None
        self._keys: dict[str, ApiKey] = {}
        self._broken = False

    def wants_one(self) -> bool:
        """Whether requests need a key because of this file."""
        self._look()
        return self._broken or bool(self._keys)

    def find(self, text: str) -> ApiKey | None:
        """The key that this is; None for anything else."""
        self._look()
        known = self._keys.get(text.split("_", 2)[1] if text.count("_") >= 2 else "")
        # Compared in any case, at full length: how long it takes tells neither whether the id exists nor a byte.
        fits = hmac.compare_digest(digest(text), known.sha256 if known else "0" * 64)
        return known if fits and known else None

    def by_id(self, key_id: str) -> ApiKey | None:
        """The key of a tenant; None when it was removed."""
        self._look()
        return self._keys.get(key_id)

    def _look(self) -> None:
        stamp: tuple[int, ...]
        try:
            info = os.stat(self._path)
            stamp = (info.st_mtime_ns, info.st_ino, info.st_size, info.st_mode)
        except FileNotFoundError:
            stamp = ()
        except OSError:
            stamp = (-1,)
        if stamp == self._stamp:
            return
        told, self._stamp = self._told, stamp
        try:
            self._keys, self._broken, self._told = {key.id: key for key in read(self._path)}, False, ""
        except PermissionDenied as exc:
            self._keys, self._broken, self._told = {}, True, str(exc)
            if isinstance(exc.__cause__, OSError):
                self._stamp = None  # no descriptor, an error of the disk: that may pass while the file stays as it is
            if told != self._told:
                log.error("%s; HTTP requests are refused until then", exc)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[list[ApiKey]]:
    """The keys, to be changed in place; written when the block ends well."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = list(read(path))
            yield keys
            fresh = path.with_name(f"{path.name}.new")  # the lock makes it ours
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFELY, 0o600)
            with open(fd, "wb") as file:
                file.write(msgspec.json.encode(_File(keys=tuple(keys))))
                file.flush()
                os.fsync(fd)
            os.replace(fresh, path)
        finally:
            os.close(lock)
    except OSError as exc:
        raise PermissionDenied(f"cannot write the keys {path}: {exc.strerror}", hint=_MODE_HINT) from exc

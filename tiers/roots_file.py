"""The file in a store's directory that says whose pages lie below which root: one line each, `root tenant` in hex.

A root is a digest of a tenant and a salt, from which neither can be had again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from tierd.tiers.keys import KEY_BYTES
from tierd.tiers.page import PageKey

FILE_NAME = "tenants"
MAX_TENANT_BYTES = 256
_LINE_BYTES = 2 * (KEY_BYTES + MAX_TENANT_BYTES) + 2
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def read(file: Path, most: int) -> dict[PageKey, bytes]:
    """Whose each root is, the first noted first and no more than so many; none when there is no such file."""
    found: dict[PageKey, bytes] = {}
    with contextlib.suppress(OSError), os.fdopen(os.open(file, os.O_RDONLY | _FLAGS), "rb") as opened:
        while len(found) < most and (line := opened.readline(_LINE_BYTES)):
            with contextlib.suppress(ValueError):  # a torn or damaged line
                root, tenant = (bytes.fromhex(word.decode()) for word in line.split(b" "))
                if len(root) == KEY_BYTES and line.endswith(b"\n"):
                    found[PageKey(root)] = tenant
    return found


def write(file: Path, roots: Mapping[PageKey, bytes]) -> None:
    """Puts a new file in the place of the old one. Where that can't be done it stays, which is harmless."""
    with contextlib.suppress(OSError):
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        _put(temporary, os.O_TRUNC, "".join(_line(root, tenant) for root, tenant in roots.items()))
        os.replace(temporary, file)


def append(file: Path, root: PageKey, tenant: bytes) -> None:
    """Adds a root. Where that can't be done it is known as long as the process lives."""
    with contextlib.suppress(OSError):
        _put(file, os.O_APPEND, _line(root, tenant))


def _put(file: Path, flag: int, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | flag | _FLAGS, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(text)


def _line(root: PageKey, tenant: bytes) -> str:
    return f"{root.hex()} {tenant[:MAX_TENANT_BYTES].hex()}\n"

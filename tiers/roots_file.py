"""The file in a store's directory that says whose pages lie below which root: one line each, `root tenant` in hex.

A root is a digest of a tenant and a salt, from which neither can be had again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from tierd.tiers import small_file
from tierd.tiers.keys import KEY_BYTES
from tierd.tiers.page import PageKey

FILE_NAME = "tenants"
MAX_TENANT_BYTES = 256


def read(file: Path, most: int) -> dict[PageKey, bytes]:
    """Whose each root is, in the order in which they were noted; of more than so many the newest."""
    found: dict[PageKey, bytes] = {}
    for line in reversed(small_file.read_lines(file)):
        with contextlib.suppress(ValueError):  # a torn or damaged line
            root, tenant = (bytes.fromhex(word.decode()) for word in line.split(b" "))
            if len(root) == KEY_BYTES and len(found) < most:
                found.setdefault(PageKey(root), tenant)
    return dict(reversed(found.items()))


def write(file: Path, roots: Mapping[PageKey, bytes]) -> None:
    """Puts a new file in the place of the old one. Where that can't be done it stays, which is harmless."""
    small_file.replace(file, "".join(f"{_line(root, tenant)}\n" for root, tenant in roots.items()))


def append(file: Path, root: PageKey, tenant: bytes) -> None:
    """Adds a root. Where that can't be done it is known as long as the process lives."""
    small_file.append_line(file, _line(root, tenant))


def _line(root: PageKey, tenant: bytes) -> str:
    return f"{root.hex()} {tenant[:MAX_TENANT_BYTES].hex()}"

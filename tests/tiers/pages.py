"""Pages for the tests of the store: everything about a page follows from its number and version."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from tierd.tiers.errors import PageLost
from tierd.tiers.page import PageKey
from tierd.tiers.store import PageMeta, Store
from tierd.tiers.store_io import Bytes, aligned_block

NAMESPACE = b"test namespace 1"
RECORD_BYTES = 8192
SLOT_BYTES = RECORD_BYTES + 4096


def key(number: int) -> PageKey:
    return PageKey(hashlib.blake2b(b"key %d" % number, digest_size=16).digest())


def meta(number: int, version: int = 0) -> PageMeta:
    tokens = tuple(range(number, number + 1 + number % 16))
    return PageMeta(key(number), key(number // 2), tokens, version, float(version))


@functools.lru_cache(1024)
def record(number: int, version: int = 0, record_bytes: int = RECORD_BYTES) -> Bytes:
    """The bytes of a version of a page, on a page boundary. Not to be written to."""
    block = aligned_block(-(-record_bytes // 4096) * 4096)[:record_bytes]
    block[:] = np.random.default_rng([number, version]).integers(0, 256, record_bytes, dtype=np.uint8)
    block.flags.writeable = False
    return block


def page(number: int, version: int = 0) -> tuple[PageMeta, Bytes]:
    return meta(number, version), record(number, version)


def open_store(directory: Path, **changes: Any) -> Store:
    """A small store: 32 slots in files of 8, grown by 3."""
    arguments: dict[str, Any] = {
        "record_bytes": RECORD_BYTES,
        "namespace": NAMESPACE,
        "capacity_bytes": 32 * SLOT_BYTES,
        "file_bytes": 8 * SLOT_BYTES,
        "step_bytes": 3 * SLOT_BYTES,
    }
    return Store.open(directory, **{**arguments, **changes})


def read(store: Store, number: int, record_bytes: int = RECORD_BYTES) -> bytes | PageLost:
    """The bytes of a page, or why there are none."""
    dest = aligned_block(-(-record_bytes // 4096) * 4096)[:record_bytes]
    try:
        store.read_into(key(number), dest)
    except PageLost as lost:
        return lost
    return dest.tobytes()


def holds(store: Store, number: int, version: int = 0) -> bool:
    """True when the page is there; its bytes must be right then."""
    found = read(store, number)
    if isinstance(found, PageLost):
        return False
    assert found == record(number, version).tobytes(), f"page {number} has wrong bytes"
    return True


def verify(store: Store, repair: bool) -> list[str]:
    """Findings of a look at everything, as `tierd cache verify` has them of the store."""
    findings, after = store.inspect(repair), -1
    while (found := store.verify_pages(after, 5, repair)).keys:
        findings += found.findings
        after = found.last_slot
    return findings

"""What can go wrong in a tier, as one tree.

TierError
├── TierFull            the request can never fit this tier, whatever is evicted
├── PrefixUnknown       no known page has this id, or several have
├── PrefixInUse         a running request needs its pages, or the user wants them kept
├── PrefixNotDurable    its pages are not on disk: they can't be written now, or must not leave memory
├── MoverClosed         the mover stopped: the job did not run
├── JobCancelled        its submitter took the job back before it ran
├── PageLost            the bytes of one page can't be trusted or are gone: a miss, recompute it
├── WeightsLost         a record of weights can't be read, or isn't what was imported: the step can't be computed
├── StagingLost         pages that a step reads from the store as it goes did not come: recompute them
└── StoreError
    ├── StoreLocked     another process owns the store directory
    ├── StoreFull       no room for these pages; what is stored stays readable
    └── StoreBroken     the disk or the directory failed: turn the tier off, serving goes on

Nothing here is an answer to a user: the engine turns a tier off, recomputes, or refuses a request.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from tierd.tiers.page import PageKey


class LostReason(enum.StrEnum):
    """Why a page is a miss. The values are the labels of the miss counters."""

    ABSENT = "absent"  # no such page in the index (any more)
    IO_ERROR = "io_error"  # the read failed
    SHORT = "short"  # the file ends before the slot does
    HEADER = "header"  # magic or checksum of the header block
    VERSION = "version"
    NAMESPACE = "namespace"
    KEY = "key"  # another page, or the right page in the wrong slot
    TOKENS = "tokens"  # parent, token digest or token count
    GENERATION = "generation"  # an older or newer write of this slot
    LENGTH = "length"
    PAYLOAD = "payload"  # checksum of the record
    STORE_OFF = "store_off"  # the store is closed or failed


class TierError(Exception):
    """Base of all errors of the tiers."""


class TierFull(TierError):
    """The request can never fit this tier, whatever is evicted."""


class PrefixUnknown(TierError):
    """No known page has this id, or several have."""


class PrefixInUse(TierError):
    """A running request needs the pages, or the user wants them kept."""


class PrefixNotDurable(TierError):
    """Pages of the prefix have no copy on disk.

    Attributes:
        remedy: what to do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


class MoverClosed(TierError):
    """The mover was closed, or one of its threads died, before the job ran."""


class JobCancelled(TierError):
    """The job was taken back before it ran."""


class PageLost(TierError):
    """The page can't be had from this tier: treat it as a miss.

    Attributes:
        reason: what to count it under.
    """

    def __init__(self, reason: LostReason, detail: str = "") -> None:
        super().__init__(f"page lost ({reason}){': ' + detail if detail else ''}")
        self.reason = reason


class StagingLost(TierError):
    """Pages of a running step could not be read, or not in time; the step can't go on without them.

    Attributes:
        keys: every page that is known to be missing, in the order they were asked for.
        bad: those of them that the store has lost, and how. The others did not come, and may be as they should.
    """

    def __init__(self, keys: Sequence[PageKey], detail: str, bad: Mapping[PageKey, PageLost] | None = None) -> None:
        super().__init__(f"{len(keys)} staged pages did not come: {detail}")
        self.keys = tuple(keys)
        self.bad = dict(bad or {})


class WeightsLost(TierError):
    """A record of weights can't be read, or is not what was imported. Nothing replaces it.

    Attributes:
        record: its name.
    """

    def __init__(self, record: str, detail: str) -> None:
        super().__init__(f"weights {record}: {detail}")
        self.record = record


class StoreError(TierError):
    """Base of the errors of the disk store."""


class StoreLocked(StoreError):
    """Another process owns the store.

    Attributes:
        pid: the owner as its lock file names it, None when that can't be read.
    """

    def __init__(self, directory: str, pid: int | None) -> None:
        owner = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"{directory} is in use by {owner}; stop it, or choose another cache directory")
        self.pid = pid


class StoreFull(StoreError):
    """No room for these pages: at capacity, or the file system refuses more."""


class StoreBroken(StoreError):
    """The store can't go on. The text names the reason and what to do."""

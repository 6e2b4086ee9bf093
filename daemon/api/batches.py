"""Batches as OpenAI describes them, and where what is known of each lies: one small JSON a batch.

    validating -> in_progress -> completed, or expired when its time is over
        |             |________ failed: the key or the disk is gone; what was answered is kept
        |             |________ cancelling -> cancelled, likewise
        |______________________ failed: nothing was run
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from tierd.daemon.api import bodies
from tierd.daemon.api.files import paged, write_durably
from tierd.daemon.batch import URLS
from tierd.daemon.errors import BadRequest, Conflict, NotFound, TooBusy, Unsupported
from tierd.daemon.paths import make_private_dir

MAX_BATCHES = 1000  # that are known; beyond it the oldest that have ended are forgotten
MAX_UNFINISHED = 100
MAX_REQUESTS = 50_000  # of one batch, as OpenAI has it
MAX_PAGE = 100
WINDOW = "24h"
WINDOW_S = 86400
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
_ID = re.compile(r"batch_[0-9a-f]{24}")


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class Counts(msgspec.Struct):
    """How many requests a batch has, and what became of them."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Fault(msgspec.Struct):
    """Why a batch was not run. `line`: of the input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Faults(msgspec.Struct):
    """All of them."""

    data: list[Fault]
    object: str = "list"


class Batch(msgspec.Struct, kw_only=True):
    """A batch. Times are seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    object: str = "batch"
    completion_window: str = WINDOW
    status: Status = "validating"
    errors: Faults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct):
    """A part of a listing, the newest first."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Job(msgspec.Struct):
    """A batch, whose it is, and the files that it writes to while they are not told of."""

    tenant: str
    batch: Batch
    created_s: float  # its `created_at` in full, for the order
    answers_id: str
    faults_id: str


class Batches:
    """The batches of one directory. Every call may wait for the disk. Threading: one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Reads what is there. Raises PermissionDenied for a directory that is not ours."""
        self._directory = make_private_dir(directory)
        self._jobs: dict[str, Job] = {}
        for path in sorted(self._directory.glob("batch_*.json")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                job = msgspec.json.decode(path.read_bytes(), type=Job)
                if job.batch.id == path.stem and _ID.fullmatch(path.stem):
                    self._jobs[job.batch.id] = job

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def unfinished(self) -> list[Job]:
        """Those that have something left to do, the oldest first."""
        return sorted((job for job in self if job.batch.status not in ENDED), key=lambda job: job.created_s)

    def add(self, job: Job) -> None:
        """Know a batch. Raises TooBusy when too many wait, OSError."""
        if len(self.unfinished()) >= MAX_UNFINISHED:
            raise TooBusy(f"{MAX_UNFINISHED} batches are not finished", hint="wait until one is, or cancel one")
        self.save(job)
        self._jobs[job.batch.id] = job
        ended = sorted((one for one in self if one.batch.status in ENDED), key=lambda one: one.created_s)
        for old in ended[: max(len(self._jobs) - MAX_BATCHES, 0)]:
            self._path(old.batch.id).unlink(missing_ok=True)
            del self._jobs[old.batch.id]

    def knows(self, job: Job) -> bool:
        """Whether it was added, and not forgotten since."""
        return job.batch.id in self._jobs

    def save(self, job: Job) -> None:
        """Make what is known of a batch durable. Raises OSError."""
        write_durably(self._path(job.batch.id), msgspec.json.encode(job))

    def get(self, batch_id: str, tenant: str) -> Job:
        """A batch of this tenant. Raises NotFound."""
        job = self._jobs.get(batch_id)
        if job is None or job.tenant != tenant:
            raise NotFound(f"there is no batch {batch_id[:64]!r}", hint="`GET /v1/batches` lists yours")
        return job

    def page(self, tenant: str, *, limit: int, after: str | None) -> BatchList:
        """Some of the batches of a tenant. Raises BadRequest, NotFound for an `after` that is none of them."""
        mine = sorted((job for job in self if job.tenant == tenant), key=lambda job: job.created_s, reverse=True)
        data, has_more = paged([job.batch for job in mine], limit, after, MAX_PAGE)
        return BatchList(data, data[0].id if data else None, data[-1].id if data else None, has_more)

    def check_unused(self, file_id: str) -> None:
        """Raises Conflict for a file that an unfinished batch reads."""
        for job in self.unfinished():
            if file_id == job.batch.input_file_id:
                raise Conflict(f"{job.batch.id} reads this file", hint="cancel it first, or wait until it has ended")

    def _path(self, batch_id: str) -> Path:
        return self._directory / f"{batch_id}.json"


def parse(body: bytes) -> BatchRequest:
    """The body of POST /v1/batches. Raises BadRequest or Unsupported that names the field."""
    fields = bodies.decode(body, dict[str, msgspec.Raw])
    if fields.get("output_expires_after") not in (None, msgspec.Raw(b"null")):
        raise Unsupported("files stay until they are deleted", param="output_expires_after")
    fields.pop("output_expires_after", None)
    given = bodies.decode(msgspec.json.encode(fields), BatchRequest)
    if given.endpoint not in URLS:
        raise BadRequest(f"endpoint must be one of {', '.join(URLS)}", param="endpoint")
    if given.completion_window != WINDOW:
        raise BadRequest(f"completion_window must be {WINDOW}", param="completion_window")
    _check_metadata(given.metadata or {})
    return given


def new(given: BatchRequest, now_s: float) -> Batch:
    """A batch that was just asked for."""
    return Batch(
        id=f"batch_{secrets.token_hex(12)}", endpoint=given.endpoint, input_file_id=given.input_file_id,
        created_at=int(now_s), expires_at=int(now_s) + WINDOW_S, metadata=given.metadata,
    )  # fmt: skip


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS for key, value in metadata.items()
    ):
        what = f"metadata has at most {MAX_METADATA} entries, of {MAX_KEY_CHARS} and {MAX_VALUE_CHARS} characters"
        raise BadRequest(what, param="metadata")

"""What a draft model takes: how many requests it guesses for, how much of a text it sees, and the bytes of all that.

It sees the newest tokens of a text alone, so its memory is the same however long contexts get, and what is lost with
one that is preempted is soon computed again. Whoever plans asks this, and the engine builds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tierd.daemon.config import Settings
from tierd.daemon.errors import BadConfig, ModelNotFound
from tierd.daemon.machine import Machine, auto_weights
from tierd.daemon.models.catalog import Manifest, find
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES
from tierd.daemon.plan.workspace import padded, scratch_bytes, vector_bytes
from tierd.daemon.units import human_bytes
from tierd.kernels.layout import PageLayout

SEAT_TOKENS = 512  # that it sees of a text at most; then it forgets all but the newest
START_TOKENS = 192  # and goes on with so many, which it computes again
MAX_SEATS = 8  # requests at once: with more of them a step has many rows anyway
CATCH_UP_ROWS = 128  # of all texts in a step: they make the answers wait
KV_FORMAT = "fp16"  # what is guessed is checked: half of the memory is worth more than its last bits


class DraftBytes(NamedTuple):
    """Memory of a draft model. `pages`: of all its seats, taken as they are used."""

    weights: int
    pages: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.pages + self.workspace


class Wanted(NamedTuple):
    """The draft model that the settings name, and the memory that it takes."""

    directory: Path
    name: str
    total_bytes: int


class Draft(NamedTuple):
    """The draft model beside a model, None for none, and why there is none although the settings name one."""

    model: Wanted | None = None
    off_reason: str = ""

    @property
    def total_bytes(self) -> int:
        """The memory that it takes."""
        return self.model.total_bytes if self.model is not None else 0


def choose_draft(
    settings: Settings, directory: Path | None, weights_bytes: int, computer: Machine, threads: int
) -> Draft:
    """The draft model beside a model with so many bytes of weights. Raises as `wanted`.

    None beside itself: it would guess no sooner than it computes. None where its memory is what weights lack: a layer
    that is read in every step costs more than guesses gain. `directory`: of the model, None when it is not prepared.
    """
    found = wanted(settings, threads)
    if found is None or found.directory == directory:
        return Draft()
    most_bytes = auto_weights(min(computer.available_ram, computer.total_ram), LEAST_ARENA_BYTES, 0)
    if settings.weights_mem is None and most_bytes - found.total_bytes < weights_bytes <= most_bytes:
        taken = human_bytes(found.total_bytes)
        return Draft(None, f"beside {found.name}, which takes {taken}, not all weights would stay in memory")
    return Draft(found)


def wanted(settings: Settings, threads: int) -> Wanted | None:
    """None when they name none. Raises ModelNotFound, ModelInvalid, and BadConfig for one that can't be it."""
    if not settings.draft or settings.speculate == "off":
        return None
    try:
        directory, manifest = find(settings.models_dir, settings.draft)
        return Wanted(directory, manifest.name, draft_bytes(manifest, settings.max_streams, threads).total)
    except ModelNotFound as exc:
        raise ModelNotFound(f"draft {exc.message}", hint=exc.hint, param="draft") from exc
    except ValueError as exc:
        hint = "choose another, or leave --draft out"
        raise BadConfig(f"{settings.draft} can't be a draft model: {exc}", hint=hint, param="draft") from exc


def seats(max_streams: int) -> int:
    """Requests that it guesses for at once."""
    return min(max_streams, MAX_SEATS)


def max_rows(max_streams: int) -> int:
    """Of a pass: a request that has caught up needs two rows, if all of its guesses were right."""
    return CATCH_UP_ROWS + 2 * seats(max_streams)


def layout(spec: ModelSpec) -> PageLayout:
    """Of its pages. Raises ValueError for a model whose shape has no such pages."""
    return PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, KV_FORMAT)


def draft_bytes(manifest: Manifest, max_streams: int, threads: int) -> DraftBytes:
    """What it takes beside an engine with so many streams. Raises ValueError as `layout`."""
    spec, shape, rows = manifest.spec, layout(manifest.spec), max_rows(max_streams)
    pages = seats(max_streams) * (SEAT_TOKENS // shape.page_tokens) * shape.record_bytes
    tables = 2 * SEAT_TOKENS * (spec.head_dim // 2) * 4
    logits = seats(max_streams) * padded(spec.vocab) * 4
    workspace = tables + scratch_bytes(spec, rows, threads) + vector_bytes(spec) + logits
    return DraftBytes(manifest.bytes, pages, workspace)

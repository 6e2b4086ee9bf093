"""What a draft model takes: how many requests it guesses for, how much of a text it sees, and the bytes of all that.

It sees the newest tokens of a text alone, so its memory is the same however long contexts get, and what is lost with
one that is preempted is soon computed again. Whoever plans asks this, and the engine builds it.

Beside a model that a card computes it lies on the card as well, or is computed by the processors where the card has no
room for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tierd.daemon.config import Settings
from tierd.daemon.errors import BadConfig, ModelNotFound
from tierd.daemon.machine import Machine, auto_weights
from tierd.daemon.models.catalog import Manifest, find
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.models.placement_card import place_on_card, record_card_bytes, refused_by_card
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES, Chosen
from tierd.daemon.plan.auto_card import workspace_bytes as card_workspace_bytes
from tierd.daemon.plan.cards import GRAIN_BYTES
from tierd.daemon.plan.workspace import padded, scratch_bytes, vector_bytes
from tierd.daemon.units import human_bytes
from tierd.kernels.layout import PageLayout

SEAT_TOKENS = 512  # that it sees of a text at most; then it forgets all but the newest
START_TOKENS = 192  # and goes on with so many, which it computes again
MAX_SEATS = 8  # requests at once: with more of them a step has many rows anyway
CATCH_UP_ROWS = 128  # of all texts in a step: they make the answers wait
KV_FORMAT = "fp16"  # what is guessed is checked: half of the memory is worth more than its last bits
# On a card whose layers are streamed anyway it takes the place of some of them: of no more than this part.
MOST_SHARE = 1 / 8


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
    """The draft model that the settings name, and the memory that it takes where processors compute it.

    `card_bytes`: of a card that does; 0 where its kernels do not take the model.
    """

    directory: Path
    name: str
    total_bytes: int
    card_bytes: int = 0


class Draft(NamedTuple):
    """The draft model beside a model, None for none, and why there is none although the settings name one.

    `on_card`: whether a card computes it; `why`: it does not, although it computes the model.
    """

    model: Wanted | None = None
    off_reason: str = ""
    on_card: bool = False
    why: str = ""

    @property
    def ram_bytes(self) -> int:
        """The computer's memory that it takes."""
        return self.model.total_bytes if self.model is not None and not self.on_card else 0

    @property
    def card_bytes(self) -> int:
        """The card's memory that it takes."""
        return self.model.card_bytes if self.model is not None and self.on_card else 0

    def beside(self, computer: Machine) -> Machine:
        """What it leaves of a machine."""
        card = computer.card
        if card is not None:
            free, total = card.free_bytes - self.card_bytes, card.total_bytes - self.card_bytes
            card = card._replace(free_bytes=max(free, 0), total_bytes=max(total, 0))
        return computer._replace(available_ram=max(computer.available_ram - self.ram_bytes, 0), card=card)


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


def choose_card_draft(
    settings: Settings, directory: Path, manifest: Manifest, computer: Machine, threads: int,
    choose: Callable[[Machine], Chosen],
) -> Draft:  # fmt: skip
    """The draft model beside a model that `computer`'s card computes. Raises as `wanted`.

    It lies on the card where all weights that are to lie there do beside it. Where layers are streamed in any case, and
    come from CPU memory, it takes the place of a few of them: a guess by the processors reads all of its weights, and
    so many bytes more in every step are sooner over the link than several guesses are made. Elsewhere the processors
    compute it, unless a layer would be read from the disk for lack of its memory.

    `directory`, `manifest`: of the model; `choose`: the sizes of its engine on what the draft leaves.
    """
    found = wanted(settings, threads)
    if found is None or found.directory == directory:
        return Draft()
    weights_bytes = sum(map(record_card_bytes, manifest.records))
    kept = weights_bytes if settings.weights_mem is None else min(settings.weights_mem, weights_bytes)

    def all_stay(chosen: Chosen) -> bool:
        needed = chosen.sizes.device_bytes + kept + chosen.card_workspace_bytes
        return chosen.sizes.weights_bytes >= kept and needed <= chosen.card_usable_bytes

    def reads_disk(chosen: Chosen) -> bool:
        try:
            placed = place_on_card(manifest, chosen.sizes.weights_bytes, chosen.sizes.host_weights_bytes)
        except DoesNotFit:
            return True
        return bool(placed.nvme)

    alone, there = choose(computer), Draft(found, on_card=True)
    few, beside = found.card_bytes <= MOST_SHARE * alone.sizes.weights_bytes, choose(there.beside(computer))
    displaces = not all_stay(alone) and few and not reads_disk(beside)
    if found.card_bytes and (all_stay(beside) or displaces):
        return there
    why = "the card's kernels do not take it"
    if found.card_bytes:
        why = f"of the card it would take {human_bytes(found.card_bytes)} that weights need"
    below = Draft(found, why=f"the draft model {found.name} is computed by the processors: {why}")
    usable = min(computer.available_ram, computer.total_ram)
    left = choose(below.beside(computer))
    if usable - usable // 10 < found.total_bytes or (reads_disk(left) and not reads_disk(alone)):
        taken = human_bytes(found.total_bytes)
        return Draft(None, f"{why}, and CPU memory has too little room for the {taken} that {found.name} takes there")
    return below


def wanted(settings: Settings, threads: int) -> Wanted | None:
    """None when they name none. Raises ModelNotFound, ModelInvalid, and BadConfig for one that can't be it."""
    if not settings.draft or settings.speculate == "off":
        return None
    try:
        directory, manifest = find(settings.models_dir, settings.draft)
        taken = draft_bytes(manifest, settings.max_streams, threads).total
        on_card = 0 if refused_by_card(manifest.spec) else card_draft_bytes(manifest, settings.max_streams).total
        return Wanted(directory, manifest.name, taken, on_card)
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


def layout(spec: ModelSpec, format: str = KV_FORMAT) -> PageLayout:
    """Of its pages. Raises ValueError for a model whose shape has no such pages."""
    return PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, format)


def pages_bytes(shape: PageLayout, max_streams: int) -> int:
    """Of the pages of all seats."""
    return seats(max_streams) * (SEAT_TOKENS // shape.page_tokens) * shape.record_bytes


def draft_bytes(manifest: Manifest, max_streams: int, threads: int) -> DraftBytes:
    """What it takes beside an engine with so many streams. Raises ValueError as `layout`."""
    spec, shape, rows = manifest.spec, layout(manifest.spec), max_rows(max_streams)
    tables = 2 * SEAT_TOKENS * (spec.head_dim // 2) * 4
    logits = seats(max_streams) * padded(spec.vocab) * 4
    workspace = tables + scratch_bytes(spec, rows, threads) + vector_bytes(spec) + logits
    return DraftBytes(manifest.bytes, pages_bytes(shape, max_streams), workspace)


def card_draft_bytes(manifest: Manifest, max_streams: int) -> DraftBytes:
    """The same of a card, whose pages have 16 bits too. Raises ValueError as `layout`."""
    spec, pages = manifest.spec, pages_bytes(layout(manifest.spec), max_streams)
    workspace = card_workspace_bytes(spec, SEAT_TOKENS, max_rows(max_streams), seats(max_streams))
    weights = sum(record_card_bytes(record) for record in manifest.records)
    return DraftBytes(weights, -(-pages // GRAIN_BYTES) * GRAIN_BYTES, workspace)

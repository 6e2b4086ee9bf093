"""Where the records of a model lie when a card computes: in its memory, in the computer's, or on the disk.

Pure, and without numpy, as `placement`. Layers that the card has no memory for cross the link in every pass, through a
few slots of one size; from a slot they are laid out for the kernels in one place, which all of them share. The card has
the head, which every pass needs whole. Of an embedding of its own a pass needs single rows, which the computer's memory
can give, so it is the first to leave the card.

Of the experts of a mixture a pass needs few. All of them are on the card, or whatever memory the others leave there is
slots, in which those lie that were used the most (`tiers.weights_cache`); they come from the computer's memory, which
layers take first, or from the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tierd.daemon.models.catalog import Manifest, RecordEntry, TensorEntry
from tierd.daemon.models.placement import (
    MAX_SLOTS,
    MIN_SLOTS,
    DoesNotFit,
    head_record,
    least_expert_slots,
    spread,
)
from tierd.daemon.models.records import EXPERT_PREFIX
from tierd.daemon.models.spec import ModelSpec
from tierd.kernels import card_bytes

HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 256  # kernels.gpu.pages
DISK_SLOTS = 4  # of CPU memory: one is copied to the card while the others are read
MIN_STAGES, MAX_STAGES = 3, 6  # each of them may hold up a thread of the mover


class DoesNotFitHost(DoesNotFit):
    """What the card has no memory for, the computer has none for either."""


@dataclass(frozen=True, slots=True)
class CardPlacement:
    """Which records lie where. Bytes are those that they take there."""

    device: frozenset[str]
    host: frozenset[str]
    nvme: frozenset[str]
    streamed: tuple[str, ...]  # layers that are not on the device, in the order of a pass
    slots: int  # on the device
    slot_bytes: int
    place_bytes: int  # on the device, where a streamed layer is laid out
    disk_slots: int  # in CPU memory
    device_bytes: int  # everything on the device
    host_bytes: int  # everything in CPU memory
    streamed_bytes: int  # of a pass, over the link, without experts
    expert_slots: int = 0  # on the device, each for any expert; 0: all experts lie there
    expert_slot_bytes: int = 0
    stages: int = 0  # on the device, where experts arrive as they lie in the file
    stage_bytes: int = 0
    expert_disk_slots: int = 0  # in CPU memory, of `stage_bytes` each

    @property
    def experts_bytes(self) -> int:
        """On the device, for experts that do not stay there."""
        return self.expert_slots * self.expert_slot_bytes + self.stages * self.stage_bytes


def place_on_card(
    manifest: Manifest, device_bytes: int | None, host_bytes: int | None, *, embed_on_card: bool | None = None
) -> CardPlacement:
    """The placement that moves the fewest bytes in a pass; everything is on the card when it fits, or without a bound.

    `host_bytes`: for what the card does not take; what has no room there is read from the disk; None: no bound.
    `embed_on_card`: whether the embedding lies there, if that is given. Raises DoesNotFit with the least memory of the
    card that would do, DoesNotFitHost with that of the computer.
    """
    candidates = [one for one in _candidates(manifest) if embed_on_card in (None, "embed" in one.device)]
    fitting = [one for one in candidates if device_bytes is None or one.device_bytes <= device_bytes]
    if not fitting:
        raise DoesNotFit(min(one.device_bytes for one in candidates))
    # The third slot may cost a layer its place; a late copy costs every pass more than that.
    wide = [one for one in fitting if one.slots != MIN_SLOTS]
    found = min(wide or fitting, key=_rank)
    if found.expert_slots and device_bytes is not None and manifest.spec.experts is not None:
        more = (device_bytes - found.device_bytes) // found.expert_slot_bytes
        slots = min(found.expert_slots + more, manifest.spec.experts.total)
        added_bytes = (slots - found.expert_slots) * found.expert_slot_bytes
        found = replace(found, expert_slots=slots, device_bytes=found.device_bytes + added_bytes)
    return _below(manifest, found, host_bytes)


def refused_by_card(spec: ModelSpec) -> str:
    """Why the kernels of a card don't take a model, so that the processors compute it; "" if they do."""
    if spec.head_dim % HEAD_DIM_STEP or spec.head_dim > MAX_HEAD_DIM:
        return f"its kernels take heads of a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, not of {spec.head_dim}"
    return ""


def record_card_bytes(record: RecordEntry) -> int:
    """Bytes of a record on the card, as kernels take it."""
    return sum(card_bytes.aligned(_tensor_bytes(tensor)) for tensor in record.tensors)


def is_vector(tensor: TensorEntry) -> bool:
    """Whether a tensor is a norm or a bias."""
    return tensor.rows == 1 and tensor.format == "fp32"


def _tensor_bytes(tensor: TensorEntry) -> int:
    if is_vector(tensor):
        return 4 * tensor.cols
    return card_bytes.tensor_bytes(tensor.name, tensor.format, tensor.rows, tensor.cols)


def expert_stages(used: int) -> int:
    """Stages of a mixture that uses so many experts: for what is guessed for a layer, and one that is needed now."""
    return min(max(used + 1, MIN_STAGES), MAX_STAGES)


def _rank(one: CardPlacement) -> tuple[int, bool, bool, int]:
    """The least is the best. Where experts come and go, an embedding on the card costs them slots."""
    return one.streamed_bytes, one.expert_slots > 0, ("embed" in one.device) == (one.expert_slots > 0), one.device_bytes


def _candidates(manifest: Manifest) -> Iterator[CardPlacement]:
    """Every number of streamed layers, with the embedding on the card and without, with each number of slots; experts
    have the least of theirs, or are all on the card, which no layer leaves as long as one of them is there."""
    layers = [record for record in manifest.records if record.name.startswith("layer.")]
    experts = [record for record in manifest.records if record.name.startswith(EXPERT_PREFIX)]
    sizes = {record.name: record_card_bytes(record) for record in manifest.records}
    others = frozenset(sizes) - {record.name for record in (*layers, *experts)}
    every = frozenset(record.name for record in experts)
    expert_slots = least_expert_slots(manifest)[0]
    expert_bytes = max((sizes[name] for name in every), default=0)
    stage_bytes = max((record.bytes for record in experts), default=0)
    stages = 0 if manifest.spec.experts is None else expert_stages(manifest.spec.experts.used)
    is_apart = head_record(manifest) != "embed"
    for below in (frozenset[str](), frozenset(["embed"])) if is_apart else (frozenset[str](),):
        for count in range(len(layers) + 1):
            streamed = [layers[number] for number in spread(count, len(layers))]
            names = tuple(record.name for record in streamed)
            device = (others - below) | {record.name for record in layers} - set(names)
            slot_bytes = max((record.bytes for record in streamed), default=0)
            place_bytes = max((sizes[name] for name in names), default=0)
            for slots in (MAX_SLOTS, MIN_SLOTS) if names else (0,):
                found = CardPlacement(
                    frozenset(device), below, frozenset(), names, slots, slot_bytes, place_bytes, 0,
                    _total(sizes, device) + slots * slot_bytes + place_bytes, 0,
                    sum(record.bytes for record in streamed),
                )  # fmt: skip
                if not names:
                    experts_bytes = _total(sizes, every)
                    yield replace(found, device=found.device | every, device_bytes=found.device_bytes + experts_bytes)
                if names or every:
                    cached = replace(
                        found, expert_slots=expert_slots, expert_slot_bytes=expert_bytes, stages=stages,
                        stage_bytes=stage_bytes,
                    )  # fmt: skip
                    yield replace(cached, device_bytes=cached.device_bytes + cached.experts_bytes)


def _below(manifest: Manifest, found: CardPlacement, host_bytes: int | None) -> CardPlacement:
    """The same with a place for each record that the card does not take: in CPU memory, as far as there is room."""
    sizes = {record.name: record.bytes for record in manifest.records}
    experts = [name for name in sizes if name.startswith(EXPERT_PREFIX) and name not in found.device]
    fixed_bytes, streamed, stage_bytes = _total(sizes, found.host), found.streamed, found.stage_bytes
    for slots in (DISK_SLOTS, MIN_SLOTS):
        least_bytes = min(slots, len(experts)) * stage_bytes  # with all of them on the disk
        for count in range(len(streamed), -1, -1):
            here = [streamed[number] for number in spread(count, len(streamed))]
            disk_slots = min(slots, len(streamed) - count)
            needed_bytes = fixed_bytes + _total(sizes, here) + disk_slots * found.slot_bytes
            if host_bytes is None or needed_bytes + least_bytes <= host_bytes:
                room = None if host_bytes is None else host_bytes - needed_bytes
                kept, expert_disk_slots = _experts_below(sizes, experts, slots, stage_bytes, room)
                here += kept
                return replace(
                    found, host=found.host | set(here), nvme=frozenset((*streamed, *experts)) - set(here),
                    disk_slots=disk_slots, expert_disk_slots=expert_disk_slots,
                    host_bytes=needed_bytes + _total(sizes, kept) + expert_disk_slots * stage_bytes,
                )  # fmt: skip
    least_bytes = min(MIN_SLOTS, len(experts)) * stage_bytes
    raise DoesNotFitHost(fixed_bytes + min(MIN_SLOTS, len(streamed)) * found.slot_bytes + least_bytes)


def _experts_below(
    sizes: dict[str, int], experts: Sequence[str], slots: int, stage_bytes: int, room_bytes: int | None
) -> tuple[list[str], int]:
    """The experts that lie in so much of CPU memory, some of every layer, and slots there for those on the disk."""
    if room_bytes is None or _total(sizes, experts) <= room_bytes:
        return list(experts), 0
    slots = min(slots, len(experts))
    count = min((room_bytes - slots * stage_bytes) // stage_bytes, len(experts) - 1)
    return [experts[number] for number in spread(count, len(experts))], slots


def _total(sizes: dict[str, int], names: Iterable[str]) -> int:
    return sum(sizes[name] for name in names)

"""Where the records of a model lie when a card computes: in its memory, in the computer's, or on the disk.

Pure, and without numpy, as `placement`. Layers that the card has no memory for cross the link in every pass, through a
few slots of one size; from a slot they are laid out for the kernels in one place, which all of them share. The card has
the head, which every pass needs whole. Of an embedding of its own a pass needs single rows, which the computer's memory
can give, so it is the first to leave the card.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tierd.daemon.models.catalog import Manifest, RecordEntry, TensorEntry
from tierd.daemon.models.placement import MAX_SLOTS, MIN_SLOTS, DoesNotFit, head_record, spread
from tierd.daemon.models.spec import ModelSpec
from tierd.kernels import card_bytes

HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 256  # kernels.gpu.pages
DISK_SLOTS = 4  # of CPU memory: one is copied to the card while the others are read


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
    streamed_bytes: int  # of a pass, over the link


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
    least = min(wide or fitting, key=lambda one: (one.streamed_bytes, "embed" not in one.device, one.device_bytes))
    return _below(manifest, least, host_bytes)


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


def _candidates(manifest: Manifest) -> Iterator[CardPlacement]:
    """Every number of streamed layers, with the embedding on the card and without, with each number of slots."""
    layers = [record for record in manifest.records if record.name.startswith("layer.")]
    sizes = {record.name: record_card_bytes(record) for record in manifest.records}
    # Experts stay on the card: of those that would have to leave it nobody knows which ones a pass needs.
    others = frozenset(record.name for record in manifest.records if not record.name.startswith("layer."))
    is_apart = head_record(manifest) != "embed"
    for below in (frozenset[str](), frozenset(["embed"])) if is_apart else (frozenset[str](),):
        for count in range(len(layers) + 1):
            streamed = [layers[number] for number in spread(count, len(layers))]
            names = tuple(record.name for record in streamed)
            device = (others - below) | {record.name for record in layers} - set(names)
            slot_bytes = max((record.bytes for record in streamed), default=0)
            place_bytes = max((sizes[name] for name in names), default=0)
            for slots in (MAX_SLOTS, MIN_SLOTS) if names else (0,):
                yield CardPlacement(
                    frozenset(device), below, frozenset(), names, slots, slot_bytes, place_bytes, 0,
                    sum(sizes[name] for name in device) + slots * slot_bytes + place_bytes, 0,
                    sum(record.bytes for record in streamed),
                )  # fmt: skip


def _below(manifest: Manifest, found: CardPlacement, host_bytes: int | None) -> CardPlacement:
    """The same with a place for each record that the card does not take: in CPU memory, as far as there is room."""
    sizes = {record.name: record.bytes for record in manifest.records}
    fixed_bytes, streamed = sum(sizes[name] for name in found.host), found.streamed
    for slots in (DISK_SLOTS, MIN_SLOTS):
        for count in range(len(streamed), -1, -1):
            here = [streamed[number] for number in spread(count, len(streamed))]
            disk_slots = min(slots, len(streamed) - count)
            needed_bytes = fixed_bytes + _total(sizes, here) + disk_slots * found.slot_bytes
            if host_bytes is None or needed_bytes <= host_bytes:
                return replace(
                    found, host=found.host | set(here), nvme=frozenset(streamed) - set(here), disk_slots=disk_slots,
                    host_bytes=needed_bytes,
                )  # fmt: skip
    raise DoesNotFitHost(fixed_bytes + min(MIN_SLOTS, len(streamed)) * found.slot_bytes)


def _total(sizes: dict[str, int], names: Sequence[str]) -> int:
    return sum(sizes[name] for name in names)

"""Placement with a card: never over the link what fits, and who goes first."""

from __future__ import annotations

import pytest

from tests.daemon.models.test_placement import LAYERS, MIB, model
from tierd.daemon.models.catalog import Manifest, RecordEntry, TensorEntry
from tierd.daemon.models.placement import DoesNotFit, least_expert_slots
from tierd.daemon.models.placement_card import (
    DISK_SLOTS,
    CardPlacement,
    DoesNotFitHost,
    place_on_card,
    record_card_bytes,
)
from tierd.daemon.models.spec import ExpertsSpec

EXPERTS = ExpertsSpec(8, 2, 1, False, (0, 3, 4, 11))


def card_model(*, tied: bool, experts: ExpertsSpec | None = None) -> Manifest:
    """As `model`, with layers and experts of one int8-g32 matrix, which a card takes as it is."""
    from msgspec.structs import replace

    manifest = model(tied=tied, experts=experts)
    records = []
    for record in manifest.records:
        rows = record.bytes // 1024 // 2 if record.name.startswith(("layer.", "expert.")) else 1024
        kind = ("int8-g32", rows, 1024) if record.name != "final" else ("fp32", 1, 1024)
        tensor = TensorEntry(record.tensors[0].name, *kind, record.offset, record.bytes)
        records.append(RecordEntry(record.name, record.offset, record.bytes, "0", (tensor,)))
    return replace(manifest, records=tuple(records))


def whole_bytes(manifest: Manifest) -> int:
    return sum(record_card_bytes(record) for record in manifest.records)


def check(manifest: Manifest, found: CardPlacement) -> None:
    """Every record is in one place; what is streamed is below."""
    names = [*found.device, *found.host, *found.nvme]
    assert sorted(names) == sorted(record.name for record in manifest.records)
    assert set(found.streamed) == {name for name in found.host | found.nvme if name.startswith("layer.")}
    assert bool(found.slots) == bool(found.streamed) == bool(found.slot_bytes)
    sizes = {record.name: record for record in manifest.records}
    device = sum(record_card_bytes(sizes[name]) for name in found.device) + found.place_bytes + found.experts_bytes
    assert found.device_bytes == device + found.slots * found.slot_bytes
    host = sum(sizes[name].bytes for name in found.host) + found.expert_disk_slots * found.stage_bytes
    assert found.host_bytes == host + found.disk_slots * found.slot_bytes
    below = {name for name in names if name.startswith("expert.")} - found.device
    assert bool(found.expert_slots) == bool(below) and bool(found.expert_disk_slots) == bool(below & found.nvme)


@pytest.mark.parametrize("tied", [True, False])
def test_everything_that_fits_is_on_the_card(tied: bool) -> None:
    manifest = card_model(tied=tied)
    for memory in (None, whole_bytes(manifest), 10 * whole_bytes(manifest)):
        found = place_on_card(manifest, memory, 0)
        check(manifest, found)
        assert not found.streamed and not found.host and found.host_bytes == 0


def test_an_embedding_of_its_own_leaves_first() -> None:
    manifest = card_model(tied=False)
    found = place_on_card(manifest, whole_bytes(manifest) - 1, None)
    check(manifest, found)
    assert found.host == {"embed"} and not found.streamed


@pytest.mark.parametrize("tied", [True, False])
def test_layers_leave_one_by_one_and_never_more_than_they_must(tied: bool) -> None:
    manifest = card_model(tied=tied)
    before = 0
    for missing in range(0, 15 * MIB, 3 * MIB):
        memory = whole_bytes(manifest) - missing
        found = place_on_card(manifest, memory, None)
        check(manifest, found)
        assert found.device_bytes <= memory and before <= len(found.streamed) <= LAYERS and not found.nvme
        before = len(found.streamed)
    assert before > 0


def test_what_the_computers_memory_has_no_room_for_stays_on_the_disk() -> None:
    manifest = card_model(tied=True)
    with pytest.raises(DoesNotFit) as caught:
        place_on_card(manifest, 1, None)
    least = caught.value.needed_bytes
    everything = place_on_card(manifest, least, None)
    assert len(everything.streamed) == LAYERS and everything.disk_slots == 0
    half = place_on_card(manifest, least, everything.host_bytes - 2 * everything.slot_bytes)
    check(manifest, half)
    assert half.nvme and half.disk_slots == DISK_SLOTS and half.host_bytes <= everything.host_bytes
    with pytest.raises(DoesNotFitHost) as below:
        place_on_card(manifest, least, 1)
    found = place_on_card(manifest, least, below.value.needed_bytes)
    assert len(found.nvme) == LAYERS and found.host_bytes == below.value.needed_bytes


def test_where_the_embedding_lies_can_be_given() -> None:
    manifest = card_model(tied=False)
    assert "embed" in place_on_card(manifest, whole_bytes(manifest) - 1, None, embed_on_card=True).device


@pytest.mark.parametrize("tied", [True, False])
def test_experts_leave_before_any_layer_does_and_get_what_memory_is_left(tied: bool) -> None:
    manifest = card_model(tied=tied, experts=EXPERTS)
    whole, slot = whole_bytes(manifest), record_card_bytes(manifest.records[-1])
    everything = place_on_card(manifest, whole, 0)
    check(manifest, everything)
    assert not everything.expert_slots and not everything.host
    seen = set()
    for memory in range(whole - 1, whole - 40 * MIB, -MIB):
        found = place_on_card(manifest, memory, None)
        check(manifest, found)
        if not found.expert_slots:
            assert found.host == {"embed"}  # it gave the room
            continue
        assert not found.streamed and ("embed" in found.device) == tied
        assert memory - slot < found.device_bytes <= memory, "a slot more would have had room"
        seen.add(found.expert_slots)
    assert len(seen) > 3 and max(seen) < EXPERTS.total


def test_layers_are_streamed_only_where_the_least_of_experts_leaves_no_room() -> None:
    manifest = card_model(tied=True, experts=EXPERTS)
    with pytest.raises(DoesNotFit) as caught:
        place_on_card(manifest, 1, None)
    found = place_on_card(manifest, caught.value.needed_bytes, None)
    check(manifest, found)
    assert len(found.streamed) == LAYERS and found.expert_slots == least_expert_slots(manifest)[0] == 4
    assert found.experts_bytes == 4 * found.expert_slot_bytes + 3 * found.stage_bytes


def test_layers_take_the_computers_memory_before_experts_do() -> None:
    manifest = card_model(tied=True, experts=EXPERTS)
    with pytest.raises(DoesNotFit) as caught:
        place_on_card(manifest, 1, None)
    least = caught.value.needed_bytes
    everything = place_on_card(manifest, least, None)
    assert not everything.nvme and everything.expert_disk_slots == 0
    with pytest.raises(DoesNotFitHost) as below:
        place_on_card(manifest, least, 1)
    before = -1
    for host in range(below.value.needed_bytes, everything.host_bytes, 4 * MIB):
        found = place_on_card(manifest, least, host)
        check(manifest, found)
        assert found.host_bytes <= host and found.expert_disk_slots >= 2
        kept = sum(name.startswith("expert.") for name in found.host)
        assert kept == 0 or not any(name.startswith("layer.") for name in found.nvme)
        assert kept >= before
        before = kept
    assert before > EXPERTS.total // 2

"""Placement: never streams what fits, and says what would."""

from __future__ import annotations

import pytest

from tierd.daemon.models.catalog import Manifest, RecordEntry, Sampling, TensorEntry
from tierd.daemon.models.placement import (
    ALIGN_BYTES,
    MAX_SLOTS,
    MIN_SLOTS,
    DoesNotFit,
    Placement,
    place,
    spread,
    table_of,
)
from tierd.daemon.models.records import expert_record
from tierd.daemon.models.spec import ExpertsSpec, ModelSpec, RopeSpec

MIB = 1 << 20
LAYERS = 12


def model(
    *, tied: bool, layer_bytes: int = 4 * MIB, vocab: int = 16_000, hidden: int = 1024,
    experts: ExpertsSpec | None = None,
) -> Manifest:  # fmt: skip
    """A manifest of so many layers; tables of one byte for each weight."""
    records, offset = [], 0
    table_bytes = vocab * hidden
    names = ["embed", *(f"layer.{n}" for n in range(LAYERS)), "final", *([] if tied else ["head"])]
    if experts is not None:
        names += [expert_record(layer, number) for layer in experts.layers for number in range(experts.count)]
    for name in names:
        size = {"final": ALIGN_BYTES}.get(name, table_bytes if name in ("embed", "head") else layer_bytes)
        tensor = TensorEntry(name, "int8", vocab, hidden, offset, size)
        records.append(RecordEntry(name, offset, size, "0", (tensor,)))
        offset += size
    spec = ModelSpec(
        family="llama", num_layers=LAYERS, hidden=hidden, intermediate=1, heads=1, kv_heads=1, head_dim=16, vocab=vocab,
        context=128, norm_eps=1e-5, rope=RopeSpec("default", 1e4), tied=tied, experts=experts,
    )  # fmt: skip
    return Manifest(
        1, "m", "", "", "auto", spec, "int8", 128, "0", offset, 0.0, tuple(records), "0", None, (), None, False,
        Sampling(),
    )  # fmt: skip


def needed(manifest: Manifest, rows: int = 64) -> int:
    with pytest.raises(DoesNotFit) as caught:
        place(manifest, 1, rows)
    return caught.value.needed_bytes


@pytest.mark.parametrize("tied", [True, False])
def test_everything_that_fits_is_resident(tied: bool) -> None:
    manifest = model(tied=tied)
    for memory in (None, manifest.bytes, 10 * manifest.bytes):
        found = place(manifest, memory, 512)
        assert found.resident == {record.name for record in manifest.records} and not found.streamed
        assert (found.memory_bytes, found.rows, found.streamed_bytes) == (manifest.bytes, False, 0)


@pytest.mark.parametrize("tied", [True, False])
def test_memory_is_used_and_never_exceeded(tied: bool) -> None:
    manifest = model(tied=tied)
    least = needed(manifest)
    before: Placement | None = None
    for memory in range(least, manifest.bytes + MIB, MIB):
        found = place(manifest, memory, 64)
        assert found.memory_bytes <= memory
        names = {record.name for record in manifest.records}
        assert found.resident | set(found.streamed) | ({"embed"} if found.rows else set()) == names
        assert not found.resident & set(found.streamed)
        if found.streamed and memory >= least + found.slot_bytes:  # beyond the least, no slot's worth lies idle
            assert found.slots == MAX_SLOTS
        if before is not None and before.slots == found.slots:
            assert found.streamed_bytes <= before.streamed_bytes
        before = found


@pytest.mark.parametrize("tied", [True, False])
def test_the_least_memory_is_enough_and_one_byte_less_is_not(tied: bool) -> None:
    manifest = model(tied=tied)
    least = needed(manifest)
    found = place(manifest, least, 64)
    assert found.slots == MIN_SLOTS and found.memory_bytes == least < manifest.bytes // 3
    with pytest.raises(DoesNotFit, match=f"at least {least} bytes"):
        place(manifest, least - 1, 64)


def test_the_head_is_streamed_in_parts_no_larger_than_a_slot() -> None:
    manifest = model(tied=True)
    found = place(manifest, needed(manifest), 64)
    table = table_of(manifest.records[0])
    assert found.streamed[-1] == "embed" and found.rows
    assert found.part_panels * 16 * table.cols + 6 * ALIGN_BYTES <= found.slot_bytes == 4 * MIB
    assert found.streamed_bytes == manifest.bytes - ALIGN_BYTES


def test_a_head_alone_is_streamed_where_layers_fit() -> None:
    manifest = model(tied=False, layer_bytes=MIB, vocab=160_000)
    memory = LAYERS * MIB + ALIGN_BYTES + 64 * MIB
    found = place(manifest, memory, 64)
    assert found.streamed == ("head",) and {f"layer.{n}" for n in range(LAYERS)} <= found.resident


def test_single_rows_cost_less_than_an_embedding_but_a_whole_one_is_taken_where_it_fits() -> None:
    manifest = model(tied=False)
    embed_bytes = manifest.records[0].bytes
    # All but the embedding fits: nothing is read whole in a pass.
    found = place(manifest, manifest.bytes - embed_bytes + 2 * MIB, 64)
    assert found.rows and found.streamed == () and found.ring_bytes == 0 and found.rows_bytes == 64 * 16 * 1024
    spare = place(manifest, manifest.bytes - 1, 64)
    assert spare.memory_bytes < manifest.bytes
    assert ("embed" in spare.resident) is not spare.rows


@pytest.mark.parametrize(("count", "total"), [(0, 5), (1, 5), (3, 7), (7, 7), (12, 28)])
def test_spread_is_even(count: int, total: int) -> None:
    numbers = spread(count, total)
    assert len(set(numbers)) == count and all(0 <= number < total for number in numbers)
    gaps = [after - before for before, after in zip(numbers, numbers[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_record_with_other_tensors_is_no_table() -> None:
    manifest = model(tied=True)
    record = manifest.records[0]
    with pytest.raises(ValueError, match="has 2 tensors instead of a matrix"):
        table_of(RecordEntry("embed", 0, 1, "0", record.tensors * 2))


EXPERTS = ExpertsSpec(16, 2, 8, True, tuple(range(LAYERS)))


def test_experts_take_what_the_others_leave() -> None:
    manifest = model(tied=False, layer_bytes=MIB, experts=EXPERTS)
    others = {record.name for record in manifest.records if not record.name.startswith("expert.")}
    dense_bytes = sum(record.bytes for record in manifest.records if record.name in others)
    found = place(manifest, dense_bytes + 50 * MIB + 5, 64)
    assert found.resident == others and not found.streamed and not found.ring_bytes
    assert (found.expert_slots, found.expert_slot_bytes) == (50, MIB)
    assert found.memory_bytes == dense_bytes + 50 * MIB
    assert place(manifest, manifest.bytes, 64).expert_slots == 0
    assert place(manifest, manifest.bytes, 64).resident == {record.name for record in manifest.records}


def test_a_row_finds_room_for_its_experts_and_those_of_the_next_layer() -> None:
    manifest = model(tied=False, layer_bytes=MIB, experts=EXPERTS)
    for memory in range(needed(manifest), manifest.bytes, 16 * MIB):
        found = place(manifest, memory, 64)
        assert found.memory_bytes <= memory and 4 <= found.expert_slots <= EXPERTS.total
        # Layers and the head are read in every pass, so they go first: what is left is less than the largest of them.
        assert found.streamed_bytes == 0 or found.expert_slots <= 4 + 16

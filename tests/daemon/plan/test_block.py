"""How many sequences a batch that is alone gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.daemon.plan.scenes import GB
from tests.daemon.plan.scenes import MEASURED as SLOW
from tierd.daemon.card_memory import CardMemory
from tierd.daemon.config import Settings
from tierd.daemon.machine import Machine
from tierd.daemon.models.catalog import MANIFEST_VERSION, Manifest, RecordEntry, Sampling, TensorEntry
from tierd.daemon.models.placement_card import place_on_card
from tierd.daemon.models.records import plan_records
from tierd.daemon.plan.block import MAX_STREAMS, Block, Extent, choose_block
from tierd.daemon.plan.cards import CARDS
from tierd.daemon.plan.known import known_shape
from tierd.daemon.plan.subject import Subject
from tierd.daemon.plan.weights import prepared_bytes
from tierd.kernels.packing import WeightFormat, packed_bytes

SETTINGS = Settings(Path("/m"), Path("/c"), Path("/s"), nvme_mem=0)
# Processors that wait for the disk when one sequence is decoded, and not with a hundred.
MEASURED = msgspec.structs.replace(SLOW, compute={
    "int4-g32": msgspec.structs.replace(SLOW.compute["int4-g32"], layer_s=(1e-12, 4e-12, 2e-10))
})  # fmt: skip
EXTENT = Extent(1000, 200, 100, 400)


def subject(name: str = "llama-3-8b") -> Subject:
    """A prepared model of this shape in int4."""
    shape = known_shape(name)
    assert shape.spec is not None
    entries, offset = [], 0
    for record in plan_records(shape.spec):
        start, tensors = offset, []
        for tensor in record.tensors:
            kind = WeightFormat.FP32 if tensor.vector else WeightFormat.INT4_G32
            size = 4 * tensor.cols if tensor.vector else packed_bytes(kind, tensor.rows, tensor.cols)
            tensors.append(TensorEntry(tensor.name, kind.value, tensor.rows, tensor.cols, offset, size))
            offset += -(-size // 64) * 64
        offset = -(-offset // 4096) * 4096
        entries.append(RecordEntry(record.name, start, offset - start, "0", tuple(tensors)))
    manifest = Manifest(
        version=MANIFEST_VERSION, name=name, source="t", source_digest="0", weights="auto", spec=shape.spec,
        format="int4-g32", context=8192, digest="0" * 32, bytes=offset, created_s=0.0, records=tuple(entries),
        tokenizer_digest="0", template_digest=None, eos_ids=(2,), bos_id=None, add_bos=False, sampling=Sampling(),
    )  # fmt: skip
    formats = (("int4-g32", prepared_bytes(manifest)),)
    return Subject(name, "t", shape, formats, manifest.digest, 8192, manifest)


def choose(available: int, extent: Extent = EXTENT, streams: int | None = None, **asked: Any) -> Block | None:
    settings = dataclasses.replace(SETTINGS, **asked)
    return choose_block(subject(), extent, settings, Machine(64 * GB, available, 100 * GB), MEASURED, 2, streams)


def chosen(*given: Any, **asked: Any) -> Block:
    block = choose(*given, **asked)
    assert block is not None
    return block


CARD = CardMemory("NVIDIA GeForce RTX 4090", 24 * GB, 24 * GB)


def choose_on_card(
    free: int, ram: int = 64 * GB, extent: Extent = EXTENT, streams: int | None = None, card: CardMemory = CARD,
    **asked: Any,
) -> Block | None:  # fmt: skip
    settings = dataclasses.replace(SETTINGS, **asked)
    machine = Machine(64 * GB, ram, 100 * GB, card._replace(free_bytes=free))
    found = choose_block(subject(), extent, settings, machine, MEASURED, 2, streams)
    if found is not None:  # as the engine places it
        manifest, sizes = subject().manifest, found.sizes
        assert manifest is not None and sizes.host_weights_bytes is not None
        placed = place_on_card(manifest, sizes.weights_bytes, sizes.host_weights_bytes)
        assert sizes.device_bytes + placed.device_bytes + found.workspace_bytes <= free
        assert placed.host_bytes + sizes.host_bytes <= ram - ram // 10
        assert bool(placed.streamed) == ("cross to the card" in found.why[1])
        assert bool(placed.nvme) == ("from the disk" in found.why[1])
        pages = found.streams * -(-(extent.prompt_tokens + extent.answer_tokens) // 16) * 32 * 2 * 1024 * 16 * 2
        assert sizes.device_bytes + sizes.host_bytes >= pages
    return found


def on_card(*given: Any, **asked: Any) -> Block:
    block = choose_on_card(*given, **asked)
    assert block is not None
    return block


def test_a_block_on_a_card_that_has_all_weights() -> None:
    block, alone = on_card(24 * GB), on_card(24 * GB, streams=1)
    assert block.why[1] == "all weights are on the card" and block.sizes.host_bytes == 0
    assert block.streams > 30 and block.tokens_per_s > 10 * alone.tokens_per_s
    assert block.why[2] == "rates by the data sheet of rtx4090" and "the link to the card 0 s" in block.why[3]
    assert on_card(24 * GB, extent=EXTENT._replace(requests=5)).streams <= 5


def test_a_block_whose_weights_pass_through_a_card() -> None:
    block, alone = on_card(4 * GB), on_card(4 * GB, streams=1)
    assert block.streams > 8 and block.tokens_per_s > 4 * alone.tokens_per_s
    assert alone.why[3].startswith("a step waits for the link to the card")
    below = on_card(4 * GB, 2 * GB, streams=1)  # not even CPU memory has what the card has no room for
    assert "from the disk" in below.why[1] and below.why[3].startswith("a step waits for the disk")
    assert below.tokens_per_s < alone.tokens_per_s


def test_pages_leave_the_card_where_weights_gain_by_it() -> None:
    long = Extent(1000, 3000, 500, 4000)
    block = on_card(3 * GB, extent=long, streams=6)
    here = choose_on_card(3 * GB, extent=long, streams=6, host_mem=0)
    assert block.sizes.host_bytes > 0 and "of pages are read in CPU memory" in block.why[1]
    assert here is None or here.tokens_per_s < block.tokens_per_s


def test_a_block_of_a_mixture_waits_for_the_experts_that_have_no_place() -> None:
    mixture = subject("mixtral-8x7b")
    assert mixture.shape.spec is not None and mixture.shape.spec.experts is not None

    def block_on(card: int, ram: int) -> Block:
        machine = Machine(64 * GB, ram, 100 * GB, CARD._replace(total_bytes=card, free_bytes=card))
        found = choose_block(mixture, EXTENT, SETTINGS, machine, MEASURED, 2, 16)
        assert found is not None
        return found

    memories = ((48, 64), (24, 64), (12, 64), (24, 16))  # of the card, of the computer
    whole, some, few, disk = [block_on(card * GB, ram * GB) for card, ram in memories]
    assert whole.why[1] == "all weights are on the card" and "the link to the card 0 s" in whole.why[-1]
    assert whole.tokens_per_s > some.tokens_per_s > few.tokens_per_s and some.tokens_per_s > disk.tokens_per_s
    for block in (some, few):
        assert "of weights cross to the card" in block.why[1] and "from the disk" not in block.why[1]
        assert block.why[-1].startswith("a step waits for the link to the card")
    assert "of them from the disk" in disk.why[1] and disk.why[-1].startswith("a step waits for the disk")


@pytest.mark.long
def test_no_other_number_of_streams_is_better_on_a_card() -> None:
    best = on_card(4 * GB).tokens_per_s
    for streams in (1, 3, 8, 20, 48, 100):
        other = choose_on_card(4 * GB, streams=streams)
        assert other is None or other.tokens_per_s <= 1.05 * best, streams


def test_sizes_on_a_card_that_were_asked_for_are_taken() -> None:
    block = on_card(8 * GB, device_mem=2 * GB, host_mem=0, weights_mem=2 * GB, host_weights_mem=3 * GB)
    sizes = block.sizes
    assert (sizes.device_bytes, sizes.host_bytes, sizes.weights_bytes) == (2 * GB, 0, 2 * GB)
    assert sizes.host_weights_bytes == 3 * GB
    assert choose_on_card(3 * GB, device_mem=2 * GB, weights_mem=2 * GB) is None
    assert choose_on_card(GB // 4) is None


def test_a_card_that_nobody_knows_is_timed_as_one_like_it() -> None:
    block = on_card(24 * GB, card=CARD._replace(name="a card", total_bytes=CARDS["a100"].memory_bytes))
    assert block.why[2] == "rates by the data sheet of a100"


def test_streamed_weights_are_shared_by_many() -> None:
    block, alone = chosen(4 * GB), chosen(4 * GB, streams=1)
    assert "read in every step" in block.why[1]
    assert block.streams > 8 and block.tokens_per_s > 4 * alone.tokens_per_s


def test_pages_of_all_of_them_have_room_in_memory() -> None:
    block = chosen(4 * GB)
    page = 16 * 32 * 2 * 1024 * 4  # tokens, layers, keys and values, their elements, fp32
    assert block.sizes.device_bytes >= block.streams * (EXTENT.prompt_tokens + EXTENT.answer_tokens) // 16 * page
    assert block.sizes.device_bytes + block.sizes.weights_bytes < 4 * GB


def test_no_more_than_there_are_requests_or_than_were_asked_for() -> None:
    assert chosen(40 * GB, EXTENT._replace(requests=5)).streams <= 5
    assert chosen(40 * GB, streams=3).streams == 3
    assert chosen(60 * GB).streams <= MAX_STREAMS


def test_fewer_than_asked_for_where_no_more_fit() -> None:
    many = EXTENT._replace(requests=1000)
    found = chosen(4 * GB, many, streams=200)
    assert 1 <= found.streams < 200
    assert found == chosen(4 * GB, many, streams=found.streams), "of all the requests that there are"


def test_the_longest_request_fits_too() -> None:
    short, long = chosen(8 * GB, streams=1), chosen(8 * GB, EXTENT._replace(longest_tokens=4000), streams=1)
    assert long.sizes.device_bytes > 4 * short.sizes.device_bytes


def test_sizes_that_were_asked_for_are_taken() -> None:
    block = chosen(8 * GB, device_mem=2 * GB, host_mem=0, weights_mem=2 * GB)
    assert (block.sizes.device_bytes, block.sizes.host_bytes, block.sizes.weights_bytes) == (2 * GB, 0, 2 * GB)


def test_all_memory_is_used_and_no_more() -> None:
    few, many = chosen(8 * GB, streams=1), chosen(8 * GB, streams=40)
    for block in (few, many):
        sizes = block.sizes
        used = sizes.device_bytes + sizes.host_bytes + sizes.weights_bytes + block.workspace_bytes
        assert used == 8 * GB - 8 * GB // 10
    assert many.workspace_bytes > few.workspace_bytes


def test_nothing_where_not_one_fits() -> None:
    assert choose(GB // 8) is None


def test_no_other_number_of_streams_is_better() -> None:
    best = chosen(4 * GB).tokens_per_s
    for streams in (1, 2, 3, 5, 8, 13, 20, 32, 48):
        other = choose(4 * GB, streams=streams)
        assert other is None or other.tokens_per_s <= 1.05 * best, streams


def test_the_last_wave_counts() -> None:
    # 40 requests in blocks of 39 would take as long as in blocks of 20.
    assert chosen(60 * GB, EXTENT._replace(requests=40)).streams in (20, 40)

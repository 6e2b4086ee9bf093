"""Predicted bytes are those that the engine allocates; when this fails, daemon/plan/workspace.py has to follow."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.daemon.engine.live import Live
from tests.daemon.plan.decoders import allocated_bytes, tiny_decoder
from tests.tiers.pages import meta
from tierd.daemon.errors import BadConfig
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.placement import place
from tierd.daemon.models.spec import ExpertsSpec, ModelSpec
from tierd.daemon.plan.workspace import (
    codec_bytes,
    engine_bytes,
    ring_bytes,
    scratch_bytes,
    sink_bytes,
    stream_parts,
    vector_bytes,
)
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Bound

RECORDS_BYTES = 8192  # in which the kernels find all that: a job, and a record a layer
SPEC = ModelSpec(
    family="llama", num_layers=3, hidden=72, intermediate=100, heads=6, kv_heads=2, head_dim=16, vocab=101, context=512,
    norm_eps=1e-5, tied=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{}, {"qkv_bias": True}, {"qk_norm": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
     {"head_dim": 128, "heads": 32, "kv_heads": 2}, {"experts": ExpertsSpec(20, 4, 40, True, (0, 2))},
     {"experts": ExpertsSpec(4, 2, 100, True, (0, 2), True, 7.0, 1.702), "sink_logits": True}],
)  # fmt: skip
def test_scratch_and_vectors_of_a_decoder(change: dict[str, object]) -> None:
    spec = msgspec.structs.replace(SPEC, **change)
    for rows, threads in ((64, 1), (300, 2)):
        found = allocated_bytes(spec, rows, threads)
        wanted = scratch_bytes(spec, rows, threads) + vector_bytes(spec)
        assert wanted <= found <= wanted + RECORDS_BYTES


def test_queries_for_sinks() -> None:
    rows = 40
    with tiny_decoder(SPEC, rows, 1) as decoder:
        arena = np.zeros((3, decoder.layout.record_bytes), np.uint8)
        pages, ends = arena.ctypes.data + arena.strides[0] * np.arange(3), np.array([0, 3], np.int32)
        bounds = np.array([Bound(window=8, sinks=4, lead=1)], np.int32)
        for position, wanted_bytes in ((11, 0), (12, sink_bytes(SPEC, rows))):
            positions = np.array([position], np.int32)
            decoder.forward([arena], ends[:1], positions, ends[:1], pages, ends, ends[:1], bounds)
            assert decoder._sink_queries.nbytes == wanted_bytes


@pytest.mark.parametrize("weights", [None, 40 << 20])
def test_a_whole_engine(model_dir: Path, tmp_path: Path, weights: int | None) -> None:
    manifest = load_manifest(model_dir)
    spec = manifest.spec
    with Live(model_dir, tmp_path / "kv", device=9, host=5, nvme=7, context=256, weights_bytes=weights) as live:
        config, engine = live.config, live.engine
        found = engine_bytes(
            spec, kv_format="fp32", device_bytes=config.device_bytes, host_bytes=config.host_bytes,
            nvme_bytes=config.nvme_bytes, context=256, max_batch=config.max_batch_rows, max_streams=config.max_streams,
            threads=2,
        )  # fmt: skip
        pager, store = engine.pager, engine.pager.store
        assert store is not None
        assert found.device_slots == pager.device.slots and found.host_slots == pager.host.slots
        assert found.device == pager.device.slots * pager.device.record_bytes
        assert found.host == pager.host.slots * pager.host.record_bytes
        assert found.store_slots == store.capacity_slots
        assert found.store == store.capacity_slots * store.geometry.slot_bytes
        assert found.tables == 2 * 256 * 32 * 4
        placed = place(manifest, weights, max(config.max_batch_rows, config.max_streams + 4))
        assert engine.weights.memory_bytes == placed.memory_bytes
        assert (weights is None) == (placed.streamed_bytes == 0)


@pytest.mark.parametrize("format", ["fp32", "fp16"])
def test_the_ring_of_streamed_pages(format: str, tmp_path: Path) -> None:
    from tierd.tiers.mover import Mover
    from tierd.tiers.staging import Staging
    from tierd.tiers.store import Store

    layout = PageLayout(30, 3, 64, format)
    store = Store.open(
        tmp_path / "kv", record_bytes=layout.record_bytes, namespace=b"n" * 16, capacity_bytes=8 << 20,
        sections=layout.num_layers, section_bytes=layout.layer_bytes,
    )  # fmt: skip
    mover = Mover(wake=lambda: None)
    try:
        staging = Staging(store, mover, layout.num_layers, layout.layer_bytes)
        assert staging.bytes_for(11) == ring_bytes(layout, 11)
        assert staging.num_stages == stream_parts(layout)
    finally:
        mover.close()
        store.close()


class NoCodec:
    """`Codec` of pages that are as they were."""

    def __init__(self, memory: PageLayout, stored: PageLayout) -> None:
        self.layers = memory.num_layers
        self.layer_bytes, self.record_bytes = memory.layer_bytes, memory.record_bytes
        self.stored_layer_bytes, self.stored_record_bytes = stored.layer_bytes, stored.record_bytes

    def encode(self, page: object, stored: object) -> None:
        pass

    def decode(self, stored: object, page: object, layers: int) -> None:
        pass


@pytest.mark.parametrize("shape", [(30, 3, 64), (3, 2, 128)])
def test_what_a_store_of_packed_pages_takes(shape: tuple[int, int, int], tmp_path: Path) -> None:
    """The ring, and the scratch of a thread that had jobs of every kind."""
    from tierd.tiers.loader import PAGES_PER_JOB
    from tierd.tiers.mover import DISK_THREADS, Mover
    from tierd.tiers.policy import WRITE_GROUP_PAGES
    from tierd.tiers.repacked import RepackedStore
    from tierd.tiers.staging import GROUP_PAGES, Staging

    layout, stored = PageLayout(*shape), PageLayout(*shape, "k8v8")
    store = RepackedStore.open_packed(
        NoCodec(layout, stored), tmp_path / "kv", namespace=b"n" * 16, capacity_bytes=64 << 20
    )
    mover = Mover(wake=lambda: None)
    try:
        staging = Staging(store, mover, layout.num_layers, layout.layer_bytes)
        assert staging.bytes_for(11) == ring_bytes(layout, 11, decoded=True)
        pages = [meta(number) for number in range(WRITE_GROUP_PAGES)]
        store.write([(page, np.zeros(layout.record_bytes, np.uint8)) for page in pages])
        written = len(store._rooms.found)
        dests = [np.zeros(layout.record_bytes, np.uint8) for _ in range(PAGES_PER_JOB)]
        assert store.read_many([page.key for page in pages], dests) == [None] * PAGES_PER_JOB
        with staging.open([page.key for page in pages[:GROUP_PAGES]]) as flow:
            flow.section(0, 1e12)
        where = list(store.locate_many([page.key for page in pages[:GROUP_PAGES]]))
        lines = np.zeros((GROUP_PAGES, store.span_bytes(staging.stage_sections)), np.uint8)
        store.read_section_many(where, 0, lines, staging.stage_sections)
        assert codec_bytes(layout, stored) == DISK_THREADS * len(store._rooms.found) + written
    finally:
        mover.close()
        store.close()


def test_formats_that_heads_do_not_take_are_refused_with_what_to_do() -> None:
    narrow = msgspec.structs.replace(SPEC, head_dim=8)
    sizes = {"device_bytes": 1 << 20, "host_bytes": 0, "nvme_bytes": 0, "context": 0, "threads": 1}
    for formats, setting, hint in (
        ({"kv_format": "k8v4"}, "kv_format", "--kv-format fp16"),
        ({"kv_format": "fp16", "store_format": "k8v4"}, "store_format", "--store-format at same"),
    ):
        with pytest.raises(BadConfig, match=f"{setting} does not go with the model.*multiple of 16") as refused:
            engine_bytes(narrow, max_batch=50, max_streams=3, **formats, **sizes)
        assert refused.value.param == setting and hint in (refused.value.hint or "")

"""Bytes that an engine on the CPU takes, exactly, beside its weights: arenas, tables, scratch, store.

The formulas are those of `daemon.engine.assemble` and `kernels.cpu.step`; a test builds the real thing and compares.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tierd.daemon.engine_config import SAME
from tierd.daemon.errors import BadConfig
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.units import human_bytes
from tierd.kernels.layout import PAGE_TOKENS, PageLayout

MIN_PREFILL_ROWS = 4  # daemon.engine.scheduler
SLOT_BLOCK_BYTES = 4096  # tiers.slot: a slot is whole blocks
SLOT_FIXED_BYTES = 120  # of a slot's header
SLOT_CHECKSUM_BYTES = 8  # of each section, of the record, and of the header itself
STAGE_READ_BYTES = 128 << 10  # tiers.staging: of one page at a time
STAGES = 2
COPY_FORMAT = "fp16"  # kernels.rows
DISK_READERS = 8  # tiers.mover, beside one thread that writes
LOAD_PAGES, GROUP_PAGES, WRITE_PAGES = 32, 16, 32  # of one job: tiers.loader, tiers.staging, tiers.policy
# Of kernels.cpu, which can't be imported here (numba): rows of a panel, tokens of a step of attention, a cache line, a
# thread's tile of weights; phases of a layer, around the layers, and their bytes; bytes of 32 quantized numbers.
_PANEL_ROWS, _STEP_TOKENS, _LINE_BYTES, _TILE_BYTES = 16, 32, 64, 23040
_PHASES_PER_LAYER, _PHASES_AROUND, _PHASE_BYTES = 18, 4, 128
_GROUP, _QUANTIZED_GROUP_BYTES = 32, 80
_EXPERT_RECORD_BYTES, _GROUP_RECORD_BYTES, _INT_BYTES = 144, 12, 4  # of an expert, of a group of rows, of an index


class EngineBytes(NamedTuple):
    """What an engine allocates. Slots count pages.

    `ring_share`: of the staging ring, for each byte of pages that a step streams; the ring is there only meanwhile.
    `stored_share`: of the disk, for each byte of pages in memory. `stream_parts`: in so many parts streamed pages come.
    """

    page: int
    device_slots: int
    host_slots: int
    store_slots: int
    device: int
    host: int
    store: int  # on disk, when it is full
    tables: int  # cos and sin of every position
    scratch: int  # of a pass
    vectors: int  # norms and biases, copied
    sinks: int  # queries of rows that see sinks; there once such a row has come
    logits: int  # of a step in which every stream draws a token
    exact: int  # copies of tokens that are packed as well
    codec: int  # pages on their way to and from a store that packs them more
    ring_share: float
    stored_share: float
    stream_parts: int

    @property
    def workspace(self) -> int:
        """Memory beside weights and arenas."""
        return self.tables + self.scratch + self.vectors + self.sinks + self.logits + self.exact + self.codec


def engine_bytes(
    spec: ModelSpec, *, kv_format: str, device_bytes: int, host_bytes: int, nvme_bytes: int, context: int,
    max_batch: int, max_streams: int, threads: int, store_format: str = SAME, ladder: tuple[int, int] = (0, 0),
) -> EngineBytes:  # fmt: skip
    """The bytes of an engine with these settings. `context` 0: the model's own. `ladder`: `kv_exact_first`, `_last`.

    Raises BadConfig for page formats that the model does not take.
    """
    layout = page_layout(spec, kv_format)
    page = layout.record_bytes
    device_slots, host_slots = device_bytes // page, host_bytes // page
    stored = stored_layout(spec, layout, store_format)
    slot = slot_bytes(stored)
    store_slots = nvme_bytes // slot if nvme_bytes >= stored.record_bytes else 0
    capacity_tokens = (device_slots + host_slots + store_slots) * layout.page_tokens
    positions = min(context or spec.context, capacity_tokens)
    max_rows = max(max_batch, max_streams + MIN_PREFILL_ROWS)
    return EngineBytes(
        page=page,
        device_slots=device_slots,
        host_slots=host_slots,
        store_slots=store_slots,
        device=device_slots * page,
        host=host_slots * page,
        store=store_slots * slot,
        tables=2 * positions * (spec.head_dim // 2) * 4,
        scratch=scratch_bytes(spec, max_rows, threads),
        vectors=vector_bytes(spec),
        sinks=sink_bytes(spec, max_rows),
        logits=max_streams * padded(spec.vocab) * 4,
        exact=exact_bytes(spec, kv_format, ladder, max_batch, max_streams),
        codec=codec_bytes(layout, stored) if stored != layout else 0,
        ring_share=ring_bytes(layout, 1, decoded=stored != layout) / page,
        stored_share=stored.record_bytes / page,
        stream_parts=stream_parts(layout),
    )


def page_layout(spec: ModelSpec, format: str, setting: str = "kv_format", model: str = "the model") -> PageLayout:
    """Pages of a format. Raises BadConfig where the model's heads do not take it; `setting` names the format."""
    try:
        return PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, format)
    except ValueError as exc:
        hint = "leave --store-format at same" if setting == "store_format" else "give --kv-format fp16"
        raise BadConfig(f"{setting} does not go with {model}: {exc}", hint=hint, param=setting) from exc


def stored_layout(spec: ModelSpec, layout: PageLayout, store_format: str, model: str = "the model") -> PageLayout:
    """What a page is in the store, whose pages are `layout` in memory. Raises BadConfig for what saves nothing, and for
    what the model's heads do not take."""
    if store_format in (SAME, layout.format):
        return layout
    found = page_layout(spec, store_format, "store_format", model)
    if found.record_bytes >= layout.record_bytes:
        raise BadConfig(
            f"a page of {model} takes {human_bytes(found.record_bytes)} as {found.format} and "
            f"{human_bytes(layout.record_bytes)} as {layout.format}, as it is in memory: storing it so saves nothing",
            hint="leave --store-format at same, or choose one of fewer bits",
            param="store_format",
        )
    return found


def copies_needed(ladder: tuple[int, int], max_rows: int, max_streams: int) -> int:
    """Exact copies that requests hold at once at most, in pages: of the first and of the last tokens that each sees
    exact (`kernels.rows.Ladder`), and of what a step writes. Chunks may begin and end within pages."""
    return max_streams * (sum(ladder) // PAGE_TOKENS + 2) + -(-max_rows // PAGE_TOKENS)


def exact_bytes(
    spec: ModelSpec, kv_format: str, ladder: tuple[int, int], max_batch: int, max_streams: int,
    copy_format: str = COPY_FORMAT,
) -> int:  # fmt: skip
    """Memory of the exact copies beside packed pages, and of the page that is written for nobody; 0 without a ladder,
    whose last tokens are 0 then. `copy_format`: what they hold (`Backend.copy_format`)."""
    if not ladder[1]:
        return 0
    max_rows = max(max_batch, max_streams + MIN_PREFILL_ROWS)
    record = page_layout(spec, copy_format).record_bytes
    return copies_needed(ladder, max_rows, max_streams) * record + page_layout(spec, kv_format).record_bytes


def codec_bytes(layout: PageLayout, stored: PageLayout) -> int:
    """Scratch of a store that packs its pages: each thread keeps that of the largest job it had. (Steps that stream
    more than 64 groups of pages have larger ones.)"""
    read = max(LOAD_PAGES * stored.record_bytes, GROUP_PAGES * _span_bytes(stored, _stage_sections(layout)))
    return DISK_READERS * read + WRITE_PAGES * stored.record_bytes


def slot_bytes(layout: PageLayout) -> int:
    """Bytes of a slot of the store: its header, and the record."""
    header = SLOT_FIXED_BYTES + SLOT_CHECKSUM_BYTES * (2 + layout.num_layers)
    return _up(header, SLOT_BLOCK_BYTES) + _up(layout.record_bytes, SLOT_BLOCK_BYTES)


def ring_bytes(layout: PageLayout, streamed_pages: int, decoded: bool = False) -> int:
    """Memory of the staging ring for so many streamed pages. `decoded`: they are packed more in the store."""
    sections = _stage_sections(layout)
    stages = min(STAGES, stream_parts(layout))
    span = _up(sections * layout.layer_bytes, SLOT_BLOCK_BYTES) if decoded else _span_bytes(layout, sections)
    return stages * streamed_pages * span


def _span_bytes(layout: PageLayout, sections: int) -> int:
    """Of a buffer that so many sections are read into."""
    span = sections * layout.layer_bytes
    if layout.layer_bytes % SLOT_BLOCK_BYTES:
        span = _up(span + SLOT_BLOCK_BYTES - 1, SLOT_BLOCK_BYTES)  # a section starts anywhere in a block
    return span


def stream_parts(layout: PageLayout) -> int:
    """In how many parts, one behind the other, the streamed pages of a step are read."""
    return -(-layout.num_layers // _stage_sections(layout))


def _stage_sections(layout: PageLayout) -> int:
    return min(max(1, STAGE_READ_BYTES // layout.layer_bytes), layout.num_layers)


def scratch_bytes(spec: ModelSpec, max_rows: int, threads: int) -> int:
    """What `CpuDecoder` keeps to compute with."""
    attended = spec.heads * spec.head_dim
    fused = attended + 2 * spec.kv_heads * spec.head_dim
    dense = spec.experts is None or len(spec.experts.layers) < spec.num_layers
    inner = (2 * spec.intermediate, spec.intermediate) if dense else ()
    widths = (spec.hidden, spec.hidden, spec.hidden, fused, attended, *inner)
    widest = max(spec.hidden, attended, *inner[1:])
    strides = [*(4 * padded(width) for width in widths), _quantized_row_bytes(widest)]
    buffers = sum(max_rows * _odd_lines(stride) + _LINE_BYTES for stride in strides) + _experts_bytes(spec, max_rows)
    group = spec.heads // spec.kv_heads
    queries = max(24 if spec.head_dim <= 64 else 12, group)
    sums = 2 * queries * (spec.head_dim + 2) + queries + 2
    attention = 4 * (2 * _STEP_TOKENS * spec.head_dim + queries * (spec.head_dim + _STEP_TOKENS) + sums)
    phases = (_PHASES_PER_LAYER * spec.num_layers + _PHASES_AROUND) * _PHASE_BYTES + _LINE_BYTES
    return buffers + threads * (_up(attention, _LINE_BYTES) + _TILE_BYTES) + _LINE_BYTES + phases


def _quantized_row_bytes(cols: int) -> int:
    return -(-cols // _GROUP) * _QUANTIZED_GROUP_BYTES


def _experts_bytes(spec: ModelSpec, max_rows: int) -> int:
    """What mixtures need beside that: a slot for each row and expert that it goes through, and who has which."""
    experts = spec.experts
    if experts is None:
        return 0
    slots = max_rows * experts.used
    gathered = max(4 * padded(spec.hidden), _quantized_row_bytes(max(spec.hidden, experts.intermediate)))
    both = 4 * max(padded(2 * experts.intermediate), padded(spec.hidden))
    total = max_rows * _odd_lines(4 * padded(experts.count)) + _LINE_BYTES
    for stride in (gathered, both, 4 * padded(experts.intermediate)):
        total += slots * _odd_lines(stride) + _LINE_BYTES
    total += _INT_BYTES * (6 * slots + experts.count)
    return total + spec.num_layers * experts.count * _GROUP_RECORD_BYTES + experts.total * _EXPERT_RECORD_BYTES


def sink_bytes(spec: ModelSpec, max_rows: int) -> int:
    """Queries as rows turn them for the sinks that they see."""
    return max_rows * _odd_lines(4 * padded(spec.heads * spec.head_dim)) + _LINE_BYTES


def vector_bytes(spec: ModelSpec) -> int:
    """Norms and biases, each filled up to whole panels."""
    fused = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    layer = 2 * padded(spec.hidden)
    layer += padded(fused) * spec.qkv_bias + padded(spec.hidden) * spec.o_bias
    layer += 2 * padded(spec.head_dim) * spec.qk_norm
    layer += (padded(2 * spec.intermediate) + padded(spec.hidden)) * spec.mlp_bias
    layer += padded(spec.heads) * spec.sink_logits
    routers = 0 if (experts := spec.experts) is None else len(experts.layers) * padded(experts.count) * experts.bias
    return 4 * (spec.num_layers * layer + routers + padded(spec.hidden))


def sums_bytes(spec: ModelSpec, cut_rows: int, tokens: int) -> int:
    """Attention's sums of a pass whose longest row sees `tokens` tokens; they grow with what passes need."""
    return cut_rows * spec.heads * math.ceil(tokens / 256) * (4 * spec.head_dim + 64) + 64


def padded(count: int) -> int:
    """Up to whole panels of rows."""
    return -(-count // _PANEL_ROWS) * _PANEL_ROWS


def _odd_lines(row_bytes: int) -> int:
    lines = -(-row_bytes // _LINE_BYTES)
    return _LINE_BYTES * (lines + 1 - lines % 2)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

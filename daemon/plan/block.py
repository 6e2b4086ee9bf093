"""How many sequences a batch that has the machine for itself decodes at once, and what memory they get.

FlexGen's block: what a pass reads of the weights serves all of its sequences, so there should be as many as have room.
But more of them leave less memory to weights, and what finds none is read in every pass. So each number of sequences is
placed as the engine would place it, and timed by the cost model. There is no linear program: nothing is left to choose
then but which part of the pages leaves a card, so that weights have its place. All pages of the block are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from tierd.daemon.card_memory import CardMemory
from tierd.daemon.config import Settings
from tierd.daemon.machine import Machine, Sizes
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.models.placement_card import place_on_card, record_card_bytes
from tierd.daemon.models.records import EXPERT_PREFIX
from tierd.daemon.plan import planner
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES
from tierd.daemon.plan.auto_card import CARD_COPY_FORMAT, usable_bytes, workspace_bytes
from tierd.daemon.plan.cards import card_like
from tierd.daemon.plan.cost import Placement, Work, seconds
from tierd.daemon.plan.rates import Measured
from tierd.daemon.plan.scenario import Limits, Load, card_task, cpu_task
from tierd.daemon.plan.subject import Subject
from tierd.daemon.plan.weights import prepared_bytes
from tierd.daemon.plan.workspace import MIN_PREFILL_ROWS, engine_bytes, exact_bytes, page_layout
from tierd.daemon.settled import resolve_sizes, settle
from tierd.daemon.units import counted, human_bytes
from tierd.kernels.layout import PageLayout

MAX_STREAMS = 240  # a connection carries 256 requests, and some wait to take the place of one that ends
_SHARES = (1.0, 0.5, 0.25, 0.0)  # of the block's pages, that lie on a card
ROWS = (512, 1024, 2048)  # of a step: where a pass over the weights is slow, more rows of prompts share it
_GAIN = 1.02  # as good as that is not better: fewer streams and rows take less memory, and answers come earlier


class Extent(NamedTuple):
    """How large the requests of a batch are, in tokens: estimates, a prompt is not tokenized beforehand."""

    requests: int
    prompt_tokens: int  # of one, in the mean
    answer_tokens: int
    longest_tokens: int  # prompt and answer of the largest


class Block(NamedTuple):
    """What the engine of a batch gets. `tokens_per_s` is predicted; `why` is for people."""

    streams: int
    rows: int
    sizes: Sizes
    workspace_bytes: int  # beside them
    tokens_per_s: float  # of the whole batch, prompts included
    why: tuple[str, ...]


def choose_block(
    subject: Subject, extent: Extent, settings: Settings, computer: Machine, measured: Measured, threads: int,
    streams: int | None = None,
) -> Block | None:  # fmt: skip
    """The block with the most tokens a second; None when not even one sequence fits.

    `streams`: so many; where they do not fit, fewer. Sizes that the settings name are taken as they are.
    """
    settings, computer = settle(settings, computer)
    place_block = _block if computer.card is None else _card_block
    most = min(extent.requests, streams or MAX_STREAMS, MAX_STREAMS)
    found: Block | None = None
    for counts in ([most], _grid(most)) if streams else (_grid(most),):
        for count in counts:
            for rows in sorted({max(rows, settings.max_batch, count + MIN_PREFILL_ROWS) for rows in ROWS}):
                block = place_block(subject, extent, settings, computer, measured, threads, count, rows)
                if block is not None and (found is None or block.tokens_per_s > _GAIN * found.tokens_per_s):
                    found = block
        if found is not None:
            break
    return found


def _grid(most: int) -> Iterator[int]:
    number = 1
    while number < most:
        yield number
        number = max(number * 3 // 2, number + 1)
    yield most


def _block(
    subject: Subject, extent: Extent, settings: Settings, computer: Machine, measured: Measured, threads: int,
    streams: int, rows: int,
) -> Block | None:  # fmt: skip
    """So many sequences in steps of so many rows, or None when they do not fit."""
    spec = subject.shape.spec
    assert spec is not None  # of a prepared model
    context = settings.ctx or subject.context
    sizes = _sizes(subject, extent, settings, computer, streams)
    bytes_of = engine_bytes(
        spec, kv_format=settings.kv_format, store_format=settings.store_format,
        device_bytes=sizes.device_bytes, host_bytes=sizes.host_bytes,
        nvme_bytes=sizes.nvme_bytes, context=context, max_batch=rows, max_streams=streams, threads=threads,
        ladder=(settings.kv_exact_first, settings.kv_exact_last),
    )  # fmt: skip
    usable = min(computer.available_ram, computer.total_ram)
    room = usable - usable // 10 - sizes.device_bytes - sizes.host_bytes - bytes_of.workspace
    if room <= 0:
        return None
    if settings.weights_mem is None:
        sizes = sizes._replace(weights_bytes=room)
    ladder = settings.kv_exact_first, settings.kv_exact_last
    limits = Limits(settings.kv_format, rows, streams, threads, context, settings.store_format, ladder)
    load = Load(max(extent.prompt_tokens, 1), max(extent.answer_tokens, 1), streams)
    try:
        task = cpu_task(subject, load, sizes, computer, measured, limits)
    except DoesNotFit:
        return None
    work = planner.work_of(task, task.formats[0], streams)
    if work.kv_bytes > sizes.device_bytes + sizes.host_bytes:
        return None
    streamed = float(work.step_bytes > 0 and task.placed is not None)
    at = Placement(1.0 - streamed, 0.0, streamed, 1.0, 0.0, 0.0)
    read = work.step_bytes * streamed
    what = f"{human_bytes(read)} of weights are read in every step" if read else "all weights are in memory"
    return _timed(task, work, at, extent, Block(streams, rows, sizes, bytes_of.workspace, 0.0, (what,)))


def _timed(task: planner.Task, work: Work, at: Placement, extent: Extent, block: Block) -> Block:
    """The same with how fast it is, the last, smaller block included."""
    step = seconds(work, task.machine, at)
    prompts, prompt = block.streams * task.prompt_tokens, task.prompt_tokens
    prompt_s = planner.prefill_s(task, task.formats[0], work, at, prompts, prompt)
    waves = -(-extent.requests // block.streams)
    rate = extent.requests * task.answer_tokens / (waves * (prompt_s + task.answer_tokens * step.step))
    needs = {"the disk": step.disk, "the computation": step.device}
    needs |= {} if task.machine.unified else {"the link to the card": step.link}
    bound = {"disk": "the disk", "link": "the link to the card"}.get(step.bound, "the computation")
    return block._replace(
        tokens_per_s=rate,
        why=(
            f"{counted(block.streams, 'sequence')} of about {prompt} + {task.answer_tokens} tokens at once",
            *block.why,
            f"a step waits for {bound} ({', '.join(f'{name} {needed:.3g} s' for name, needed in needs.items())})",
        ),
    )


def _card_block(
    subject: Subject, extent: Extent, settings: Settings, computer: Machine, measured: Measured, threads: int,
    streams: int, rows: int,
) -> Block | None:  # fmt: skip
    """The same on a card: the best of the parts of the pages that may lie there."""
    assert subject.manifest is not None
    weights_bytes = sum(map(record_card_bytes, subject.manifest.records))
    best: Block | None = None
    for share in _SHARES if settings.device_mem is None and settings.host_mem != 0 else (1.0,):
        found = _card_block_with(subject, extent, settings, computer, measured, streams, rows, share)
        if found is not None and (best is None or found.tokens_per_s > _GAIN * best.tokens_per_s):
            best = found
        if found is not None and found.sizes.weights_bytes >= weights_bytes:
            break  # with fewer pages on the card nothing else comes to it
    return best


def _card_block_with(
    subject: Subject, extent: Extent, settings: Settings, computer: Machine, measured: Measured, streams: int,
    rows: int, share: float,
) -> Block | None:  # fmt: skip
    spec, manifest, card = subject.shape.spec, subject.manifest, computer.card
    assert spec is not None and manifest is not None and card is not None  # a prepared model, and who computes it
    context, ladder = settings.ctx or subject.context, (settings.kv_exact_first, settings.kv_exact_last)
    workspace = workspace_bytes(spec, context, rows, streams) + card.free_bytes - usable_bytes(card)
    workspace += exact_bytes(spec, settings.kv_format, ladder, rows, streams, CARD_COPY_FORMAT)
    sizes = _sizes(subject, extent, settings, computer, streams)
    if share < 1.0:  # rows are written on the card
        whole, layout = sizes.device_bytes, page_layout(spec, settings.kv_format)
        least = (streams + -(-rows // layout.page_tokens)) * layout.record_bytes
        device = min(max(round(share * whole), least, LEAST_ARENA_BYTES), whole)
        below = whole - device if settings.host_mem is None else settings.host_mem
        sizes = sizes._replace(device_bytes=device, host_bytes=below)
    others = max(card.total_bytes - card.free_bytes, 0)
    room = card.free_bytes - workspace - min(settings.yield_device_mem, others) - sizes.device_bytes
    usable = min(computer.available_ram, computer.total_ram)
    below = usable - usable // 10 - sizes.host_bytes
    if room <= 0 or below <= 0:
        return None
    weights = room if settings.weights_mem is None else settings.weights_mem
    host_weights = below if settings.host_weights_mem is None else min(settings.host_weights_mem, below)
    try:
        placed = place_on_card(manifest, weights, host_weights)
    except DoesNotFit:
        return None
    if placed.device_bytes > room:
        return None
    sizes = sizes._replace(weights_bytes=weights, host_weights_bytes=host_weights)
    task = _card_task(subject, extent, settings, card, measured, sizes, streams, rows)
    files = {record.name: record.bytes for record in manifest.records}
    layers_bytes = sum(size for name, size in files.items() if name.startswith(("layer.", EXPERT_PREFIX)))
    # A block goes through nearly all experts in each step, of which a part has places at that time.
    missing = 1.0 - placed.expert_slots / spec.experts.total if spec.experts and placed.expert_slots else 0.0
    crossing = dict.fromkeys(placed.streamed, 1.0) | {
        name: missing for name in (placed.host | placed.nvme) if name.startswith(EXPERT_PREFIX)
    }
    work = planner.work_of(task, task.formats[0], streams)._replace(
        weights_bytes=layers_bytes, step_bytes=layers_bytes, layers=max(len(crossing), 1)
    )
    if work.kv_bytes > sizes.device_bytes + sizes.host_bytes:
        return None
    disk = sum(part * files[name] for name, part in crossing.items() if name in placed.nvme) / layers_bytes
    host = sum(part * files[name] for name, part in crossing.items()) / layers_bytes - disk
    on_card = min(sizes.device_bytes / max(work.kv_bytes, 1), 1.0)
    at = Placement(1.0 - host - disk, host, disk, on_card, 1.0 - on_card, 0.0)
    what = "all weights are on the card"
    if crossing:
        what = f"{human_bytes((host + disk) * layers_bytes)} of weights cross to the card in every step"
        what += f", {human_bytes(disk * layers_bytes)} of them from the disk" if placed.nvme else ""
    if on_card < 1.0:
        what += f"; {human_bytes((1.0 - on_card) * work.kv_bytes)} of pages are read in CPU memory"
    rates = f"rates by the data sheet of {card_like(card.name, card.total_bytes).name}"
    return _timed(task, work, at, extent, Block(streams, rows, sizes, workspace, 0.0, (what, rates)))


def _card_task(
    subject: Subject, extent: Extent, settings: Settings, card: CardMemory, measured: Measured, sizes: Sizes,
    streams: int, rows: int,
) -> planner.Task:  # fmt: skip
    """What the cost model is to time; where everything lies is decided. Of weights it has what kernels read."""
    manifest = subject.manifest
    assert manifest is not None
    records = tuple(msgspec.structs.replace(one, bytes=record_card_bytes(one)) for one in manifest.records)
    as_read = prepared_bytes(msgspec.structs.replace(manifest, records=records))
    found = subject._replace(formats=((manifest.format, as_read),))
    load = Load(max(extent.prompt_tokens, 1), max(extent.answer_tokens, 1), streams)
    return card_task(
        found, load, card_like(card.name, card.total_bytes), measured, device_bytes=card.free_bytes,
        host_bytes=sizes.host_bytes, disk_bytes=0, kv_formats=(settings.kv_format,), max_batch=rows,
    )  # fmt: skip


def _sizes(subject: Subject, extent: Extent, settings: Settings, computer: Machine, streams: int) -> Sizes:
    """Arenas for so many sequences, and for the longest one; what the settings name is taken as it is."""
    spec = subject.shape.spec
    assert spec is not None
    layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, settings.kv_format)
    each = -(-(extent.prompt_tokens + extent.answer_tokens) // layout.page_tokens) + 1
    context = settings.ctx or subject.context
    longest = -(-min(extent.longest_tokens, context) // layout.page_tokens) + 1
    sizes = resolve_sizes(settings, computer)
    pages = max(streams * each, longest) * layout.record_bytes
    device = max(pages, LEAST_ARENA_BYTES) if settings.device_mem is None else settings.device_mem
    host = settings.host_mem if settings.host_mem is not None else 0
    if settings.host_mem is None and settings.device_mem is not None:
        host = max(pages - device, 0)
    return sizes._replace(device_bytes=device, host_bytes=host)

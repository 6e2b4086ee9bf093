"""How many sequences a batch that has the machine for itself decodes at once, and what memory they get.

FlexGen's block: what a pass reads of the weights serves all of its sequences, so there should be as many as have room.
But more of them leave less memory to weights, and what finds none is read in every pass. So each number of sequences is
placed as the engine would place it, and timed by the cost model. There is no linear program: on this machine's
processors nothing is left to choose then. All pages of the block are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tierd.daemon.config import Settings
from tierd.daemon.machine import Machine, Sizes
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.plan import planner
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES
from tierd.daemon.plan.cost import Placement, seconds
from tierd.daemon.plan.rates import Measured
from tierd.daemon.plan.scenario import Limits, Load, cpu_task
from tierd.daemon.plan.subject import Subject
from tierd.daemon.plan.workspace import MIN_PREFILL_ROWS, engine_bytes
from tierd.daemon.settled import resolve_sizes, settle
from tierd.daemon.units import counted, human_bytes
from tierd.kernels.layout import PageLayout

MAX_STREAMS = 240  # a connection carries 256 requests, and some wait to take the place of one that ends
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
    settings, computer = settle(settings, computer._replace(card=None))
    most = min(extent.requests, streams or MAX_STREAMS, MAX_STREAMS)
    found: Block | None = None
    for counts in ([most], _grid(most)) if streams else (_grid(most),):
        for count in counts:
            for rows in sorted({max(rows, settings.max_batch, count + MIN_PREFILL_ROWS) for rows in ROWS}):
                block = _block(subject, extent, settings, computer, measured, threads, count, rows)
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
    step = seconds(work, task.machine, at)
    prompt_s = planner.prefill_s(task, task.formats[0], work, at, streams * load.prompt_tokens, load.prompt_tokens)
    waves = -(-extent.requests // streams)
    rate = extent.requests * load.answer_tokens / (waves * (prompt_s + load.answer_tokens * step.step))
    read = work.step_bytes * streamed
    why = (
        f"{counted(streams, 'sequence')} of about {load.prompt_tokens} + {load.answer_tokens} tokens at once",
        f"{human_bytes(read)} of weights are read in every step" if read else "all weights are in memory",
        f"a step waits for {'the disk' if step.bound == 'disk' else 'the computation'}"
        f" ({step.disk:.3g} s and {step.device:.3g} s)",
    )
    return Block(streams, rows, sizes, bytes_of.workspace, rate, why)


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

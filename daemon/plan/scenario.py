"""From a model and a machine to a `planner.Task`: this computer as it is, or a card that somebody thinks of buying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tierd.daemon.engine_config import SAME
from tierd.daemon.machine import Machine as Computer
from tierd.daemon.machine import Sizes
from tierd.daemon.models.placement import place
from tierd.daemon.plan.cards import EFFICIENCY, RESERVED_BYTES, Card
from tierd.daemon.plan.cost import Machine
from tierd.daemon.plan.planner import Format, Task
from tierd.daemon.plan.processors import Cores, Roofline
from tierd.daemon.plan.rates import Measured
from tierd.daemon.plan.subject import Subject
from tierd.daemon.plan.workspace import MIN_PREFILL_ROWS, EngineBytes, engine_bytes, padded, sums_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """What the machine is asked for. `throughput`: as many tokens a second as can be had."""

    prompt_tokens: int
    answer_tokens: int
    streams: int
    throughput: bool = False


class Limits(NamedTuple):
    """Settings of an engine that its bytes depend on."""

    kv_format: str
    max_batch: int
    max_streams: int
    threads: int
    context: int
    store_format: str = SAME
    ladder: tuple[int, int] = (0, 0)  # `kv_exact_first`, `kv_exact_last`


def cpu_task(
    subject: Subject, load: Load, sizes: Sizes, computer: Computer, measured: Measured, limits: Limits
) -> Task:
    """The task of an engine of these sizes, on this machine's processors.

    Raises DoesNotFit when a prepared model can't even be streamed through the memory for its weights.
    """
    formats = tuple(
        Format(name, found, limits.kv_format, Cores(measured.compute_for(subject.digest, name)[0], measured.loop))
        for name, found in subject.formats
    )
    placed = None
    if subject.manifest is not None and subject.manifest.records:
        max_rows = max(limits.max_batch, limits.max_streams + MIN_PREFILL_ROWS)
        placed = place(subject.manifest, sizes.weights_bytes, max_rows)
    usable = min(computer.available_ram, computer.total_ram)
    streaming = measured.streaming
    machine = Machine(
        unified=True,
        device_bytes=usable - usable // 10,
        host_bytes=0,
        disk_bytes=sizes.nvme_bytes,
        link_bytes_per_s=1.0,
        disk_bytes_per_s=streaming.weights_bytes_per_s,
        page_disk_bytes_per_s=streaming.pages_bytes_per_s,
        read_cost_s=streaming.weight_byte_s,
        page_read_cost_s=streaming.page_byte_s,
        kv_bytes=sizes.device_bytes + sizes.host_bytes,
        weights_bytes=sizes.weights_bytes if placed is None else 0,
    )
    bytes_of = engine_of(subject, sizes, limits)
    spec = subject.shape.spec

    def workspace(streams: int) -> int:
        if spec is None or bytes_of is None:
            return limits.max_batch * 4 * 8 * padded(subject.shape.hidden)  # no engine has it: about as much
        return bytes_of.workspace + sums_bytes(spec, streams, load.prompt_tokens + load.answer_tokens)

    return Task(
        shape=subject.shape, formats=formats, machine=machine, prompt_tokens=load.prompt_tokens,
        answer_tokens=load.answer_tokens, streams=load.streams,
        throughput=load.throughput, workspace=workspace, request_s=measured.loop.request_s, max_rows=limits.max_batch,
        spread=False, placed=placed, kv_ring=bytes_of.ring_share if bytes_of is not None else 0.0,
        kv_parts=bytes_of.stream_parts if bytes_of is not None else 0,
        kv_stored=bytes_of.stored_share if bytes_of is not None else 1.0,
    )  # fmt: skip


def engine_of(subject: Subject, sizes: Sizes, limits: Limits) -> EngineBytes | None:
    """The bytes of an engine of these sizes; None for a model that tierd has no engine for."""
    if subject.shape.spec is None:
        return None
    return engine_bytes(
        subject.shape.spec, kv_format=limits.kv_format, store_format=limits.store_format,
        device_bytes=sizes.device_bytes, host_bytes=sizes.host_bytes,
        nvme_bytes=sizes.nvme_bytes, context=limits.context, max_batch=limits.max_batch,
        max_streams=limits.max_streams, threads=limits.threads, ladder=limits.ladder,
    )  # fmt: skip


def card_task(
    subject: Subject, load: Load, card: Card, measured: Measured, *, device_bytes: int, host_bytes: int,
    disk_bytes: int, kv_formats: tuple[str, ...], max_batch: int,
) -> Task:  # fmt: skip
    """The task of a card in this computer, whose CPU memory may hold `host_bytes` and attends in place."""
    formats = tuple(
        Format(name, found, page, Roofline(card)) for name, found in subject.formats for page in kv_formats
    )
    streaming = measured.streaming
    link = card.link_bytes_per_s * EFFICIENCY.link
    machine = Machine(
        unified=False,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        link_bytes_per_s=link,
        disk_bytes_per_s=streaming.weights_bytes_per_s,
        page_disk_bytes_per_s=streaming.pages_bytes_per_s,
        host_attend=True,
    )
    shape = subject.shape
    row_bytes = 2 * (6 * shape.hidden + 2 * max(matrix.rows for matrix in shape.layers[0].matrices))

    def workspace(streams: int) -> int:
        return max_batch * row_bytes + streams * shape.vocab * 4

    return Task(
        shape=shape, formats=formats, machine=machine, prompt_tokens=load.prompt_tokens,
        answer_tokens=load.answer_tokens, streams=load.streams, throughput=load.throughput, workspace=workspace,
        max_rows=max_batch, host_s_per_byte=1.0 / measured.memory_bytes_per_s,
    )  # fmt: skip


def card_memory(card: Card, wanted: int | None) -> int:
    """What a plan may take of a card's memory."""
    return max(card.memory_bytes - RESERVED_BYTES, 0) if wanted is None else min(wanted, card.memory_bytes)

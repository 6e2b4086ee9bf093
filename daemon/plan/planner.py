"""Plans how a model runs on a machine: where weights and pages lie, how many answers are written at once, how fast.

The search: for each format that may be taken and each number of streams a linear program places weights and pages
(`optimum`). Of the formats the most exact one wins with which nothing has to be moved while computing; if there is
none, the fastest. The goal `latency` takes the streams that were asked for, `throughput` looks for the number that
gives the most tokens a second, reading prompts included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tierd.daemon.models.placement import Placement as PlacedWeights
from tierd.daemon.models.placement import least_slots
from tierd.daemon.models.placement_card import expert_stages
from tierd.daemon.plan import kv
from tierd.daemon.plan.cost import Machine, Placement, Seconds, Use, Work, seconds, use
from tierd.daemon.plan.optimum import best
from tierd.daemon.plan.processors import Processor, touched_share
from tierd.daemon.plan.shape import Shape
from tierd.daemon.plan.weights import WeightBytes
from tierd.kernels.layout import PAGE_TOKENS

STREAM_LIMIT = 512  # of a search for throughput
RING_SLOTS = 3  # of the largest layer, for streamed ones to pass through


class Format(NamedTuple):
    """A way to store the model: its weights in `weights`, which take `bytes`, and pages in `kv`.

    `processor`: what computes with it, and how fast.
    """

    weights: str
    bytes: WeightBytes
    kv: str
    processor: Processor


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be planned.

    Args:
        formats: the most exact one first.
        workspace: bytes of the device beside weights and pages, for so many streams.
        max_rows: of a step.
        spread: whether pages of several sequences may lie on disk at once; the CPU engine streams those of one alone.
        host_s_per_byte: of attention in CPU memory beside a card.
        placed: where the weights of a prepared model lie on this machine, which is decided then.
        kv_ring: bytes of the device that each byte of pages on disk needs, to pass through.
        kv_parts: in so many parts pages on disk pass in a step; 0: layer by layer.
        kv_stored: bytes on disk for each byte of pages in memory.
    """

    shape: Shape
    formats: tuple[Format, ...]
    machine: Machine
    prompt_tokens: int
    answer_tokens: int
    streams: int
    throughput: bool
    workspace: Callable[[int], int]
    request_s: float = 0.0
    max_rows: int = 512
    spread: bool = True
    host_s_per_byte: float = 0.0
    placed: PlacedWeights | None = None
    kv_ring: float = 0.0
    kv_parts: int = 0
    kv_stored: float = 1.0

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt_tokens + self.answer_tokens


class Outcome(NamedTuple):
    """A plan: how it is laid out, and what is predicted of it. Rates are of all streams together."""

    format: Format
    streams: int
    placement: Placement
    work: Work
    step: Seconds
    use: Use
    ttft_s: float
    prompt_s: float  # of all the prompts

    @property
    def decode_tokens_per_s(self) -> float:
        """While answers are written."""
        return self.streams / self.step.step

    def tokens_per_s(self, answer_tokens: int) -> float:
        """Prompts included."""
        return self.streams * answer_tokens / (self.prompt_s + answer_tokens * self.step.step)

    @property
    def moves(self) -> bool:
        """Whether anything has to be moved in every step."""
        at = self.placement
        return at.host + at.disk + at.kv_disk + (at.kv_host - at.kv_attended) > 1e-9


def plan(task: Task) -> Outcome | None:
    """The best plan, None when nothing fits."""
    outcomes = [outcome for format in task.formats if (outcome := _with_format(task, format)) is not None]
    if not outcomes:
        return None
    still = [outcome for outcome in outcomes if not outcome.moves]
    return still[0] if still else max(outcomes, key=lambda outcome: _merit(task, outcome))


def _merit(task: Task, outcome: Outcome) -> float:
    """More is better: tokens a second, or for latency those of one answer (fewer streams at once than asked are
    served one after the other)."""
    if task.throughput:
        return outcome.tokens_per_s(task.answer_tokens)
    return outcome.decode_tokens_per_s


def _with_format(task: Task, format: Format) -> Outcome | None:
    """The best plan with this format."""
    if task.throughput:
        found = [outcome for streams in _grid(task.streams) if (outcome := outcome_of(task, format, streams))]
        return max(found, key=lambda outcome: outcome.tokens_per_s(task.answer_tokens), default=None)
    outcome = outcome_of(task, format, task.streams)
    if outcome is not None or task.streams == 1:
        return outcome
    low, found_one = 1, outcome_of(task, format, 1)  # as many at once as fit: the others wait
    high = task.streams
    while found_one is not None and high - low > 1:
        middle = (low + high) // 2
        more = outcome_of(task, format, middle)
        if more is None:
            high = middle
        else:
            low, found_one = middle, more
    return found_one


def _grid(streams: int) -> Iterator[int]:
    """Numbers of streams that are tried for throughput: powers of two, up to what was asked for."""
    limit = streams if streams > 1 else STREAM_LIMIT
    number = 1
    while number < limit:
        yield number
        number *= 2
    yield limit


def outcome_of(task: Task, format: Format, streams: int) -> Outcome | None:
    """The best placement with this format and so many streams, and what comes of it. None: it doesn't fit."""
    machine = task.machine
    if streams > 1 and not task.spread:
        machine = machine._replace(disk_bytes=0)
    work = work_of(task, format, streams)
    placement = best(work, machine)
    coming = experts_work(task, format, work, streams)
    if coming is not None and (placement is None or placement.device < 1):
        found = best(coming, machine)
        work, placement = (work, placement) if found is None else (coming, found)
    if placement is None:
        return None
    prompt_s = prefill_s(task, format, work, placement, streams * task.prompt_tokens, task.prompt_tokens)
    ttft_s = prompt_s if streams == 1 else prefill_s(
        task, format, work, placement, task.prompt_tokens, task.prompt_tokens
    )  # fmt: skip
    return Outcome(
        format, streams, placement, work, seconds(work, machine, placement), use(work, machine, placement),
        task.request_s + ttft_s, prompt_s,
    )  # fmt: skip


def work_of(task: Task, format: Format, streams: int) -> Work:
    """A step that decodes `streams` sequences in the middle of their answers. Memory is that of their ends."""
    shape, processor, weights, placed = task.shape, format.processor, format.bytes, task.placed
    middle = task.prompt_tokens + task.answer_tokens / 2
    bits = 8 * weights.total / max(shape.parameters, 1)
    layers_bytes = sum(weights.layers)
    kv_bytes = streams * kv.paged_bytes(shape, task.context, format.kv)
    apart = weights.embed if weights.head and weights.embed <= task.machine.host_bytes else 0  # in CPU memory
    work = Work(
        fixed_bytes=weights.outside - apart + task.workspace(streams),
        fixed_host_bytes=apart,
        slots_bytes=RING_SLOTS * max(weights.layers),
        weights_bytes=layers_bytes,
        step_bytes=layers_bytes * touched_share(shape, streams),
        kv_bytes=kv_bytes,
        layers=len(weights.layers),
        compute_s=processor.pass_s(shape, streams, streams, bits) + processor.around_s(streams),
        attend_s=processor.attend_s(shape, streams, middle, format.kv, prompt=False),
        host_attend_s=kv_bytes * task.host_s_per_byte,
        kv_ring_bytes=kv_bytes * task.kv_ring,
        kv_parts=task.kv_parts or len(weights.layers),
        kv_stored=task.kv_stored,
    )
    if placed is None:
        return work
    missing = _missing_experts_bytes(shape, placed)
    return work._replace(
        fixed_bytes=placed.resident_bytes + task.workspace(streams),
        slots_bytes=placed.ring_bytes + placed.rows_bytes + placed.experts_bytes,
        weights_bytes=placed.streamed_bytes + missing,
        step_bytes=placed.streamed_bytes + missing * experts_share(shape, streams),
        layers=max(len(placed.streamed), 1),
    )


def experts_work(task: Task, format: Format, work: Work, streams: int) -> Work | None:
    """The same step on a card that has everything but the experts, and places for some of them. None where nothing of
    the kind is done."""
    spec, sizes = task.shape.spec, format.bytes
    if task.machine.unified or spec is None or spec.experts is None or not sizes.experts:
        return None
    return work._replace(
        fixed_bytes=work.fixed_bytes + work.weights_bytes - sizes.experts,
        slots_bytes=expert_stages(spec.experts.used) * sizes.expert,
        weights_bytes=sizes.experts,
        step_bytes=sizes.experts * experts_share(task.shape, streams),
        layers=spec.experts.total,
        least_device=least_slots(spec.experts) / spec.experts.total,
        mirrored=True,
    )


def _missing_experts_bytes(shape: Shape, placed: PlacedWeights) -> int:
    """Of the experts that have no slot in memory."""
    if shape.spec is None or shape.spec.experts is None or not placed.expert_slots:
        return 0
    return (shape.spec.experts.total - placed.expert_slots) * placed.expert_slot_bytes


def experts_share(shape: Shape, rows: int) -> float:
    """The share of the experts of a layer that a pass of so many rows goes through, if all are used alike. Texts use
    some more than others, and these have the slots: less is read then."""
    if shape.spec is None or shape.spec.experts is None:
        return 0.0
    left_out: float = (1.0 - shape.spec.experts.used / shape.spec.experts.count) ** rows
    return 1.0 - left_out


def prefill_s(task: Task, format: Format, work: Work, at: Placement, tokens: int, prompt_tokens: int) -> float:
    """Seconds to read prompts of `prompt_tokens` tokens, `tokens` in all, in steps of as many rows as a step takes.

    Every step passes all layers, so what is streamed is streamed in each of them; of pages those before the step.
    """
    shape, processor = task.shape, format.processor
    bits = 8 * format.bytes.total / max(shape.parameters, 1)
    total_s, done = 0.0, 0
    while done < tokens:
        rows = min(task.max_rows, tokens - done)
        # The sequence that is read at this moment, half way through the step.
        seen = min(done % prompt_tokens + rows / 2, prompt_tokens)
        last = done + rows >= tokens
        attended = seen / max(task.context, 1)
        step = work._replace(
            compute_s=processor.pass_s(shape, rows, int(last), bits) + processor.around_s(int(last)),
            attend_s=processor.attend_s(shape, rows, seen, format.kv, prompt=True),
            step_bytes=work.weights_bytes * _read_share(task, work, rows),
            kv_bytes=int(work.kv_bytes * attended),
            host_attend_s=0.0,
        )
        total_s += seconds(step, task.machine, at._replace(kv_attended=0.0)).step
        done += rows
    return total_s


def _read_share(task: Task, work: Work, rows: int) -> float:
    """Of the weights that are streamed, what a step of a prompt needs."""
    if work.mirrored:
        return experts_share(task.shape, rows)
    return touched_share(task.shape, rows) if task.placed is None else 1.0


class Change(NamedTuple):
    """What would have to be different for a plan to fit, the task that is, and its plan."""

    what: str
    task: Task
    outcome: Outcome


def nearest(task: Task) -> Change | None:
    """For a task that doesn't fit: the smallest change with which it does. None when not even a few pages fit."""
    alone = replace(task, streams=1, throughput=False)
    if task.streams > 1 and (outcome := plan(alone)) is not None:
        return Change("one answer at a time", alone, outcome)
    low, high, found = 0, task.context // PAGE_TOKENS, None
    while high - low > 1:  # the longest context, in pages
        middle = (low + high) // 2
        tokens = middle * PAGE_TOKENS
        answer = min(task.answer_tokens, max(tokens // 4, 1))
        shorter = replace(alone, prompt_tokens=tokens - answer, answer_tokens=answer)
        outcome = plan(shorter)
        if outcome is None:
            high = middle
        else:
            low, found = middle, Change(f"a context of {tokens:,} tokens", shorter, outcome)
    return found


class Least(NamedTuple):
    """Bytes that one sequence needs at least: of the device beside pages, and of pages, and what there is of both."""

    device: int
    device_there: int
    pages: int
    pages_there: int


def least(task: Task) -> Least:
    """With the format that takes least. Weights that are streamed lie on the disk anyway."""
    works = [work_of(task, format, 1) for format in task.formats]
    machine = task.machine
    device = min(work.fixed_bytes + work.slots_bytes for work in works)
    memory = min(max(machine.device_bytes - device, 0) + machine.host_bytes, machine.kv_bytes)
    on_disk = int(machine.disk_bytes / task.kv_stored)
    return Least(device, machine.device_bytes, min(work.kv_bytes for work in works), memory + on_disk)

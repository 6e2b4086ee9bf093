"""In which format weights are kept when nobody names one: as they are where that fits, else as exact as fits.

A layer that finds no memory is read from the disk in every step, which costs more than anything a narrower format costs
in quality: int8-g32 gives the perplexity of the source to four digits, int4-g32 loses a little (`docs/kernels.md`).
"""

from __future__ import annotations

import os
from typing import NamedTuple

from tierd.daemon.config import Settings
from tierd.daemon.machine import Machine
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.plan import planner, rates
from tierd.daemon.plan.auto import choose_sizes
from tierd.daemon.plan.scenario import Limits, Load, cpu_task
from tierd.daemon.plan.shape import Shape, shape_from_spec
from tierd.daemon.plan.subject import Subject
from tierd.daemon.plan.weights import WeightBytes, weight_bytes
from tierd.daemon.settled import settle
from tierd.daemon.units import human_bytes

NARROWER = ("int8-g32", "int4-g32")  # the most exact one first


class Fitting(NamedTuple):
    """A weight format in which a model stays in memory, and what it takes there."""

    format: str
    bytes: int


class Chosen(NamedTuple):
    """A weight format, None for that of the source, and a sentence for people, empty where there was no choice."""

    format: str | None
    why: str = ""


def choose_format(
    spec: ModelSpec, own_format: str, own_bytes: int, settings: Settings, computer: Machine
) -> Chosen:
    """The format for a model whose weights have `own_bytes` in that of its source.

    That one, when it fits into the memory that `serve` would give to weights; else the most exact of the narrower ones
    that does; else the fastest of them. A source that is as narrow stays as it is.
    """
    settings, computer = settle(settings, computer)
    shape = shape_from_spec(spec, "")
    formats = _narrower(shape, own_bytes)
    room_bytes = _room_bytes(spec, own_bytes, settings, computer)
    if own_bytes <= room_bytes or not formats:
        return Chosen(None)
    lacks = f"{human_bytes(own_bytes)} of {own_format} weights don't fit into {human_bytes(room_bytes)} of memory"
    if (found := fitting_format(spec, own_bytes, settings, computer)) is not None:
        return Chosen(found.format, f"{lacks}: they become {found.format}, which takes {human_bytes(found.bytes)}")
    if computer.card is not None:  # layers cross the link in every step: the fewest bytes are the fastest
        name, size = formats[-1][0], formats[-1][1].total
        return Chosen(name, f"{lacks}, nor in any format: they become {name}, {human_bytes(size)}, layers are streamed")
    threads = settings.threads or len(os.sched_getaffinity(0))
    context = settings.ctx or spec.context
    tokens = min(context, 1024)
    measured = rates.of_this_machine(settings.cache_dir, threads)
    subject = Subject("", "", shape, tuple(formats), context=context)
    sizes = choose_sizes(settings, computer, spec, formats[-1][1].total, context, threads).sizes
    limits = Limits(
        settings.kv_format, settings.max_batch, settings.max_streams, threads, context, settings.store_format,
        (settings.kv_exact_first, settings.kv_exact_last),
    )  # fmt: skip
    load = Load(tokens - tokens // 4, tokens // 4, 1)
    outcome = planner.plan(cpu_task(subject, load, sizes, computer, measured, limits))
    name = formats[-1][0] if outcome is None else outcome.format.weights
    size = dict(formats)[name].total
    return Chosen(name, f"{lacks}, nor in any format: they become {name}, {human_bytes(size)}, layers are streamed")


def fitting_format(spec: ModelSpec, own_bytes: int, settings: Settings, computer: Machine) -> Fitting | None:
    """The most exact of the formats that are narrower than one of `own_bytes` in which all weights stay in memory."""
    for name, found in _narrower(shape_from_spec(spec, ""), own_bytes):
        if found.total <= _room_bytes(spec, found.total, settings, computer):
            return Fitting(name, found.total)
    return None


def _narrower(shape: Shape, own_bytes: int) -> list[tuple[str, WeightBytes]]:
    return [(name, found) for name in NARROWER if (found := weight_bytes(shape, name)).total < own_bytes]


def _room_bytes(spec: ModelSpec, weights_bytes: int, settings: Settings, computer: Machine) -> int:
    """The memory that `serve` would give to so many bytes of weights."""
    threads, context = settings.threads or len(os.sched_getaffinity(0)), settings.ctx or spec.context
    return choose_sizes(settings, computer, spec, weights_bytes, context, threads).sizes.weights_bytes

"""In which format weights are kept when nobody names one: as they are where that fits, else as exact as fits.

A layer that finds no memory is read from the disk in every step, which costs more than anything a narrower format costs
in quality: int8-g32 gives the perplexity of the source to four digits, int4-g32 loses a little (`docs/kernels.md`).
"""

from __future__ import annotations

import os
from typing import NamedTuple

from tierd.daemon.config import Settings
from tierd.daemon.machine import Machine, total_memory_bytes
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.plan import planner, rates
from tierd.daemon.plan.auto import choose_sizes
from tierd.daemon.plan.scenario import Limits, Load, cpu_task
from tierd.daemon.plan.shape import shape_from_spec
from tierd.daemon.plan.subject import Subject
from tierd.daemon.plan.weights import weight_bytes
from tierd.daemon.units import human_bytes

NARROWER = ("int8-g32", "int4-g32")  # the most exact one first


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
    threads = settings.threads or len(os.sched_getaffinity(0))
    shape = shape_from_spec(spec, "")
    context = settings.ctx or spec.context

    def room(weights: int) -> int:
        return choose_sizes(settings, computer, spec, weights, context, threads).sizes.weights_bytes

    if own_bytes <= room(own_bytes):
        return Chosen(None)
    narrower = [(name, found) for name in NARROWER if (found := weight_bytes(shape, name)).total < own_bytes]
    if not narrower:
        return Chosen(None)
    lacks = f"{human_bytes(own_bytes)} of {own_format} weights don't fit into {human_bytes(room(own_bytes))} of memory"
    for name, found in narrower:
        if found.total <= room(found.total):
            return Chosen(name, f"{lacks}: they become {name}, which takes {human_bytes(found.total)}")
    tokens = min(context, 1024)
    fingerprint = rates.fingerprint(settings.cache_dir, threads, total_memory_bytes())
    measured = rates.load(settings.cache_dir, fingerprint) or rates.assumed(fingerprint)
    subject = Subject("", "", shape, tuple(narrower), context=context)
    sizes = choose_sizes(settings, computer, spec, narrower[-1][1].total, context, threads).sizes
    limits = Limits(settings.kv_format, settings.max_batch, settings.max_streams, threads, context)
    load = Load(tokens - tokens // 4, tokens // 4, 1)
    outcome = planner.plan(cpu_task(subject, load, sizes, computer, measured, limits))
    name = narrower[-1][0] if outcome is None else outcome.format.weights
    size = dict(narrower)[name].total
    return Chosen(name, f"{lacks}, nor in any format: they become {name}, {human_bytes(size)}, layers are streamed")

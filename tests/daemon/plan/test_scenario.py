"""From a model and a machine to a task: each format with its own rates, each byte counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.daemon.plan.scenes import FINGERPRINT, GB
from tierd.daemon.machine import Machine, Sizes
from tierd.daemon.plan import rates
from tierd.daemon.plan.answer import make
from tierd.daemon.plan.planner import Outcome, Task, least, plan
from tierd.daemon.plan.scenario import Limits, Load, cpu_task
from tierd.daemon.plan.subject import SHAPE_FORMATS, find_subject
from tierd.daemon.plan.workspace import ring_bytes
from tierd.kernels.layout import PageLayout

COMPUTER = Machine(32 * GB, 32 * GB, 200 * GB)
RATES = rates.assumed(FINGERPRINT)


def sizes(**changes: int) -> Sizes:
    given = {"device_bytes": 2 * GB, "host_bytes": 0, "nvme_bytes": 20 * GB, "weights_bytes": 20 * GB}
    return Sizes(**dict.fromkeys(Sizes._fields, 0) | given | changes)


def task_of(weights: str | None, found: Sizes, load: Load) -> Task:
    subject = find_subject("llama-3-8b-shape", Path("nowhere"), weights)
    return cpu_task(subject, load, found, COMPUTER, RATES, Limits("fp16", 512, 16, 2, 8192))


def test_a_format_that_is_chosen_is_as_fast_as_one_that_is_given() -> None:
    load = Load(896, 128, 1)
    for memory in (20 * GB, 9 * GB, 6 * GB):
        chosen = plan(task_of(None, sizes(weights_bytes=memory), load))
        assert chosen is not None
        alone = plan(task_of(chosen.format.weights, sizes(weights_bytes=memory), load))
        assert alone is not None and alone.placement == chosen.placement
        assert alone.decode_tokens_per_s == pytest.approx(chosen.decode_tokens_per_s)
        assert alone.ttft_s == pytest.approx(chosen.ttft_s)


def test_every_format_has_its_own_rates() -> None:
    task = task_of(None, sizes(), Load(896, 128, 1))
    assert [format.weights for format in task.formats] == list(SHAPE_FORMATS)
    assert [format.processor.compute.format for format in task.formats] == list(SHAPE_FORMATS)


def test_pages_on_the_disk_need_a_ring() -> None:
    load, found = Load(7936, 256, 1), sizes(device_bytes=GB // 4)
    task = task_of("int4-g32", found, load)
    outcome = plan(task)
    assert outcome is not None and outcome.placement.kv_disk > 0.5
    layout = PageLayout(32, 8, 128, "fp16")
    streamed = outcome.placement.kv_disk * 8192 / 16
    ring = ring_bytes(layout, 512) / 512 * streamed
    apart = outcome.use.device - outcome.placement.kv_device * outcome.work.kv_bytes
    assert ring > 10**7 and apart == pytest.approx(outcome.work.fixed_bytes + outcome.work.weights_bytes + ring)
    subject = find_subject("llama-3-8b-shape", Path("nowhere"), "int4-g32")
    shown = make(task, subject, "here", "", (), runs=True).tiers["device"].workspace
    assert shown == pytest.approx(task.workspace(1) + ring, abs=2)


def test_pages_that_are_packed_more_on_the_disk_are_read_as_they_lie_there() -> None:
    load, found = Load(7936, 256, 1), sizes(device_bytes=GB // 4)
    subject = find_subject("llama-3-8b-shape", Path("nowhere"), "int4-g32")

    def outcome(store_format: str) -> Outcome:
        limits = Limits("fp16", 512, 16, 2, 8192, store_format)
        made = plan(cpu_task(subject, load, found, COMPUTER, RATES, limits))
        assert made is not None
        return made

    plain, packed = outcome("same"), outcome("k8v8")
    share = PageLayout(32, 8, 128, "k8v8").record_bytes / PageLayout(32, 8, 128, "fp16").record_bytes
    assert packed.work.kv_bytes == plain.work.kv_bytes and packed.work.kv_stored == share < 0.6
    assert packed.use.disk == pytest.approx(packed.placement.kv_disk * packed.work.kv_bytes * share)
    assert packed.step.disk == pytest.approx(packed.use.disk / RATES.streaming.pages_bytes_per_s)
    assert packed.step.step < plain.step.step
    # On a disk that holds no more than they take there, they fit.
    few = sizes(device_bytes=GB // 4, nvme_bytes=int(packed.use.disk * 1.01))
    assert plan(cpu_task(subject, load, few, COMPUTER, RATES, Limits("fp16", 512, 16, 2, 8192))) is None
    task = cpu_task(subject, load, few, COMPUTER, RATES, Limits("fp16", 512, 16, 2, 8192, "k8v8"))
    assert plan(task) is not None and least(task).pages_there > least(task).pages


def test_a_ring_that_has_no_room_is_not_planned() -> None:
    task = task_of("int4-g32", sizes(device_bytes=GB // 4), Load(7936, 256, 1))
    needed = plan(task)
    assert needed is not None
    machine = task.machine._replace(device_bytes=int(needed.use.device) - GB // 100)
    less = plan(dataclasses.replace(task, machine=machine))
    assert less is None or less.use.device <= machine.device_bytes + 1000

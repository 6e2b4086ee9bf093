"""Mixtures on a card that has no room for all experts: what lies where, what a step fetches, who gives way."""

from __future__ import annotations

import pytest

from tests.daemon.plan.scenes import GB, MEASURED
from tierd.daemon.models.placement_card import expert_stages
from tierd.daemon.plan.answer import _tiers, _why
from tierd.daemon.plan.cards import CARDS
from tierd.daemon.plan.cost import fits, weights_in_host
from tierd.daemon.plan.known import known_shape
from tierd.daemon.plan.planner import Outcome, Task, experts_share, experts_work, plan, work_of
from tierd.daemon.plan.scenario import Load, card_task
from tierd.daemon.plan.shape import shape_from_spec
from tierd.daemon.plan.subject import Subject
from tierd.daemon.plan.weights import weight_bytes

NAME, FORMAT = "qwen3-30b-a3b", "int4-g32"
SIZES = weight_bytes(known_shape(NAME), FORMAT)
DENSE = SIZES.total - SIZES.experts


def task(device: int, host: int = 64 * GB, name: str = NAME, streams: int = 1) -> Task:
    shape = known_shape(name)
    subject = Subject(name, "", shape, ((FORMAT, weight_bytes(shape, FORMAT)),))
    return card_task(
        subject, Load(512, 64, streams), CARDS["rtx4090"], MEASURED, device_bytes=device, host_bytes=host,
        disk_bytes=64 * GB, kv_formats=("fp16",), max_batch=512,
    )  # fmt: skip


def planned(device: int, host: int = 64 * GB, **more: int) -> tuple[Task, Outcome]:
    found = task(device, host, **more)
    outcome = plan(found)
    assert outcome is not None
    assert fits(outcome.work, found.machine, outcome.placement)
    return found, outcome


def test_experts_are_counted_in_their_layers() -> None:
    shape = known_shape(NAME)
    assert shape.spec is not None and shape.spec.experts is not None
    assert SIZES.experts == shape.spec.experts.total * SIZES.expert > 0.9 * SIZES.total
    again = weight_bytes(shape_from_spec(shape.spec), FORMAT)
    assert (again.experts, again.expert) == (SIZES.experts, SIZES.expert)
    dense = weight_bytes(known_shape("llama-3-8b"), FORMAT)
    assert dense.experts == dense.expert == 0


def test_with_room_for_everything_nothing_moves() -> None:
    _, outcome = planned(40 * GB)
    assert not outcome.work.mirrored and not outcome.moves


def test_dense_parts_stay_and_the_rest_is_places() -> None:
    steps, places = [], []
    for device in (18, 12, 8, 5):
        found, outcome = planned(device * GB)
        work, at, tiers = outcome.work, outcome.placement, _tiers(found, outcome)
        assert work.mirrored and at.disk == 0
        count = round(at.device * work.layers)
        assert at.device * work.layers == pytest.approx(count), "half an expert has no place"
        assert tiers["device"].weights == pytest.approx(DENSE - SIZES.embed + count * SIZES.expert)
        assert tiers["device"].workspace == found.workspace(1) + expert_stages(8) * SIZES.expert
        assert tiers["host"].weights == SIZES.experts + SIZES.embed and tiers["disk"].weights == 0
        used = sum(getattr(tiers["device"], part) for part in ("weights", "kv", "workspace"))
        assert used <= device * GB
        fetched = (1 - at.device) * SIZES.experts * experts_share(found.shape, 1)
        assert outcome.step.link * found.machine.link_bytes_per_s >= fetched * (1 - 1e-9)
        assert f"places for {count} of 6,144 experts" in " ".join(_why(found, outcome))
        steps.append(outcome.step.step)
        places.append(count)
    assert steps == sorted(steps) and places == sorted(places, reverse=True)


def test_what_cpu_memory_has_no_room_for_is_read_from_the_disk_as_often_as_the_rest_is_fetched() -> None:
    found, outcome = planned(8 * GB, 8 * GB)
    work, at = outcome.work, outcome.placement
    assert work.mirrored and at.disk > 0 and outcome.step.bound == "disk"
    in_host = weights_in_host(work, at)
    assert at.host / (at.host + at.disk) == pytest.approx(in_host)
    assert in_host * SIZES.experts + work.fixed_host_bytes + at.kv_host * work.kv_bytes == pytest.approx(8 * GB)
    tiers = _tiers(found, outcome)
    assert tiers["host"].weights + tiers["disk"].weights == SIZES.experts + SIZES.embed


def test_more_rows_need_more_experts() -> None:
    assert planned(8 * GB, streams=16)[1].step.step > 2 * planned(8 * GB)[1].step.step


def test_nothing_of_it_without_a_card_or_without_experts() -> None:
    dense = task(8 * GB, name="llama-3-8b")
    assert experts_work(dense, dense.formats[0], work_of(dense, dense.formats[0], 1), 1) is None

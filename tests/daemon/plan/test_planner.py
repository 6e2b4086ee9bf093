"""Choosing formats, numbers of streams, and what to say when nothing fits."""

from __future__ import annotations

import pytest

from tests.daemon.plan.scenes import CORES, CPU, GB, task
from tierd.daemon.models.placement import Placement
from tierd.daemon.plan.known import known_shape
from tierd.daemon.plan.kv import page_bytes
from tierd.daemon.plan.planner import Format, experts_share, least, nearest, outcome_of, plan, work_of
from tierd.daemon.plan.weights import weight_bytes


def formats(name: str, *weights: str) -> tuple[Format, ...]:
    shape = known_shape(name)
    return tuple(Format(format, weight_bytes(shape, format), "fp32", CORES) for format in weights)


def test_what_fits_computes_alone() -> None:
    outcome = plan(task())
    assert outcome is not None and not outcome.moves
    assert outcome.step.bound == "device"
    shape = known_shape("llama-3-8b")
    matrices = (shape.layer_elements + shape.head_elements) * 1e-10
    attention = 32 * 960 * 4096 * 1e-10
    assert outcome.step.step == pytest.approx(matrices + attention + 1.1e-3)
    assert outcome.use.device == pytest.approx(
        weight_bytes(shape, "int4-g32").total + 1000 + 64 * page_bytes(shape, "fp32")
    )


def test_the_most_exact_format_that_stays_still_wins() -> None:
    names = ("bf16", "int8-g32", "int4-g32")
    large = plan(task(formats=formats("llama-3-8b", *names), machine=CPU._replace(device_bytes=30 * GB)))
    assert large is not None and large.format.weights == "bf16"
    middle = plan(task(formats=formats("llama-3-8b", *names)))
    assert middle is not None and middle.format.weights == "int8-g32"
    small = plan(task(formats=formats("llama-3-8b", *names), machine=CPU._replace(device_bytes=3 * GB)))
    assert small is not None and small.format.weights == "int4-g32" and small.moves and small.step.bound == "disk"


def test_streams_that_do_not_fit_at_once_wait() -> None:
    # 1,024 tokens of Llama-3-8B take 268 MB in fp32; what is left beside the weights holds some of them.
    tight = task(streams=16, machine=CPU._replace(kv_bytes=GB), spread=False)
    outcome = plan(tight)
    assert outcome is not None and outcome.streams == 3
    assert plan(task(streams=16, spread=False)).streams == 16  # type: ignore[union-attr]


def test_one_sequence_may_outgrow_memory() -> None:
    outcome = plan(task(machine=CPU._replace(kv_bytes=GB // 5), spread=False))
    assert outcome is not None and outcome.placement.kv_disk == pytest.approx(1 - 0.2 / 0.268435456)


def test_throughput_takes_more_streams_than_latency_where_weights_are_streamed() -> None:
    machine = CPU._replace(device_bytes=8 * GB)
    scene = task("llama-3-70b", machine=machine, throughput=True, prompt_tokens=64)
    outcome = plan(scene)
    assert outcome is not None and outcome.streams > 1 and outcome.moves
    alone = outcome_of(scene, scene.formats[0], 1)
    assert alone is not None
    assert outcome.tokens_per_s(128) > 1.5 * alone.tokens_per_s(128)
    tried = [found for n in range(1, 40) if (found := outcome_of(scene, scene.formats[0], n))]
    assert outcome.tokens_per_s(128) > 0.7 * max(found.tokens_per_s(128) for found in tried)


def test_prompts_are_read_in_steps() -> None:
    short, long = plan(task(prompt_tokens=512)), plan(task(prompt_tokens=1024))
    assert short is not None and long is not None
    assert long.ttft_s > 1.9 * short.ttft_s
    four = plan(task(prompt_tokens=512, streams=4))
    assert four is not None and four.prompt_s == pytest.approx(4 * short.prompt_s, rel=0.02)
    assert four.ttft_s == pytest.approx(short.ttft_s)


def test_experts_that_rows_are_not_sent_to_are_not_read() -> None:
    scene = task("mixtral-8x7b", machine=CPU._replace(device_bytes=8 * GB))
    one, many = work_of(scene, scene.formats[0], 1), work_of(scene, scene.formats[0], 64)
    assert one.step_bytes < 0.3 * one.weights_bytes
    assert many.step_bytes == pytest.approx(many.weights_bytes, rel=0.01)


def test_the_nearest_plan_of_what_does_not_fit() -> None:
    impossible = task(prompt_tokens=100_000, machine=CPU._replace(kv_bytes=GB, disk_bytes=0), spread=False)
    assert plan(impossible) is None
    change = nearest(impossible)
    assert change is not None
    tokens = change.task.context
    assert change.what == f"a context of {tokens:,} tokens"
    # No page more would fit.
    assert tokens // 16 == GB // page_bytes(impossible.shape, "fp32")
    needs = least(impossible)
    assert needs.pages > needs.pages_there == GB and needs.device < needs.device_there


def test_fewer_answers_are_nearer_than_a_shorter_context() -> None:
    scene = task(streams=4, throughput=True, machine=CPU._replace(kv_bytes=GB // 3, disk_bytes=0))
    assert plan(scene) is not None  # a grid from 1 on
    assert nearest(task(machine=CPU._replace(device_bytes=GB // 10))) is None


def test_more_rows_go_through_more_experts() -> None:
    mixtral = known_shape("mixtral-8x7b")
    assert [experts_share(mixtral, rows) for rows in (1, 2, 500)] == pytest.approx([0.25, 0.4375, 1.0])
    assert experts_share(known_shape("llama-3-8b"), 5) == 0.0


def test_experts_that_have_no_place_are_read_by_the_share_that_a_step_needs() -> None:
    shape = known_shape("mixtral-8x7b")
    placed = Placement(
        frozenset(), (), False, 0, 0, 0, 0, resident_bytes=2 * GB, streamed_bytes=0, expert_slots=56,
        expert_slot_bytes=GB // 10,
    )  # fmt: skip
    format = formats("mixtral-8x7b", "int4-g32")[0]
    work = work_of(task(shape=shape, formats=(format,), placed=placed), format, 1)
    missing = (32 * 8 - 56) * (GB // 10)
    assert (work.weights_bytes, work.step_bytes) == (missing, missing / 4)
    assert work.slots_bytes == 56 * (GB // 10)

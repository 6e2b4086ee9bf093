"""Vectors through the front: parts, order, deaths, cancels, limits, who is counted."""

from __future__ import annotations

import asyncio
import math
from array import array

import pytest
from fake_engine import vector_of
from front_harness import Front, until

from tierd.daemon.embedding import MAX_CALL_BYTES, MAX_CALL_INPUTS, MAX_INPUTS, TRIES, _parts, check, shortened
from tierd.daemon.errors import BadRequest, ContextLengthExceeded, Draining, EngineFailed


def test_parts_are_bounded_and_in_order():
    inputs = ["a", *["b" * (MAX_CALL_BYTES // 2)] * 3, (1,) * 10, *["c"] * MAX_CALL_INPUTS, "d" * (2 * MAX_CALL_BYTES)]
    parts = list(_parts(inputs))
    assert [one for part in parts for one in part] == inputs
    assert max(map(len, parts)) == MAX_CALL_INPUTS and parts[-1] == [inputs[-1]]


@pytest.mark.parametrize("inputs", [[], [""], ["a", ()], [(-1,)], [(1 << 31,)], ["a"] * (MAX_INPUTS + 1)])
def test_what_no_engine_has_to_look_at(inputs):
    with pytest.raises(BadRequest) as caught:
        check(inputs)
    assert caught.value.param == "input"
    check(["a"] * MAX_INPUTS)


def test_shortened_vectors_have_unit_length():
    whole = array("f", [0.8, 0.6, 0.0])
    assert shortened(whole, None) is whole and shortened(whole, 3) is whole
    assert shortened(whole, 1).tolist() == [1.0]
    assert math.isclose(math.hypot(*shortened(array("f", [0.6, 0.48, 0.64]), 2)), 1.0, rel_tol=1e-6)
    for count in (0, 4, -1):
        with pytest.raises(BadRequest, match="from 1 to the model's 3"):
            shortened(whole, count)


async def test_many_inputs_come_back_in_order(front: Front):
    inputs = [f"text {n}" for n in range(2 * MAX_CALL_INPUTS + 1)]
    found = await front.service.embed("alpha", inputs, "", "http")
    assert [one.tobytes() for one in found.vectors] == [vector_of(text) for text in inputs]
    assert found.prompt_tokens == 2 * len(inputs)
    status = await front.engine().call("status", {}, 5)
    assert status["calls"] == [MAX_CALL_INPUTS, MAX_CALL_INPUTS, 1]


async def test_an_engine_that_dies_is_replaced(front: Front):
    found = await front.service.embed("alpha", ["!crash"], "", "http")
    assert found.vectors[0].tobytes() == vector_of("!crash")
    assert front.metrics.engine_deaths == {"alpha": 1} and front.metrics.requests["http", "done"] == 1


async def test_one_that_kills_every_engine_fails(front: Front):
    with pytest.raises(EngineFailed):
        await front.service.embed("alpha", ["!die"], "", "http")
    assert front.metrics.engine_deaths["alpha"] == TRIES and front.service.live == 0


async def test_refusals_and_the_drain(front: Front):
    with pytest.raises(ContextLengthExceeded):
        await front.service.embed("alpha", ["!refuse"], "", "http")
    assert front.metrics.requests["http", "refused"] == 1
    await front.service.drain(0.0)
    with pytest.raises(Draining):
        await front.service.embed("alpha", ["a"], "", "http")


async def test_a_cancelled_one_is_ended_in_the_engine_too(front: Front):
    await front.service.load("alpha")
    task = asyncio.create_task(front.service.embed("alpha", ["!hang"], "", "http"))
    await until(lambda: front.engine().busy)
    assert front.service.live == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert front.service.live == 0 and not front.engine().busy
    assert (await front.engine().call("status", {}, 5))["cancelled"] == 1

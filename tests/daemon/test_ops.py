"""Names and arguments of the simple operations; what they do is tested with the server."""

from __future__ import annotations

import asyncio
from array import array

import pytest
from fake_engine import vector_of
from front_harness import set_options, until

from tierd.daemon import ops
from tierd.daemon.embedding import shortened
from tierd.daemon.errors import BadRequest, NotFound, Unsupported


async def test_hello_lists_what_there_is(front):
    hello = await ops.answer(front.service, "hello", {})
    assert hello["protocol"] == 1 and {"generate", "cancel", "status", "stop"} <= set(hello["ops"])


@pytest.mark.parametrize("op", sorted(ops._OPS))
async def test_unknown_arguments_are_named(front, op):
    with pytest.raises(BadRequest, match="nonsense"):
        await ops.answer(front.service, op, {"nonsense": 1, "model": "alpha", "action": "ls"} if op == "cache" else
                         {"nonsense": 1, "model": "alpha"} if op in ("show", "load", "tokenize", "pages", "top") else
                         {"nonsense": 1})  # fmt: skip


async def test_vectors(front):
    given = {"model": "alpha", "inputs": ["a b", [1, 2]], "dimensions": 2}
    found = await ops.answer(front.service, "embed", given, "uid:0")
    whole = array("f", vector_of("1 2"))
    assert array("f", found["vectors"][1]).tolist() == pytest.approx(shortened(whole, 2).tolist())
    assert found["usage"]["prompt_tokens"] == 4
    for changes, what in (
        ({"inputs": ["a"] * (ops.MAX_EMBED_INPUTS + 1)}, "in one call"), ({"dimensions": 9}, "dimensions"),
        ({"priority": 101}, "priority"), ({"inputs": []}, "empty"), ({"nonsense": 1}, "nonsense"),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=what):
            await ops.answer(front.service, "embed", given | changes)


async def test_a_near_name_is_suggested(front):
    with pytest.raises(Unsupported) as caught:
        await ops.answer(front.service, "unlaod", {})
    assert "unload" in (caught.value.hint or "")


async def test_stop_keeps_its_time(front):
    await ops.answer(front.service, "stop", {"timeout_s": 30})
    assert front.service.stop_asked.is_set() and front.service.stop_timeout_s == 30


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"action": "sell"}, "one of ls, pin, unpin, drop, persist, evict"), ({"action": "pin"}, "needs an id"),
        ({"action": "ls", "id": "ab"}, "takes no id"), ({"action": "drop", "id": "ab", "limit": 3}, "belongs to ls"),
    ],
)  # fmt: skip
async def test_prefix_arguments(front, args, words):
    with pytest.raises(BadRequest, match=words):
        await ops.answer(front.service, "prefix", args)


async def test_verify_tells_how_far_it_is_and_ends_when_nobody_waits_for_it(front):
    set_options(front.settings.models_dir / "alpha", cache_stands=True)
    asked = {"action": "verify", "model": "alpha"}
    working = asyncio.create_task(ops.answer(front.service, "cache", asked))
    told = {"stage": "verify", "done": 3, "total": 9, "text": "3 of 9 pages are read"}
    await until(lambda: ops.progress(front.service, "cache", asked) == told)
    working.cancel()
    await asyncio.wait([working])
    assert ops.progress(front.service, "cache", asked)["text"] == "cache is still at work"

    async with asyncio.timeout(20):
        while not (await front.service.status())["engines"][0]["cancelled"]:
            pass


async def test_prefix_and_resize_reach_the_engine(front):
    answer = await ops.answer(front.service, "prefix", {"action": "pin", "id": "abcd", "model": "alpha"})
    assert answer == {"model": "alpha", "args": {"action": "pin", "id": "abcd"}}
    answer = await ops.answer(front.service, "top", {"model": "alpha", "maps": {"device": 4}, "prefixes": 2})
    assert answer == {"args": {"maps": {"device": 4}, "prefixes": 2}}
    answer = await ops.answer(front.service, "page", {"model": "alpha", "tier": "host", "slot": 3})
    assert answer == {"args": {"tier": "host", "slot": 3}}
    answer = await ops.answer(front.service, "prefix", {"action": "evict", "id": "abcd", "model": "alpha"})
    assert answer == {"model": "alpha", "args": {"action": "evict", "id": "abcd"}}
    with pytest.raises(NotFound, match="no request 7"):
        await ops.answer(front.service, "cancel_request", {"model": "alpha", "request": 7})
    answer = await ops.answer(front.service, "resize", {"host_bytes": 5})
    assert answer["model"] == "alpha" and answer["args"] == {"host_bytes": 5}
    with pytest.raises(BadRequest, match="timeout_s"):
        await ops.answer(front.service, "resize", {"host_bytes": 5, "timeout_s": -1.0})


async def test_the_log_of_the_front_is_told_from_a_number_on(front):
    front.service.history.tell("engine", "one")
    front.service.history.tell("notice", "two")
    told = (await ops.answer(front.service, "events", {}))["events"]
    assert [(row["kind"], row["text"]) for row in told[-2:]] == [("engine", "one"), ("notice", "two")]
    later = await ops.answer(front.service, "events", {"after": told[-2]["number"]})
    assert [row["text"] for row in later["events"]] == ["two"]

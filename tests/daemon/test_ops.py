"""Names and arguments of the simple operations; what they do is tested with the server."""

from __future__ import annotations

import pytest

from tierd.daemon import ops
from tierd.daemon.errors import BadRequest, Unsupported


async def test_hello_lists_what_there_is(front):
    hello = await ops.answer(front.service, "hello", {})
    assert hello["protocol"] == 1 and {"generate", "cancel", "status", "stop"} <= set(hello["ops"])


@pytest.mark.parametrize("op", sorted(ops._OPS))
async def test_unknown_arguments_are_named(front, op):
    with pytest.raises(BadRequest, match="nonsense"):
        await ops.answer(front.service, op, {"nonsense": 1, "model": "alpha", "action": "ls"} if op == "cache" else
                         {"nonsense": 1, "model": "alpha"} if op in ("show", "load", "tokenize", "pages") else
                         {"nonsense": 1})  # fmt: skip


async def test_a_near_name_is_suggested(front):
    with pytest.raises(Unsupported) as caught:
        await ops.answer(front.service, "unlaod", {})
    assert "unload" in (caught.value.hint or "")


async def test_stop_keeps_its_time(front):
    await ops.answer(front.service, "stop", {"timeout_s": 30})
    assert front.service.stop_asked.is_set() and front.service.stop_timeout_s == 30

"""The front with the real engine and the default model: what must hold whatever happens to the process between."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest
from front_harness import make_settings, running, text

from tierd.daemon.child import WORKER
from tierd.daemon.protocol import Message, Sampling, Submit

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
QUESTION = "What is a page table? " + "Tell it to a child of ten years in plain words, with an example. " * 4


@pytest.fixture
async def real(models_dir, tmp_path):
    settings = make_settings(tmp_path, models_dir=models_dir, device_mem=256 << 20, host_mem=0, nvme_mem=512 << 20)
    async with running(settings, command=WORKER) as front:
        yield front


async def ask(front, *, temperature=0.0, kill_after=None, **more):
    """The events of one answer; the engine is killed after so many tokens."""
    sampling = Sampling(max_tokens=48, temperature=temperature, seed=5)
    submit = Submit(MODEL, messages=(Message("user", QUESTION),), sampling=sampling, **more)
    wire = await front.connect()
    wire.send(1, "generate", **msgspec.to_builtins(submit))
    events, tokens = [], 0
    while not events or events[-1].ev not in ("done", "failed", "refused", "aborted"):
        async with asyncio.timeout(90):
            event = await wire.next()
        if event.ev != "progress":
            events.append(event)
        tokens += len(event.data["tokens"]) if event.ev == "text" else 0
        if kill_after is not None and tokens >= kill_after:
            kill_after = None
            os.kill(front.engine(MODEL).pid, signal.SIGKILL)
    await wire.close()
    return events


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_an_engine_killed_in_the_middle_says_the_same(real, temperature):
    whole = await ask(real, temperature=temperature)
    broken = await ask(real, temperature=temperature, kill_after=10)
    assert [event.ev for event in broken if event.ev != "text"] == ["accepted", "done"]
    assert text(broken) == text(whole)
    assert broken[-1].data["usage"]["completion_tokens"] == whole[-1].data["usage"]["completion_tokens"]
    assert real.metrics.engine_deaths[MODEL] == 1
    usage, timings = broken[-1].data["usage"], broken[-1].data["timings"]
    assert usage["cached_tokens"] == timings["hit_device"] + timings["hit_host"] + timings["hit_nvme"]
    assert usage["prompt_tokens"] == usage["cached_tokens"] + timings["recomputed"]


async def test_prefixes_outlive_an_unload(real):
    cold = (await ask(real))[-1].data["usage"]
    assert cold["cached_tokens"] == 0
    assert await real.service.unload(MODEL) == {"unloaded": [MODEL]}
    done = (await ask(real))[-1].data
    assert done["usage"]["cached_tokens"] == cold["prompt_tokens"] - 1
    assert done["timings"]["hit_nvme"] == done["usage"]["cached_tokens"]


async def test_a_memory_mode_is_the_daemons_or_that_of_the_request(models_dir, tmp_path):
    mode = "sinks=4,window=48"
    settings = make_settings(
        tmp_path, models_dir=models_dir, device_mem=256 << 20, host_mem=0, nvme_mem=512 << 20, kv_mode=mode
    )
    async with running(settings, command=WORKER) as front:
        bounded, broken = await ask(front), await ask(front, kill_after=10)
        exact = await ask(front, kv_mode="exact")
        one, two = [
            (await ask(front, kv_mode="window=10000", **more))[-1].data["usage"] for more in ({}, {"n": 2})
        ]
    assert text(broken) == text(bounded) != text(exact)
    assert bounded[-1].data["usage"]["kv_mode"] == mode
    assert "kv_mode" not in exact[-1].data["usage"]
    assert one["kv_mode"] == two["kv_mode"] == "window=10000"
    assert two["completion_tokens"] == 2 * one["completion_tokens"]

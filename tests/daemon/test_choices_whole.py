"""Several answers to one prompt, from the front to the real engine's pages: the prompt is there once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random

import pytest
from front_harness import make_settings, running

from tierd.daemon.child import WORKER
from tierd.daemon.protocol import Sampling, Submit
from tierd.kernels.layout import PAGE_TOKENS

pytestmark = [pytest.mark.model, pytest.mark.long]

MODEL = "smollm2-135m"
PROMPT_TOKENS, ANSWERS, TOKENS = 1000, 8, 24


async def test_eight_answers_to_a_prompt_of_a_thousand_tokens_hold_and_compute_it_once(models_dir, tmp_path):
    rng = random.Random(3)
    prompt = tuple(rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS))
    sampling = Sampling(temperature=1.0, seed=1, max_tokens=TOKENS, ignore_eos=True)
    asked = Submit(MODEL, tokens=prompt, n=ANSWERS, sampling=sampling)
    # Room for four such prompts: that it is there once is no lack of room.
    settings = make_settings(tmp_path, models_dir=models_dir, device_mem=256 << 20, host_mem=0, nvme_mem=0)
    async with running(settings, command=WORKER) as front:
        await front.service.load(MODEL)
        engine = front.engine(MODEL)
        said: dict[int, str] = {}
        at_once = 0
        async with contextlib.aclosing(front.service.run(front.service.submit(asked), "test")) as events:
            async with asyncio.timeout(90):
                async for event in events:
                    if event.ev == "text":
                        said[event.data["choice"]] = said.get(event.data["choice"], "") + event.data["text"]
                        at_once = max(at_once, (await engine.call("status", {}, 30.0))["running"])
        assert event.ev == "done" and event.data["usage"]["completion_tokens"] == ANSWERS * TOKENS
        status = await engine.call("status", {}, 30.0)
    assert at_once == ANSWERS and len(set(said.values())) == ANSWERS
    once, device = math.ceil(PROMPT_TOKENS / PAGE_TOKENS), status["tiers"]["device"]
    own = math.ceil(TOKENS / PAGE_TOKENS) + 1  # the prompt's last page is not full: each goes on in a copy of it
    print(f"{device['high_water_pages']} pages of {device['total_pages']}; a prompt takes {once}")
    assert once < device["high_water_pages"] <= once + ANSWERS * own and device["total_pages"] > 4 * once
    assert status["tokens_in"] - status["cached_tokens"] <= PROMPT_TOKENS + ANSWERS * PAGE_TOKENS

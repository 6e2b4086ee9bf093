"""Vectors of prompts: against transformers, beside running streams, over the cache, cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.daemon.engine.fakes import PAGE, VOCAB, logits_for
from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tests.daemon.engine.rig import Rig
from tests.waiting import until
from tierd.daemon.engine.embed import MAX_CALL_INPUTS, EmbedArgs, Embedder, Embedding, Pooling
from tierd.daemon.engine.request import Request
from tierd.daemon.errors import BadRequest, ContextLengthExceeded, EngineFailed, TierdError
from tierd.daemon.protocol import Event

SHARED = [7 * n % VOCAB for n in range(1, 20)]


def vector(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4")


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


# -- on fakes ----------------------------------------------------------------------------------------------------------


def fake_states(tokens: list[int]) -> np.ndarray:
    history = np.array(tokens, np.int32)
    return np.stack([logits_for(history[:n], np.arange(n, dtype=np.int32)) for n in range(1, len(tokens) + 1)])


def embed(rig: Rig, number: int, tokens: list[int], pooling: Pooling = Pooling.MEAN, **more: Any) -> None:
    rig.intake.facts = dataclasses.replace(rig.intake.facts, pooling=pooling)
    rig.streams.add(rig.intake.embedding(number, tokens, EmbedArgs((), **more), rig.clock()))


class OfOneValue(Embedding):
    """That of a model whose states are all the same."""

    def __init__(self, pooling: Pooling, value: float) -> None:
        super().__init__(pooling)
        self._value = value

    def take(self, states: np.ndarray) -> None:
        super().take(np.full_like(states, self._value))


def of(rig: Rig, number: int) -> np.ndarray:
    (done,) = rig.of(number, "done")
    return vector(done["embedding"])


@pytest.mark.parametrize("count", [1, PAGE, 3 * PAGE + 1, 30])
def test_mean_of_all_rows_however_they_are_cut(count: int) -> None:
    rig = Rig(max_rows=9)
    tokens = [n % VOCAB for n in range(3, 3 + count)]
    embed(rig, -1, tokens)
    rig.run()
    np.testing.assert_allclose(of(rig, -1), unit(fake_states(tokens).mean(axis=0)), atol=1e-6)
    assert rig.decoder.rows == count and rig.of(-1, "text") == []


def test_the_mean_computes_rows_that_are_cached_and_leaves_no_pages() -> None:
    rig = Rig()
    rig.submit(1, SHARED, max_tokens=2)
    rig.run()
    known, rows = rig.pager.statistics(), rig.decoder.rows
    embed(rig, -1, SHARED)
    rig.run()
    np.testing.assert_allclose(of(rig, -1), unit(fake_states(SHARED).mean(axis=0)), atol=1e-6)
    assert rig.decoder.rows - rows == len(SHARED)
    assert rig.of(-1, "done")[0]["usage"].cached_tokens == 0
    assert rig.pager.statistics() == known


def test_the_last_token_uses_the_cache_and_feeds_it() -> None:
    rig = Rig()
    embed(rig, -1, SHARED, Pooling.LAST)
    rig.run()
    rows = rig.decoder.rows
    embed(rig, -2, [*SHARED, 9], Pooling.LAST)
    rig.run()
    np.testing.assert_allclose(of(rig, -2), unit(fake_states([*SHARED, 9])[-1]), atol=1e-6)
    assert rig.of(-2, "done")[0]["usage"].cached_tokens >= len(SHARED) // PAGE * PAGE
    assert rig.decoder.rows - rows < len(SHARED)


def test_tenants_share_nothing_for_the_last_token() -> None:
    rig = Rig()
    embed(rig, -1, SHARED, Pooling.LAST, tenant="key:a")
    rig.run()
    embed(rig, -2, SHARED, Pooling.LAST, tenant="key:b")
    rig.run()
    assert rig.of(-2, "done")[0]["usage"].cached_tokens == 0


def test_streams_beside_it_say_the_same() -> None:
    alone, together = Rig(), Rig()
    for rig in (alone, together):
        rig.submit(1, SHARED[:7], max_tokens=12)
        rig.turn()
    for number in (-1, -2, -3):
        embed(together, number, [*SHARED, -number])
    alone.run()
    together.run()
    assert together.tokens(1) == alone.tokens(1)
    np.testing.assert_allclose(of(together, -2), unit(fake_states([*SHARED, 2]).mean(axis=0)), atol=1e-6)


def test_one_that_gave_its_pages_back_counts_no_row_twice() -> None:
    rig = Rig(max_rows=8)
    embed(rig, -1, SHARED)
    rig.turn()
    (request,) = rig.streams
    assert 0 < request.computed < len(SHARED)
    rig.streams._preempt(request)
    rig.run()
    np.testing.assert_allclose(of(rig, -1), unit(fake_states(SHARED).mean(axis=0)), atol=1e-6)
    assert rig.decoder.rows > len(SHARED)


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_a_vector_that_is_no_number_ends_its_own_request_alone(pooling: Pooling, value: float) -> None:
    rig = Rig()
    rig.submit(1, SHARED[:7], max_tokens=12)
    embed(rig, -1, SHARED[:5], pooling)
    (request,) = [request for request in rig.streams if request.embedding is not None]
    request.embedding = OfOneValue(pooling, value)
    rig.run()  # no lease is left at its end
    assert rig.terminal(-1) == ["failed"] and "no numbers" in rig.of(-1, "failed")[0]["message"]
    assert rig.terminal(1) == ["done"] and len(rig.tokens(1)) == 12


def test_one_in_the_background_ends_although_the_foreground_always_waits() -> None:
    """It keeps no pages, so each time it gave its place it would begin again."""
    rig = Rig(max_streams=1, max_rows=8)
    embed(rig, -1, [*SHARED] * 3, priority=100)
    rig.turn(2)
    number = 0
    while not rig.terminal(-1):
        number += 1
        rig.submit(number, [number, 2, 3], max_tokens=2)
        rig.turn(3)
        assert number < 20, "it starves"
    rig.run()
    assert rig.streams.totals.preemptions == 0 and rig.decoder.rows < 3 * len(SHARED) + 6 * number


def test_several_with_one_prefix_wait_for_nobody() -> None:
    rig = Rig(max_rows=8)
    for number in (-1, -2):
        embed(rig, number, SHARED)
    rig.run()
    np.testing.assert_array_equal(of(rig, -1), of(rig, -2))


def test_one_that_does_not_fit_the_device_is_refused_at_once() -> None:
    rig = Rig(4, store=64)
    embed(rig, -1, [1] * (4 * PAGE + 1))
    rig.events += rig.streams.take_events()
    assert rig.of(-1, "failed")[0]["code"] == "out_of_space"
    embed(rig, -2, [1] * (4 * PAGE))
    rig.run()
    assert rig.terminal(-2) == ["done"]


def test_inputs_that_are_too_long_are_refused_or_cut_where_that_is_asked_for() -> None:
    rig = Rig(context=20)
    with pytest.raises(ContextLengthExceeded, match="21 tokens, at most 20"):
        embed(rig, -1, [1] * 21)
    embed(rig, -2, [1] * 20)
    embed(rig, -3, [1] * 21, truncate=True)
    rig.run()
    np.testing.assert_array_equal(of(rig, -2), of(rig, -3))


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_states_that_are_no_direction(value: float) -> None:
    found = Embedding(Pooling.MEAN)
    found.take(np.full((2, 4), value, np.float32))
    with pytest.raises(EngineFailed, match="no numbers"):
        found.vector()


class HeldSteps:
    """Takes prompts into the loop; each ends when it is told to."""

    def __init__(self) -> None:
        self.taken: list[Request] = []

    def submit(self, request: Request) -> None:
        self.taken.append(request)

    def cancel(self, request_id: int) -> None: ...


async def test_places_go_to_the_prompt_of_the_highest_rank_and_back_from_who_stops_waiting() -> None:
    rig, steps, embedder = Rig(), HeldSteps(), Embedder(2)
    with ThreadPoolExecutor(1) as tokenizer:

        def call(count: int, priority: int) -> asyncio.Task[dict[str, Any]]:
            given = {"inputs": [[1, 2]] * count, "priority": priority}
            return asyncio.create_task(embedder.embed(rig.intake, steps, tokenizer, given))

        background = [call(64, 100), call(64, 100), call(64, 100)]
        await until(lambda: len(embedder._places._waiting) == 190)
        cancelled, now = call(1, 0), call(1, 0)
        await until(lambda: len(embedder._places._waiting) == 192)
        cancelled.cancel()
        ended: list[Request] = []
        while len(ended) < 193:
            await until(lambda: len(steps.taken) > len(ended))
            ended.append(steps.taken[len(ended)])
            data = {"usage": ended[-1].usage(), "embedding": b""}
            embedder.ended([Event(ended[-1].id, "done", data)])
        for done in (*background, now):
            await done
    assert [request.priority for request in steps.taken[:4]] == [100, 100, 0, 100]
    assert embedder._places._free == 2 and len(steps.taken) == 193


# -- on a whole engine -------------------------------------------------------------------------------------------------


class Desk:
    """An embedder on a live engine: its events come through `emit`, as in the worker."""

    def __init__(self, live: Live, places: int) -> None:
        self.live = live
        self.embedder = Embedder(places)
        self.tokenizer = ThreadPoolExecutor(1)
        live.engine.loop._emit = lambda events: self.embedder.ended(events)

    async def embed(self, *inputs: Any, **more: Any) -> list[np.ndarray]:
        given = {"inputs": inputs, **more}
        engine = self.live.engine
        found = await self.embedder.embed(engine.intake, engine.loop, self.tokenizer, given)
        return [vector(one) for one in found["vectors"]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = reference("llama")
    return model, prepare(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def live(tiny: tuple[Any, Path], tmp_path: Path) -> Iterator[Live]:
    with Live(tiny[1], tmp_path, nvme=0) as engine:
        yield engine


@contextlib.contextmanager
def desk(live: Live, places: int = 2) -> Iterator[Desk]:
    found = Desk(live, places)
    try:
        yield found
    finally:
        found.tokenizer.shutdown()


PROMPTS = [np.random.default_rng(n).integers(0, 320, length).tolist() for n, length in enumerate((1, 5, 16, 40, 77))]


def theirs(model: Any, tokens: list[int]) -> np.ndarray:
    """Final hidden states of transformers, after the norm: [tokens, hidden]."""
    with torch.no_grad():
        states: np.ndarray = model.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    return states


@pytest.mark.parametrize("pooling", Pooling)
async def test_vectors_are_those_of_transformers(tiny: tuple[Any, Path], live: Live, pooling: Pooling) -> None:
    live.engine.intake.facts = dataclasses.replace(live.engine.intake.facts, pooling=pooling)
    with desk(live) as found:
        ours = await found.embed(*PROMPTS)
        again = await found.embed(*PROMPTS[::-1])
    for tokens, mine, same in zip(PROMPTS, ours, again[::-1], strict=True):
        states = theirs(tiny[0], tokens)
        expected = unit(states.mean(axis=0) if pooling is Pooling.MEAN else states[-1])
        assert float(mine @ expected) > 0.9999 and np.abs(mine - expected).max() < 1e-5
        assert abs(np.linalg.norm(mine) - 1) < 1e-6
        np.testing.assert_allclose(mine, same, atol=1e-6)


async def test_bad_inputs_are_named_and_nothing_runs(live: Live) -> None:
    with desk(live) as found:
        for inputs, what in (
            (("a", ""), r"input\[1\]: it is empty"), (([1, 320],), r"input\[0\]: tokens: no token 320"),
            ((), "1 to 256"), (("a",) * (MAX_CALL_INPUTS + 1), "1 to 256"), ((1.5,), "embed: "),
            (([1] * 500,), r"input\[0\]: it has 500 tokens, at most 128"),
        ):  # fmt: skip
            with pytest.raises(BadRequest, match=what):
                await found.embed(*inputs)
        assert not len(live.engine.loop._streams)


async def test_a_cancelled_operation_leaves_nothing(live: Live) -> None:
    with desk(live, places=1) as found:
        task = asyncio.create_task(found.embed(*[PROMPTS[-1]] * 50))
        deadline_s = time.monotonic() + 20
        while not found.embedder._waiting:
            await asyncio.sleep(0.001)
            assert time.monotonic() < deadline_s
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert found.embedder._waiting == {}
        assert len((await found.embed("a"))[0]) == 64


async def test_an_engine_that_stops_ends_the_wait(live: Live) -> None:
    with desk(live) as found:
        task = asyncio.create_task(found.embed(*[PROMPTS[-1]] * 20))
        await asyncio.sleep(0)
        live.engine.loop.stop()
        with pytest.raises(TierdError):
            await asyncio.wait_for(task, 20)


async def test_a_paraphrase_is_nearer_than_something_else(model_dir: Path, tmp_path: Path) -> None:
    with Live(model_dir, tmp_path, nvme=0) as live, desk(live) as found:
        one, same, other = await found.embed(
            "The cat sat on the mat.", "A cat was sitting on a mat.", "Interest rates rose by half a percent in May."
        )
    assert one @ same > one @ other + 0.05

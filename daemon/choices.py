"""Several answers to one request: an engine stream for each, their events merged into one stream of events.

They run as requests of their own with seeds that follow each other, so each of them resumes alone when its engine dies;
the engine makes siblings cheap by letting them share the pages of the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tierd.daemon.inbox import are_joinable, joined
from tierd.daemon.limits import MAX_SEED
from tierd.daemon.protocol import TERMINAL, Event, Submit
from tierd.daemon.resume import Live, with_seed
from tierd.daemon.stream import Stream
from tierd.daemon.supervisor import Model, Supervisor

PROGRESS_S = 5.0  # something is said at least so often while answers are held back
PROMPT_COUNTS = ("hit_device", "hit_host", "hit_nvme", "recomputed")  # of timings
_COMPACT_EVENTS = 256


def answers_of(submit: Submit) -> int:
    """How many engine streams a request takes. Beams are one: the engine forks them itself."""
    return 1 if submit.beam_width else max(submit.n, submit.best_of)


class Choices:
    """The answers to one or more prompts. Like `Stream`: iterate `events` once; `cancel` ends it from another task.

    `submits`: one for each prompt. Prompt i's answers are the choices i * n to i * n + n - 1. With `best_of` > n the
    answers of a prompt are held back until all of them have ended, and those with the highest mean log probability of
    a token are given, best first. The mean is what OpenAI's interface promises; a sum would prefer short answers.

    Exactly one terminal event: `done` when all have ended; else the first that fails, or is aborted, ends all.

    Threading: for one event loop.
    """

    def __init__(self, supervisor: Supervisor, model: Model, live_id: int, submits: Sequence[Submit]) -> None:
        now_s = time.monotonic()
        self.live = Live(live_id, submits[0], now_s)  # of the whole: what was accepted, all tokens
        self.model = model
        self.cancelled = False
        self._groups = [_Group(supervisor, model, live_id, number, submit) for number, submit in enumerate(submits)]
        self._answers = [answer for group in self._groups for answer in group.answers]
        self._said_s = now_s

    @property
    def width(self) -> int:
        """Engine streams."""
        return len(self._answers)

    def cancel(self) -> None:
        """Ask for the end; the terminal event comes through `events`."""
        self.cancelled = True
        for answer in self._answers:
            answer.stream.cancel()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Events up to the terminal one. Raises what a `Stream` raises, TierdError or SlowReader, for all together.

        Closing the iterator early cancels every answer in the engine at once.
        """
        # Full when the client does not take: then the answers wait in their inboxes, which are bounded in bytes.
        queue: asyncio.Queue[tuple[_Answer, Event | Exception]] = asyncio.Queue(maxsize=self.width)
        pumps = [asyncio.create_task(_pump(answer, queue)) for answer in self._answers]
        try:
            while True:
                answer, item = await queue.get()  # each stream has its deadlines, and a pump tells every end
                if isinstance(item, Exception):
                    raise item
                for event in self._merge(answer, item):
                    self._said_s = time.monotonic()
                    yield event
                    if event.ev in TERMINAL:
                        return
        finally:
            self.live.deaths = sum(answer.stream.live.deaths for answer in self._answers)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _merge(self, answer: _Answer, event: Event) -> Iterator[Event]:
        """What the client sees of an event of one answer."""
        live = self.live
        match event.ev:
            case "accepted":
                if live.accepted is None:
                    live.accepted = event.data
                    yield event
            case "text":
                live.tokens.extend(event.data["tokens"])
                if live.first_text_s is None:
                    live.first_text_s = time.monotonic()
                if answer.group.is_ranked:
                    answer.hold(event)
                    if time.monotonic() - self._said_s > PROGRESS_S:
                        yield self._progress()
                else:
                    yield answer.told(event, answer.choice + event.data.get("choice", 0))
            case "choice":  # of beams: those of one prompt are told by one stream
                yield answer.told(event, answer.choice + event.data["choice"])
            case "done":
                answer.done = event.data
                yield from answer.group.told(answer)
                if all(one.done is not None for one in self._answers):
                    yield Event(live.id, "done", self._total())
            case "progress":
                if answer is self._answers[0]:
                    yield event
            case "refused" if live.accepted is not None:
                yield Event(live.id, "failed", event.data)
            case "aborted":
                yield Event(live.id, "aborted", {"usage": self.live.usage()})
            case _:
                yield event

    def _progress(self) -> Event:
        ended = sum(answer.done is not None for answer in self._answers)
        return Event(self.live.id, "progress", {"stage": "answers", "done": ended, "total": self.width})

    def _total(self) -> dict[str, Any]:
        """The data of the one `done`: each prompt counted once, every answer's tokens. Times are the first one's."""
        first = self._answers[0].done or {}
        parts = [group.usage() for group in self._groups]
        usage: dict[str, Any] = {name: sum(part[name] for part in parts) for name in parts[0]}
        found = [group.least_found.get("timings", {}) for group in self._groups]
        counts = {name: sum(part.get(name, 0) for part in found) for name in PROMPT_COUNTS}
        if (mode := first.get("usage", {}).get("kv_mode")) is not None:
            usage["kv_mode"] = mode
        return {name: value for name, value in first.items() if name != "logprob_sum"} | {
            "usage": usage,
            "timings": {**first.get("timings", {}), **counts},
        }


class _Answer:
    """One engine stream, and what is kept of it."""

    def __init__(self, stream: Stream, group: _Group, choice: int) -> None:
        self.stream = stream
        self.group = group
        self.choice = choice
        self.done: dict[str, Any] | None = None
        self._held: list[Event] = []

    def hold(self, event: Event) -> None:
        """Keep text until the answers are compared."""
        self._held.append(event)
        if len(self._held) >= _COMPACT_EVENTS:
            self._held = _compacted(self._held)

    @property
    def mean_logprob(self) -> float:
        """Of a token, as the engine counted them; an answer without any comes last."""
        done = self.done or {}
        tokens = done.get("usage", {}).get("completion_tokens", 0)
        return float(done["logprob_sum"]) / tokens if tokens and "logprob_sum" in done else -math.inf

    def texts(self, choice: int) -> list[Event]:
        """What was held back, under the number that it got."""
        return [self.told(event, choice) for event in _compacted(self._held)]

    def told(self, event: Event, choice: int) -> Event:
        """An event as the client gets it: log probabilities only where it asked for them."""
        data = {**event.data, "choice": choice}
        if self.group.submit.logprobs is None:
            data.pop("logprobs", None)
        return Event(event.id, event.ev, data)


class _Group:
    """The answers to one prompt."""

    def __init__(self, supervisor: Supervisor, model: Model, live_id: int, number: int, submit: Submit) -> None:
        self.submit = submit
        self.is_ranked = submit.best_of > submit.n
        self._first_choice = number * submit.n
        seeded = with_seed(submit)
        self.answers = []
        for offset in range(answers_of(submit)):
            single = _single(seeded, offset, ranked=self.is_ranked)
            stream = Stream(supervisor, model, Live(live_id, single, time.monotonic()))
            self.answers.append(_Answer(stream, self, self._first_choice + offset))

    def told(self, ended: _Answer) -> Iterator[Event]:
        """What is said when an answer has ended: its end; of ranked ones all that are given, with the last of them."""
        if self.submit.beam_width and self.submit.n > 1:
            return  # the engine has told the ends
        if not self.is_ranked:
            yield _end(ended, ended.choice)
        elif all(answer.done is not None for answer in self.answers):
            ranked = sorted(self.answers, key=lambda answer: -answer.mean_logprob)
            for choice, answer in enumerate(ranked[: self.submit.n], self._first_choice):
                yield from answer.texts(choice)
                yield _end(answer, choice)

    def usage(self) -> dict[str, int]:
        """The prompt once. Cached is what the one that found least has found: the others found what it computed."""
        usages = [(answer.done or {}).get("usage", {}) for answer in self.answers]
        return {
            "prompt_tokens": max(usage.get("prompt_tokens", 0) for usage in usages),
            "completion_tokens": sum(usage.get("completion_tokens", 0) for usage in usages),
            "cached_tokens": self.least_found.get("usage", {}).get("cached_tokens", 0),
        }

    @property
    def least_found(self) -> dict[str, Any]:
        """The end of the answer that found least: what it computed of the prompt was computed, once."""
        return min((answer.done or {} for answer in self.answers), key=_cached)


def _cached(done: Mapping[str, Any]) -> int:
    return int(done.get("usage", {}).get("cached_tokens", 0))


async def _pump(answer: _Answer, queue: asyncio.Queue[tuple[_Answer, Event | Exception]]) -> None:
    """Hand on the events of one answer, and the error that ends it."""
    try:
        async with contextlib.aclosing(answer.stream.events()) as events:
            async for event in events:
                await queue.put((answer, event))
    except Exception as exc:
        await queue.put((answer, exc))


def _single(seeded: Submit, offset: int, *, ranked: bool) -> Submit:
    """The request of one answer: seeds follow each other, around the end of their range. Beams stay together."""
    if seeded.beam_width:
        return seeded
    seed = (seeded.sampling.seed or 0) + offset
    if seed > MAX_SEED:
        seed -= 2 * MAX_SEED + 1
    sampling = msgspec.structs.replace(seeded.sampling, seed=seed)
    logprobs = 0 if ranked and seeded.logprobs is None else seeded.logprobs
    return msgspec.structs.replace(seeded, sampling=sampling, n=1, best_of=1, logprobs=logprobs)


def _end(answer: _Answer, choice: int) -> Event:
    done = answer.done or {}
    data = {"choice": choice, "finish": done.get("finish"), "stop": done.get("stop")}
    return Event(answer.stream.live.id, "choice", data)


def _compacted(events: list[Event]) -> list[Event]:
    """The same, with what can be joined joined."""
    runs: list[list[Event]] = []
    for event in events:
        if runs and are_joinable(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [run[0] if len(run) == 1 else joined(run) for run in runs]

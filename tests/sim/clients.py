"""Scripted clients: what they ask for, what they must get, and what they got."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.sim.decoder import PAGE_TOKENS, VOCAB, Oracle
from tests.sim.engine import END_TOKEN, Geometry
from tierd.daemon.engine.beams import BeamSearch
from tierd.daemon.engine.sampler import Sampler, settle
from tierd.daemon.protocol import Event, Sampling, Submit

TERMINAL = ("done", "refused", "aborted", "failed")
TENANTS = ["", "", "", "alice", "bob"]


@dataclass(slots=True, eq=False)
class Client:
    """One generation, from the first submit through all resubmits after crashes to its one end."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tenant: str
    priority: int
    wanted: list[int]  # tokens of the answer, the end token left out
    finish: str
    width: int = 0  # of a beam search; 0: it draws
    request_id: int = 0  # of the newest submit; 0 before the first
    got: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # terminal events
    cancelled: bool = False
    excused: bool = False  # a fault was injected that may end it with `failed`
    is_bounded: bool = False  # the engine had too little memory for all of its answer when it asked

    @property
    def submit(self) -> Submit:
        """The frame, as the front sends it: with the tokens that the client has already."""
        return Submit(
            "sim",
            tokens=self.prompt,
            sampling=self.sampling,
            tenant=self.tenant,
            priority=self.priority,
            resume=tuple(self.got),
            beam_width=self.width,
        )

    @property
    def sequence(self) -> tuple[int, ...]:
        """Every token that its pages may come to hold."""
        return (*self.prompt, *self.wanted, END_TOKEN)

    def take(self, event: Event) -> str:
        """Books an event; what is wrong with it, or nothing."""
        if self.ends:
            return f"{event.ev} after {self.ends}"
        data: dict[str, Any] = event.data
        if event.ev == "text":
            self.got += data["tokens"]
            if self.got != self.wanted[: len(self.got)]:
                return f"wrong tokens: {self.got}, not {self.wanted}"
        elif event.ev in TERMINAL:
            self.ends.append(event.ev)
            return self._judge_end(event.ev, data)
        return ""

    @property
    def pages(self) -> int:
        """Pages that it needs at the end, at most: hypotheses share their first ones."""
        answer = len(self.wanted) + 1 if self.width else len(self.wanted)
        return -(-(len(self.prompt) + answer) // PAGE_TOKENS) * max(self.width, 1)

    def _judge_end(self, kind: str, data: dict[str, Any]) -> str:
        if kind == "done":
            # The disk that was to hold the rest is gone, or was not there.
            short = (self.excused or self.is_bounded) and data["finish"] == "length"
            if (self.got, data["finish"]) != (self.wanted, self.finish) and not short:
                return f"done with {self.got} ({data['finish']}), not {self.wanted} ({self.finish})"
        elif kind == "aborted" and not self.cancelled:
            return "aborted, and nobody cancelled it"
        elif kind == "failed" and not self.excused:
            return f"failed: {data}"
        elif kind == "refused":
            return f"refused: {data}"
        return ""


def draw_clients(rng: random.Random, geometry: Geometry, count: int) -> list[Client]:
    """Clients whose prompts share prefixes: documents, and conversations that go on."""
    alphabet = rng.choice([2, 5, VOCAB - 1])
    documents = [_tokens(rng, alphabet, rng.randint(1, geometry.longest)) for _ in range(rng.randint(1, 3))]
    clients: list[Client] = []
    for _ in range(count):
        if clients and rng.random() < 0.4:
            earlier = rng.choice(clients)
            base, tenant = (*earlier.prompt, *earlier.wanted), earlier.tenant
        else:
            document = rng.choice(documents)
            cut = len(document) if rng.random() < 0.5 else rng.randint(0, len(document))
            base, tenant = document[:cut], rng.choice(TENANTS)
        more = 0 if base and rng.random() < 0.1 else rng.choice([1, 3, 4, 8, 16, 40])
        prompt = (*base, *_tokens(rng, alphabet, more))
        prompt = prompt[: max(1, geometry.longest - rng.choice([1, 1, 2, 5, 20]))]
        if not prompt:
            prompt = _tokens(rng, alphabet, 1)
        clients.append(_client(rng, geometry, prompt, tenant))
    return clients


def _client(rng: random.Random, geometry: Geometry, prompt: tuple[int, ...], tenant: str) -> Client:
    if rng.random() < 0.15 and min(geometry.device_pages, geometry.max_rows) >= 4:
        return _searcher(rng, geometry, prompt, tenant)
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
        seed=rng.randrange(1000),
        max_tokens=rng.choice([1, 2, 5, 10, 20, 40, None if len(prompt) + 60 > geometry.limit else 60]),
        ignore_eos=rng.random() < 0.7,
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
    )
    wanted, finish = _answer(prompt, sampling, geometry.limit)
    return Client(prompt, sampling, tenant, rng.choice([0, 0, 0, -1, 1]), wanted, finish)


def _searcher(rng: random.Random, geometry: Geometry, prompt: tuple[int, ...], tenant: str) -> Client:
    """A client that asks for the best of several beams."""
    width, most = rng.choice([2, 3]), rng.choice([1, 3, 9])
    sampling = Sampling(temperature=0.0, max_tokens=most, ignore_eos=rng.random() < 0.5)
    end_ids = frozenset() if sampling.ignore_eos else frozenset({END_TOKEN})
    search = BeamSearch(width, end_ids, min(most, geometry.limit - len(prompt)))
    oracle = Oracle()
    for token in prompt[:-1]:
        oracle.push(token)
    oracles, rows = [oracle], [oracle.push(prompt[-1])]
    while True:
        oracles = [oracles[parent].fork() for parent in search.advance(np.stack(rows))]
        if search.over:
            break
        rows = [beam.push(found.tokens[-1]) for beam, found in zip(oracles, search.running, strict=True)]
    best = search.ended[0]
    wanted = list(best.tokens[:-1] if best.ended else best.tokens)
    return Client(prompt, sampling, tenant, 0, wanted, "stop" if best.ended else "length", width)


def _answer(prompt: tuple[int, ...], sampling: Sampling, limit: int) -> tuple[list[int], str]:
    """What the model says, without tiers, batches or crashes."""
    if sampling.max_tokens is not None:
        limit = min(limit, len(prompt) + sampling.max_tokens)
    sampler = Sampler(settle(sampling, {}, 0), VOCAB, prompt)
    oracle = Oracle()
    for token in prompt[:-1]:
        oracle.push(token)
    last, answer = prompt[-1], []
    while len(prompt) + len(answer) < limit:
        last = sampler.sample(oracle.push(last), len(prompt) + len(answer))
        if last == END_TOKEN and not sampling.ignore_eos:
            return answer, "stop"
        sampler.accept(last)
        answer.append(last)
    return answer, "length"


def _tokens(rng: random.Random, alphabet: int, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(alphabet) for _ in range(count))

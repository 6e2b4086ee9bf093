"""An engine core on fakes: intake, streams, fake pages, fake decoder, a clock that tests turn."""

from __future__ import annotations

from typing import Any

from tests.daemon.engine.fakes import PAGE, VOCAB, FakeDecoder, FakePager
from tests.daemon.engine.vocabularies import byte_level
from tierd.daemon.engine.intake import Facts, Intake
from tierd.daemon.engine.runner import Runner
from tierd.daemon.engine.scheduler import Limits
from tierd.daemon.engine.streams import Streams
from tierd.daemon.protocol import Event, Sampling, Submit

END = 63


class Clock:
    """Moves a millisecond with every look, so that nothing takes no time at all."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


class Rig:
    def __init__(
        self, slots: int = 64, *, delay: int = 0, max_streams: int = 4, max_rows: int = 16, context: int = 200
    ) -> None:
        self.clock = Clock()
        self.pager = FakePager(slots, delay)
        self.decoder = FakeDecoder()
        facts = Facts(VOCAB, context, slots * PAGE, frozenset({END}), None, add_bos=False, sampling={})
        self.intake = Intake(facts, byte_level(), None)
        limits = Limits(max_rows, max_streams, PAGE)
        runner = Runner(self.decoder, self.pager.arena)
        self.streams = Streams(self.pager, runner, limits, self.clock)
        self.events: list[Event] = []

    def submit(self, number: int, tokens: list[int], max_tokens: int | None = 8, **more: Any) -> None:
        greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
        sampling = Sampling(**greedy | more.pop("sampling", {}))
        submit = Submit("m", tokens=tuple(tokens), sampling=sampling, **more)
        self.streams.add(self.intake.request(number, submit, self.clock()))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.streams.turn()
            self.events += self.streams.take_events()
            assert self.pager.check() == []

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not len(self.streams):
                break
            self.turn()
        self.events += self.streams.take_events()
        assert not len(self.streams), "requests never ended"
        assert self.pager.leases == [] and self.pager.pins == {} and self.pager.check() == []

    def of(self, number: int, *kinds: str) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.id == number and event.ev in kinds]

    def tokens(self, number: int) -> list[int]:
        return [token for data in self.of(number, "text") for token in data["tokens"]]

    def terminal(self, number: int) -> list[str]:
        ends = ("done", "refused", "aborted", "failed")
        return [event.ev for event in self.events if event.id == number and event.ev in ends]

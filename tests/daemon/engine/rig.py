"""An engine core: intake, streams and pager are real; decoder, mover threads, store and clock are the test's."""

from __future__ import annotations

import random
from typing import Any

from tests.daemon.engine.fakes import PAGE, RECORD, VOCAB, FakeBounds, FakeDecoder, PickedPages, StagedPages
from tests.daemon.engine.vocabularies import byte_level
from tests.tiers.fakes import ROOT
from tests.tiers.stand_ins import ManualMover, MemoryStore
from tierd.daemon.engine.intake import Facts, Intake
from tierd.daemon.engine.ladder import Ladders
from tierd.daemon.engine.runner import Runner
from tierd.daemon.engine.scheduler import Limits
from tierd.daemon.engine.selection import Selection
from tierd.daemon.engine.speculate import Speculator
from tierd.daemon.engine.streams import Streams
from tierd.daemon.protocol import Event, Sampling, Submit
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Ladder
from tierd.tiers.arena import Arena
from tierd.tiers.exact import ExactPages
from tierd.tiers.mover import Job, JobClass
from tierd.tiers.pager import Pager

END = 63


class Clock:
    """Moves a millisecond with every look, so that nothing takes no time at all."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


class PromptMover(ManualMover):
    """Runs every job when it is submitted: for rigs whose turns are not the test's."""

    def submit(self, job: Job, klass: JobClass, deadline_s: float = float("inf")) -> bool:
        accepted = super().submit(job, klass, deadline_s)
        self.run_all()
        return accepted


def fail(obj: object, method: str, error: Exception) -> None:
    """Makes a method of one object raise."""

    def raiser(*_: object, **__: object) -> None:
        raise error

    setattr(obj, method, raiser)


def ladders(most: Ladder, nowhere: Arena, max_streams: int, max_rows: int) -> Ladders:
    """With no more copies than are needed."""
    slots = max_streams * ((most.first + most.last) // PAGE + 2) + -(-max_rows // PAGE)
    return Ladders(ExactPages(Arena("exact", slots, RECORD, poison=True)), most, nowhere.address(0), PAGE)


class Rig:
    """`host` and `store` are pages of those tiers, 0 for none; rows may choose their pages if it `selects`. Copies
    and reads run between two turns."""

    def __init__(
        self, slots: int = 64, *, host: int = 0, store: int = 0, max_streams: int = 4, max_rows: int = 16,
        context: int = 200, mover: ManualMover | None = None, selects: bool = True, ladder: Ladder | None = None,
        speculator: Speculator | None = None,
    ) -> None:  # fmt: skip
        self.clock = Clock()
        self.mover = mover or ManualMover(1)
        self.store = MemoryStore(store) if store else None
        self.notices: list[str] = []
        device, lower = Arena("device", slots, RECORD, poison=True), Arena("host", host, RECORD, poison=True)
        self.pager = Pager(
            layout_record_bytes=RECORD,
            page_tokens=PAGE,
            root=ROOT,
            device=device,
            host=lower,
            store=self.store,
            mover=self.mover,
            clock=self.clock,
            events=lambda _kind, data: self.notices.append(str(data["text"])),
        )
        self.decoder = FakeDecoder()
        self.staged = StagedPages(self.store)
        capacity = self.pager.capacity_pages * PAGE
        facts = Facts(VOCAB, context, capacity, frozenset({END}), None, add_bos=False, sampling={}, ladder=ladder)
        self.intake = Intake(facts, byte_level(), None)
        limits = Limits(max_rows, max_streams, PAGE)
        layout = PageLayout(1, 1, 1, "fp32", PAGE)  # one layer of one key and one value, 4 bytes each
        assert layout.payload_bytes == RECORD
        self.picked = PickedPages(self.store)
        nowhere = Arena("nowhere", 1, RECORD)
        self.ladders = None if ladder is None else ladders(ladder, nowhere, max_streams, max_rows)
        runner = Runner(
            self.decoder, layout, (device.array, lower.array, nowhere.array), self.staged,
            selections=(lambda: Selection(FakeBounds(), [0])) if selects else None,
            picker=self.picked, copies=None if self.ladders is None else self.ladders.pages.arena.array,
        )  # fmt: skip
        self.streams = Streams(
            self.pager, runner, limits, self.clock, speculator=speculator, ladders=self.ladders
        )
        self.events: list[Event] = []

    def submit(self, number: int, tokens: list[int], max_tokens: int | None = 8, **more: Any) -> None:
        greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
        sampling = Sampling(**greedy | more.pop("sampling", {}))
        submit = Submit("m", tokens=tuple(tokens), sampling=sampling, **more)
        self.streams.add(self.intake.request(number, submit, self.clock()))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.streams.turn()
            self.mover.run_all()
            self.events += self.streams.take_events()
            assert self.pager.check() == []
            assert self.ladders is None or self.ladders.pages.check() == []

    def disturb(self, number: int, chance: random.Random) -> None:
        """Perhaps cancels a request, and perhaps preempts any."""
        if chance.random() < 0.2:
            self.streams.cancel(number)
        if chance.random() < 0.3 and self.streams._requests:
            request = chance.choice(list(self.streams._requests.values()))
            if request.lease is not None:
                self.streams._preempt(request)

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not len(self.streams):
                break
            self.turn()
        self.events += self.streams.take_events()
        assert not len(self.streams), "requests never ended"
        self.check_quiet()

    def check_quiet(self) -> None:
        """Nothing is held, and the books add up."""
        assert not self.pager.leases and self.pager.check() == []
        assert self.ladders is None or not self.ladders.pages.arena.used

    def of(self, number: int, *kinds: str) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.id == number and event.ev in kinds]

    def tokens(self, number: int) -> list[int]:
        return [token for data in self.of(number, "text") for token in data["tokens"]]

    def terminal(self, number: int) -> list[str]:
        ends = ("done", "refused", "aborted", "failed")
        return [event.ev for event in self.events if event.id == number and event.ev in ends]

"""One simulated run: a machine, its faults and its clients follow from a seed, and nothing else.

No thread, no wall clock, no file: the same seed gives the same run, event by event.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections.abc import Callable

from tests.sim.clients import Client, draw_clients
from tests.sim.clock import Clock
from tests.sim.decoder import PAGE_TOKENS
from tests.sim.disk import Faults, SimDisk
from tests.sim.engine import Engine, Geometry
from tests.sim.operated import Operated
from tests.tiers.faults import PowerCut
from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.errors import ContextLengthExceeded, EngineFailed
from tierd.tiers.errors import StoreError

MAX_TURNS = 5000  # a run takes a few hundred; more is a run that does not end
MAX_REST_TURNS = 3000
MAX_IDLE_TURNS = 8  # in a row; then time passes all the same
TURN_S = 5e-5  # what a turn takes beside computing
NAP_S = 0.5
STUCK_DISK_S = 10.0  # while one transfer takes longer, the engine may give a request up
CHECK_CHANCE = 0.04  # of a turn: `check` reads all books
NEWCOMER_CHANCE = 0.02  # before a layer of a long step


class Wrong(AssertionError):
    """The run did something that must never happen. The text names the seed."""


class Simulation(Operated):
    """Args:
    seed: everything follows from it.
    clients: how many; None draws a number.
    """

    def __init__(self, seed: int, clients: int | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = Clock(self.rng.uniform(0, 1e5))
        self.geometry = Geometry.draw(self.rng)
        self.disk = SimDisk(random.Random(self.rng.random()), _draw_faults(self.rng))
        self.log: list[str] = []
        self.crashes = 0
        self.turns = 0
        self.clients = draw_clients(self.rng, self.geometry, clients or self.rng.randint(3, 9))
        self._by_id: dict[int, Client] = {}
        self._ids = itertools.count(1)
        self._serials = itertools.count()
        self._kept: set[bytes] = set()  # pages that are pinned and must be known
        self._resizing = False  # in this turn
        self._errands = []
        self._waiting: set[Client] = set()  # a submit of theirs is on the time line
        self._known: dict[str, list[tuple[int, ...]]] = {}  # by tenant: sequences whose pages may be known
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._script()
        self.engine = self._boot()

    def run(self) -> None:
        """Until every client has its end and everything is at rest. Raises Wrong."""
        while True:
            try:
                self._serve()
                self._rest()
                self._finish()
                break
            except PowerCut:
                self._crash(self.rng.choice([0.0, 0.5, 1.0]))
        self.disk.close_all()

    @property
    def rows(self) -> int:
        """Computed since the last start."""
        return self.engine.decoder.rows

    def describe(self) -> str:
        """What kind of run it was."""
        return f"{self.geometry}, {len(self.clients)} clients, {self.crashes} crashes, faults {self.disk.fired}"

    # -- the script ------------------------------------------------------------------------------------------------

    def _script(self) -> None:
        """Puts on the time line who comes when, who leaves early, and what goes wrong."""
        rng, time_s = self.rng, self.clock.now_s
        gap_s = rng.choice([0.001, 0.05, 0.5, 5.0])
        for client in self.clients:
            time_s += rng.expovariate(1.0) * gap_s
            self._send(time_s, client)
            if rng.random() < 0.15:
                left_s = time_s + rng.expovariate(1.0) * rng.choice([0.01, 0.3])
                self._at(left_s, lambda client=client: self._cancel(client))  # type: ignore[misc]
        span_s = time_s - self.clock.now_s + 1.0
        kinds = [
            self._cut_power, self._kill, self._fill_disk, self._slow_disk, self._damage, self._operate, self._operate,
            self._fail_step, self._kill_mover, self._restart, self._pin, self._pin,
        ]  # fmt: skip
        for _ in range(rng.choice([0, 1, 3, 6])):
            kind = rng.choice(kinds)
            if kind == self._kill_mover and rng.random() < 0.7:
                continue
            self._at(self.clock.now_s + rng.random() * span_s, kind)
        for _ in range(rng.choice([0, 0, 0, 2, 6])):
            self._at(self.clock.now_s + rng.random() * span_s, self._resize)

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._actions, (time_s, next(self._serials), action))

    def _send(self, time_s: float, client: Client) -> None:
        if client not in self._waiting:
            self._waiting.add(client)
            self._at(time_s, lambda: self._submit(client))

    def _submit(self, client: Client) -> None:
        self._waiting.discard(client)
        if client.cancelled:
            client.ends.append("aborted")  # gone before the engine heard of it
            return
        client.request_id = next(self._ids)
        try:
            request = self.engine.intake.request(client.request_id, client.submit, self.clock())
        except ContextLengthExceeded as exc:
            known_pages = self.engine.intake.facts.capacity_tokens // PAGE_TOKENS  # those of the start
            if self.engine.promises(client.pages) and client.pages <= known_pages:
                raise Wrong(self._explain(f"refused: {exc}")) from exc
            client.ends.append("refused")  # it was to live on the disk, which could not be opened again
            return
        client.is_bounded = self.engine.intake.facts.capacity_tokens < len(client.prompt) + len(client.wanted)
        self._by_id[client.request_id] = client
        self.engine.streams.add(request)

    def _cancel(self, client: Client) -> None:
        if not client.ends:
            client.cancelled = True
            if client.request_id:
                self.engine.streams.cancel(client.request_id)

    def _cut_power(self) -> None:
        self.disk.calls_left = self.rng.randrange(1, 400)

    def _kill(self) -> None:
        self._crash(1.0)

    def _restart(self) -> None:
        """An orderly stop, as for an update: flushed, closed, opened again."""
        self.engine.pager.flush(self.clock() + 1.0)
        self._reopen(orderly=True)

    def _fill_disk(self) -> None:
        self.disk.faults.full = True
        self._at(self.clock.now_s + self.rng.expovariate(1.0), self._free_disk)

    def _free_disk(self) -> None:
        self.disk.faults.full = False

    def _slow_disk(self) -> None:
        self.engine.mover.slowness = self.rng.choice([20.0, 1000.0])
        self._at(self.clock.now_s + self.rng.expovariate(0.3), self._normal_disk)

    def _normal_disk(self) -> None:
        self.engine.mover.slowness = 1.0

    def _damage(self) -> None:
        self._kept = set()
        self._note(self.disk.damage())

    def _fail_step(self) -> None:
        self.engine.decoder.fail_with = MemoryError("injected")

    def _kill_mover(self) -> None:
        self.engine.mover.die()

    # -- time ------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Turns until nothing is left to do for anybody."""
        idle = 0  # turns in a row that were busy and computed nothing
        while self._actions or len(self.engine.streams):
            self.turns += 1
            if self.turns > MAX_TURNS:
                raise Wrong(self._explain(f"no end after {MAX_TURNS} turns: {self._standing()}"))
            while self._actions and self._actions[0][0] <= self.clock.now_s:
                time_s, _, action = heapq.heappop(self._actions)
                self._note(getattr(action, "__name__", "client"))
                action()
            self._advance_errands()
            steps = self._computed()
            worked = self._turn()
            idle = 0 if self._computed() > steps else idle + 1
            if not worked or idle > MAX_IDLE_TURNS:
                self._nap()

    def _computed(self) -> int:
        totals = self.engine.streams.totals
        return totals.steps + totals.dropped_steps

    def _turn(self) -> bool:
        """One turn of the step loop, with its answer to a step that fails."""
        streams, injected = self.engine.streams, self.engine.decoder.fail_with
        try:
            worked = streams.turn(lambda: self.rng.random() < NEWCOMER_CHANCE)
        except MemoryError:
            if injected is None:
                raise
            self._note("a step failed")
            for client in self._by_id.values():
                client.excused |= not client.ends
            streams.fail_all(EngineFailed("injected"))
            self._look()
            worked = True
        self._take_events()
        for client in self.clients:
            client.excused = False
        self._resizing = self.engine.pager.resizer.active
        self.clock.go_to(self.clock.now_s + TURN_S)
        if self.rng.random() < CHECK_CHANCE:
            self._look()
        return worked

    def _nap(self) -> None:
        until_s = self._actions[0][0] if self._actions else float("inf")
        if len(self.engine.streams):
            until_s = min(until_s, self.clock.now_s + NAP_S)
        until_s = min(until_s, max(self.engine.mover.next_s, self.clock.now_s + 1e-6))
        if until_s < float("inf"):
            self.clock.go_to(until_s)
        self.engine.mover.advance()

    def _take_events(self) -> None:
        stuck = self.engine.mover.slowest_s > STUCK_DISK_S
        for client in self.clients:
            if not client.ends:
                # While arenas shrink, what it needed may have been about to go.
                client.excused |= stuck or self._resizing or self.disk.faults.full
                client.excused |= not self.engine.promises(client.pages)
                client.excused |= client.width > 0 and not self.engine.has_room_for_beams(client.width)
        for event in self.engine.streams.take_events():
            client = self._by_id.get(event.id)
            if client is None:
                raise Wrong(self._explain(f"an event for nobody: {event}"))
            if event.ev == "accepted":
                self._judge_hit(client, event.data["cached_tokens"])
                self._known.setdefault(client.tenant, []).append(client.sequence)
            if wrong := client.take(event):
                raise Wrong(self._explain(f"request {event.id}: {wrong}; {self._standing()}"))

    def _judge_hit(self, client: Client, cached: int) -> None:
        """Nobody has computed more of this prompt for this tenant."""
        known = self._known.get(client.tenant, [])
        if cached > max((_shared(client.prompt, sequence) for sequence in known), default=0):
            raise Wrong(self._explain(f"{cached} tokens of {client.prompt} come from nowhere, or from another tenant"))

    def _look(self) -> None:
        engine, nodes = self.engine, self.engine.pager.index.nodes
        if self.disk.fired or self.disk.faults.full or engine.mover.dead or engine.prefixes.gave_up:
            self._kept = set()  # a disk that fails loses them, and where nobody could go on else they give way
        if gone := [key for key in self._kept if key not in nodes]:
            raise Wrong(self._explain(f"{len(gone)} pages of pinned prefixes are gone"))
        if findings := self.engine.findings():
            raise Wrong(self._explain(f"the books: {findings[:3]}"))

    # -- ends ------------------------------------------------------------------------------------------------------

    def _boot(self) -> Engine:
        return Engine(self.geometry, self.clock, random.Random(self.rng.random()), self.disk, self._note)

    def _crash(self, keep: float) -> None:
        """The process, or the machine, is gone; what was not synced is kept with this chance, sector by sector."""
        self._note(f"crash, keeping {keep}")
        self.crashes += 1
        self.disk.crash(keep)
        self.clock.go_to(self.clock.now_s + self.rng.expovariate(1.0))
        self._reopen(orderly=False)

    def _reopen(self, *, orderly: bool) -> None:
        """A new process; the front sends every stream that was running again."""
        self._kept = set()  # these pins live as long as the process
        if orderly:
            self.engine.close()
        while True:
            try:
                self.engine = self._boot()
                break
            except PowerCut:
                self._note("crash while opening")
                self.disk.crash(self.rng.choice([0.0, 0.5, 1.0]))
        self._look()
        with contextlib.suppress(StoreError):  # a disk that fails is not looked into
            if self.engine.store is not None and (findings := self.engine.store.check()):
                raise Wrong(self._explain(f"the store after a start: {findings[:3]}"))
        self._by_id.clear()
        for client in self.clients:
            if client.request_id and not client.ends:
                self._send(self.clock.now_s, client)

    def _rest(self) -> None:
        """Lets everything in flight come to an end."""
        engine = self.engine
        self.disk.faults = Faults(full=False)
        for _ in range(MAX_REST_TURNS):
            next_s = engine.mover.next_s
            self.clock.go_to(max(self.clock.now_s + 0.06, next_s if next_s < float("inf") else 0.0))
            if not engine.streams.turn() and not engine.mover.outstanding and not engine.pager.resizer.active:
                break
        else:
            raise Wrong(self._explain("the pager does not come to rest"))
        if findings := [*engine.findings(), *engine.leaks()]:
            raise Wrong(self._explain(f"at rest: {findings[:3]}"))
        for client in self.clients:
            if len(client.ends) != 1:
                raise Wrong(self._explain(f"{client} has {len(client.ends)} ends"))

    def _finish(self) -> None:
        """The store holds what the pager says; everything can be given back."""
        engine = self.engine
        store = engine.store
        if store is not None and engine.pager.writeback.on:
            engine.pager.flush(self.clock() + 60.0)
            if findings := store.check():
                raise Wrong(self._explain(f"the store at rest: {findings[:3]}"))
            rows = {meta.key for meta in store.pages()}
            durable = {node.key for node in engine.pager.index.nodes.values() if node.durable}
            if engine.pager.writeback.quiet and engine.pager.writeback.on and durable - rows:
                raise Wrong(self._explain(f"{len(durable - rows)} pages are called durable and have no row"))
        self._kept = set()
        engine.pager.clear()
        self._rest()
        if (stats := engine.pager.statistics()).known_pages or stats.device.free_pages != stats.device.total_pages:
            raise Wrong(self._explain(f"{stats.known_pages} pages stay known: {engine.pager.index.nodes.values()}"))
        engine.close()
        if self.disk.open_files:
            raise Wrong(self._explain(f"{self.disk.open_files} files are left open"))

    def _note(self, text: str) -> None:
        self.log.append(f"{self.clock.now_s:12.6f} {text}")

    def _standing(self) -> str:
        phases = {phase.value: self.engine.streams.count(phase) for phase in Phase}
        engine = self.engine
        return f"{phases}, {engine.device}, {engine.mover.outstanding} jobs, disk x{engine.mover.slowness:.0f} slower"

    def _explain(self, what: str) -> str:
        again = f"TIERD_SIM_SEEDS={self.seed} pytest tests/sim -k test_seed"
        return f"seed {self.seed}, turn {self.turns}, {self.clock.now_s:.3f} s: {what} (again: {again})"


def _draw_faults(rng: random.Random) -> Faults:
    """Most disks are healthy; the others have one or two illnesses."""
    faults = Faults()
    if rng.random() < 0.5:
        return faults
    illnesses = [
        ("read_error", 0.02), ("write_error", 0.01), ("sync_error", 0.02), ("index_error", 0.01), ("short", 0.3),
        ("interrupted", 0.2), ("flip", 0.03), ("misdirected", 0.01), ("dropped", 0.03),
    ]  # fmt: skip
    for name, most in rng.sample(illnesses, rng.randint(1, 2)):
        setattr(faults, name, most * rng.random())
    return faults


def _shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))

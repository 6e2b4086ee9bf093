"""Write-behind: pages become durable in groups, behind the work, and the store is kept from overflowing.

Order of a write: the record, fdatasync, the row (all in `Store.write`), then the page is published here as durable.
Order of a removal: it is booked out here, then the row goes. All changes of the store run on the mover's one writer
thread in the order of submission, so a removal and a later write of the same key can't overtake each other.

What is worth a write, and whether the day still has room for it, is decided in `admit`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierd.tiers.admit import Admission
from tierd.tiers.arena import Arena
from tierd.tiers.errors import StoreFull
from tierd.tiers.journal import What
from tierd.tiers.keys import unpack_tokens
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, Job, JobClass, Mover
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.policy import WRITE_GROUP_PAGES, WRITE_GROUP_WAIT_S
from tierd.tiers.prefix import Leaving, Node
from tierd.tiers.residency import Residency
from tierd.tiers.store import PageMeta

if TYPE_CHECKING:
    from tierd.tiers.store import Store

MAX_GROUPS = 2  # in flight: one is being synced while the next waits its turn
MAX_FULL_IN_A_ROW = 3  # groups that found the store full although room had been made
PAUSE_S = 5.0
_ROW_BATCH = 1024  # rows deleted or touched by one job
_TOUCH_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A page in a group and the slot that its write reads, kept until the write is over."""

    node: Node
    arena: Arena
    slot: int
    generation: int


class Writeback:
    """Not thread-safe: only the pager's thread calls it.

    Args:
        residency: where copies are booked.
        store: None turns the tier off for good.
        mover: runs the writes.
        notify: told once, in a sentence for the user, when the tier is turned off or is full.
        recovered: told the sentence that is true no more.
        on_written: called for a page whose device copy waited for the write, whether it worked or not.
    """

    def __init__(
        self,
        residency: Residency,
        store: Store | None,
        mover: Mover,
        notify: Callable[[str], None],
        recovered: Callable[[str], None],
        on_written: Callable[[Node], None],
    ) -> None:
        self.on = store is not None
        self.off_reason = ""  # why a store was given up
        self.dirty = residency.dirty
        self.groups = 0  # in flight
        self.jobs = 0  # in flight, of any kind
        self.writing_pages = 0
        self.written_pages = 0
        self.failed_pages = 0
        self.admission = Admission(residency, self._taken_slots)
        self._told_day = -1  # when the user was told last that the day's writes are used up
        self._residency = residency
        self._store = store
        self._mover = mover
        self._notify = notify
        self._recovered = recovered
        self._on_written = on_written
        self._urgent = False
        self._since_s = 0.0  # when the oldest dirty page came
        self._paused_until_s = float("-inf")
        self._full_in_a_row = 0
        self._must_ask = False  # whether the disk has any space, before anything else is tried
        self._told_full = ""
        self._touched: dict[PageKey, Node] = {}
        self._touched_at_s = 0.0
        self._now_s = 0.0

    @property
    def paused(self) -> bool:
        """The store is full and nothing in it can go: writes wait a while."""
        return self._now_s < self._paused_until_s

    @property
    def quiet(self) -> bool:
        """Whether the store holds exactly what is booked as durable."""
        return not self.jobs and not self._residency.dropped_rows

    def _taken_slots(self) -> int:
        """Slots of the store without a row that no other page can have: being written, or set aside as bad."""
        return self.writing_pages + (self._store.quarantined_slots if self._store is not None else 0)

    def add(self, node: Node) -> None:
        """Queues a page that became known. No loss if nothing can be written now: it stays queued."""
        if not self.on or node.durable or node.writing:
            return
        if not self.dirty:
            self._since_s = self._now_s
        self.dirty[node.key] = node

    def hurry(self, node: Node) -> bool:
        """Writes the page before all others, without waiting for a group; False if it can't be, or isn't worth it."""
        if not self.on or self.paused:
            return False
        if not node.writing and not self.admission.may_hurry(node):
            if not self.admission.allowed:
                self._tell_exhausted()
            return False
        if not node.writing:
            self.add(node)
            self.dirty.move_to_end(node.key, last=False)
        self._urgent = True
        return True

    def try_anew(self) -> None:
        """Ends a pause: somebody says that there may be room now."""
        self._paused_until_s = float("-inf")

    def touch(self, node: Node) -> None:
        """The page was used: the store learns it some time."""
        if self.on and node.durable:
            self._touched[node.key] = node

    def poll(self, now_s: float, *, force: bool = False) -> bool:
        """Starts what is due; True if something was started.

        Args:
            now_s: time of the same clock at every call.
            force: do not wait for groups to fill.
        """
        self._now_s = now_s
        if not self.on:
            return False
        changed = False
        if self.dirty and self.groups < MAX_GROUPS and not self.paused:
            due = force or self._urgent or now_s - self._since_s >= WRITE_GROUP_WAIT_S
            if due or len(self.dirty) >= WRITE_GROUP_PAGES:
                changed = self._ask() if self._must_ask else self._start_group()
        if self._residency.dropped_rows and not self.groups and not self.paused:
            changed |= self._delete_rows()
        if self._touched and (force or now_s - self._touched_at_s >= _TOUCH_EVERY_S):
            self._touched_at_s = now_s
            changed |= self._touch_rows()
        return changed

    def turn_off(self, reason: str) -> None:
        """Gives the store up: no page is durable any more, pages that lay only there are forgotten."""
        if not self.on:
            return
        self.on = False
        self.off_reason = reason
        self._notify(f"the NVMe tier is off: {reason}; serving goes on without it")
        self._residency.store_slots = 0
        waiting = list(self.dirty.values())
        self.dirty.clear()
        self._touched.clear()
        for node in waiting:
            self._leave(node)
        for node in list(self._residency.index.nodes.values()):
            if node.durable:
                self._residency.take(node, Tier.NVME)
                self._residency.settle(node)
        self._residency.dropped_rows.clear()

    def _leave(self, node: Node) -> None:
        if node.leaving is Leaving.WRITE:
            self._on_written(node)

    def _start_group(self) -> bool:
        store = self._store
        if store is None:
            return False
        allowed = self.admission.allowed
        if not allowed:
            self._tell_exhausted()
            self._pause()
            return False
        nodes = self.admission.take()
        self._put_back(nodes[allowed:])
        nodes, waiting = self.admission.make_room(nodes[:allowed])
        self._put_back(waiting)
        if not nodes:
            self._urgent = False
            if waiting:
                self._tell_full()
                self._pause()
            return False
        # Before the write, in the same queue: their slots are what it will use, and the removal of a page that is
        # written anew must not come after it.
        while self._delete_rows() and any(node.key in self._residency.dropped_rows for node in nodes):
            pass
        sources = [self._hold(node) for node in nodes]
        metas = [self._meta(source.node) for source in sources]
        rows = [source.arena.row(source.slot) for source in sources]
        num_bytes = len(rows) * self._residency.stored_bytes
        budget = self.admission.budget

        def write() -> None:
            self._mover.lend(rows, lambda arrays: store.write(list(zip(metas, arrays, strict=True))))
            budget.share()

        job = Job(write, Link.DISK_WRITE, num_bytes, lambda done: self._written(sources, num_bytes, done))
        if not self._mover.submit(job, JobClass.WRITE_BEHIND):
            for source in sources:
                self._let_go(source)
            self._put_back(nodes)
            return False
        budget.spend(num_bytes)
        # Pages that had no room in this group, and that somebody waits for, are due at once.
        first = itertools.islice(self.dirty.values(), WRITE_GROUP_PAGES)
        self._urgent = any(node.leaving is Leaving.WRITE for node in first)
        self.groups += 1
        self.jobs += 1
        self.writing_pages += len(nodes)
        self._since_s = self._now_s
        return True

    def _put_back(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            if not self.on:
                self._leave(node)
            elif node.alive and not node.durable:
                self.dirty[node.key] = node
                self.dirty.move_to_end(node.key, last=False)

    def _hold(self, node: Node) -> _Source:
        residency = self._residency
        arena, slot = (residency.device, node.device) if node.device >= 0 else (residency.host, node.host)
        node.writing = True
        residency.move(node, 1)
        return _Source(node, arena, slot, arena.retain(slot))

    def _let_go(self, source: _Source) -> None:
        source.arena.release(source.slot, source.generation)
        source.node.writing = False
        self._residency.move(source.node, -1)

    def _meta(self, node: Node) -> PageMeta:
        return PageMeta(node.key, node.parent, unpack_tokens(node.packed), node.hits, node.last_use_s)

    def _written(self, sources: list[_Source], num_bytes: int, done: Completion) -> None:
        self.groups -= 1
        self.jobs -= 1
        self.writing_pages -= len(sources)
        for source in sources:
            self._let_go(source)
        if done.error is None:
            self._full_in_a_row = 0
            self._tell_room()
            self.written_pages += len(sources)
            self.admission.written([source.node for source in sources])
            for source in sources:
                if self.on:
                    self._residency.place(source.node, Tier.NVME, 0)
                    self._residency.journal.page(What.PERSIST, source.node, Tier.NVME)
        else:
            self.admission.budget.spend(-num_bytes)
            self.failed_pages += len(sources)
            self._put_back([source.node for source in sources])
            self._failed(done.error, len(sources))
        for source in sources:
            self._leave(source.node)
            self._residency.settle(source.node)

    def _failed(self, error: Exception, count: int) -> None:
        if not isinstance(error, StoreFull):
            self.turn_off(str(error) or type(error).__name__)
            return
        self._full_in_a_row += 1
        if self._full_in_a_row == 1:
            # A disk without any space takes no rows and no removals either: whatever went for new pages went in vain.
            self._must_ask = True
            return
        # The store knows better than our count: slots set aside, or a file system that refuses to grow.
        evicted = 0
        while evicted < count and (victim := self._residency.victim(Tier.NVME)) is not None:
            self._residency.evict(victim, Tier.NVME)
            evicted += 1
        if not evicted or self._full_in_a_row >= MAX_FULL_IN_A_ROW:
            self._tell_full(str(error))
            self._pause()

    def _ask(self) -> bool:
        """Has the store look whether the disk has any space; groups wait for that."""
        store = self._store
        if store is None or self.groups:
            return False

        def asked(done: Completion) -> None:
            self.groups -= 1
            self._must_ask = done.error is not None
            self._rows_done(self._paused_if_full(done))

        if not self._submit_rows(store.require_room, asked):
            return False
        self.groups += 1
        return True

    def _tell_full(self, reason: str = "every page in it is in use") -> None:
        if not self._told_full:
            self._told_full = f"the NVMe tier is full: {reason}; new pages stay in memory until there is room"
            self._notify(self._told_full)

    def _tell_room(self) -> None:
        if self._told_full:
            self._recovered(self._told_full)
            self._told_full = ""

    def _tell_exhausted(self) -> None:
        budget = self.admission.budget
        if self._told_day != budget.day:
            self._told_day = budget.day
            self._notify(
                f"{budget.daily_bytes / 1e9:.1f} GB were written to the NVMe tier today, which is all that "
                "nvme_daily_writes allows; new pages stay in memory until midnight (UTC)"
            )

    def _pause(self) -> None:
        self._full_in_a_row = 0
        self._paused_until_s = self._now_s + PAUSE_S
        for node in list(self.dirty.values()):
            self._leave(node)

    def wipe(self) -> bool:
        """Has the store give its space back, once nothing in it is known and nothing is being written."""
        if self._store is None or not self.on or self.groups or self._residency.durable_pages:
            return False
        return self._drop_rows(list(self._residency.dropped_rows), self._store.clear)

    def _delete_rows(self) -> bool:
        store, rows = self._store, self._residency.dropped_rows
        if store is None or not rows:
            return False
        keys = list(itertools.islice(rows, _ROW_BATCH))
        return self._drop_rows(keys, lambda: store.remove(keys))

    def _drop_rows(self, keys: list[PageKey], call: Callable[[], object]) -> bool:
        rows = self._residency.dropped_rows

        def dropped(done: Completion) -> None:
            if isinstance(done.error, StoreFull):  # even a removal takes a little space: again after a pause
                rows.update(dict.fromkeys(key for key in keys if not self._is_replaced(key)))
                self._must_ask = True
            self._rows_done(self._paused_if_full(done))

        if not self._submit_rows(call, dropped):
            return False
        for key in keys:
            del rows[key]
        return True

    def _paused_if_full(self, done: Completion) -> Completion:
        if not isinstance(done.error, StoreFull):
            return done
        self._tell_full(str(done.error))
        self._pause()
        return Completion(done.job, None)

    def _is_replaced(self, key: PageKey) -> bool:
        """Whether a later write has taken, or takes, the place of a row that was to go."""
        node = self._residency.index.get(key)
        return node is not None and (node.durable or node.writing)

    def _touch_rows(self) -> bool:
        store = self._store
        if store is None:
            return False
        nodes = [self._touched.popitem()[1] for _ in range(min(len(self._touched), _ROW_BATCH))]
        uses = {node.key: (node.hits, node.last_use_s) for node in nodes if node.alive and node.durable}
        return bool(uses) and self._submit_rows(lambda: store.touch(uses), self._rows_done)

    def _submit_rows(self, call: Callable[[], object], on_done: Callable[[Completion], None]) -> bool:
        if not self._mover.submit(Job(call, Link.DISK_WRITE, 0, on_done), JobClass.WRITE_BEHIND):
            return False
        self.jobs += 1
        return True

    def _rows_done(self, done: Completion) -> None:
        self.jobs -= 1
        if done.error is not None:
            self.turn_off(str(done.error) or type(done.error).__name__)

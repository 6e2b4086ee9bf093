"""Loads: store pages on their way into slots of memory, many to a job.

A thread that reads one page at a time spends as much on taking turns with the others as on the page (measured: half of
the disk's rate; 16 pages a job 0.9 of it, 32 a job all of it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tierd.tiers.arena import Arena
from tierd.tiers.errors import JobCancelled, PageLost
from tierd.tiers.gpu import HostRow
from tierd.tiers.journal import What
from tierd.tiers.lease import Load
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, Job, JobClass, Mover
from tierd.tiers.page import Tier
from tierd.tiers.prefix import Node
from tierd.tiers.residency import Residency
from tierd.tiers.store import Store

PAGES_PER_JOB = 32


class Loader:
    """Not thread-safe: only the pager's thread calls it.

    Args:
        residency: where copies are booked.
        store: None: there is nothing to load.
        mover: runs the reads.
        on_failed: told of each page that could not be read, and why. Not of loads that were cancelled.
    """

    def __init__(
        self,
        residency: Residency,
        store: Store | None,
        mover: Mover,
        on_failed: Callable[[Node, Exception], None],
    ) -> None:
        self.in_flight = 0  # pages
        self.loaded_pages = 0
        self._residency = residency
        self._store = store
        self._mover = mover
        self._on_failed = on_failed
        self._pending: list[tuple[Node, Load]] = []  # until the next `flush`, all of one class
        self._class = JobClass.NOW

    def has_room(self, klass: JobClass) -> bool:
        """Whether a load can be started: not while the mover's queue is full."""
        if klass is not self._class or len(self._pending) >= PAGES_PER_JOB:
            self.flush()
        return len(self._pending) < PAGES_PER_JOB and (klass is self._class or not self._pending)

    def start(self, node: Node, load: Load, klass: JobClass) -> None:
        """Loads a page of the store into a slot that is the load's own from here on. `flush` sends it off.

        Only where `has_room`.
        """
        self._class = klass
        self._pending.append((node, load))
        node.load = load
        self._residency.move(node, 1)
        self.in_flight += 1

    def flush(self) -> bool:
        """Sends off what was started. True if there was anything."""
        batch, self._pending = self._pending, []
        if not batch:
            return False
        store = self._store
        if store is None:
            raise AssertionError(f"{batch[0][0]} is to be loaded without a store")
        nodes = [node for node, _ in batch]
        keys = [node.key for node in nodes]
        rows = [self._arena(load).row(load.slot) for _, load in batch]
        num_bytes = len(rows) * self._residency.stored_bytes

        def read(which: slice, arrays: Sequence[HostRow]) -> list[PageLost | None]:
            return store.read_many(keys[which], arrays)

        job = Job(lambda: self._mover.fill(rows, read), Link.DISK_READ, num_bytes, partial(self._done, batch))
        for _, load in batch:
            load.job, load.pages = job, nodes
        if not self._mover.submit(job, self._class):
            self._pending = batch  # the queue is full: with the next flush
        return True

    def cancel(self, node: Node) -> None:
        """The page is about to be computed. When that holds for all pages of its job, it need not run any more."""
        load = node.load
        if load is not None and load.job is not None and all(page.computer is not None for page in load.pages):
            self._mover.cancel(load.job)

    def _done(self, batch: list[tuple[Node, Load]], done: Completion) -> None:
        found: list[Exception | None] = [done.error] * len(batch)
        if done.error is None:
            assert isinstance(done.result, list)  # of `Store.read_many`
            found = done.result
        for (node, load), error in zip(batch, found, strict=True):
            self._loaded(node, load, error)

    def _loaded(self, node: Node, load: Load, error: Exception | None) -> None:
        residency = self._residency
        node.load = None
        residency.move(node, -1)
        self.in_flight -= 1
        if error is None and not node.readable:
            self.loaded_pages += 1
            residency.place(node, load.tier, load.slot)
            residency.journal.page(What.RESTORE, node, load.tier, load.slot)
        else:  # it failed, or the page was computed meanwhile
            self._arena(load).drop(load.slot)
            if error is not None and not isinstance(error, JobCancelled):
                self._on_failed(node, error)
        residency.settle(node)

    def _arena(self, load: Load) -> Arena:
        return self._residency.device if load.tier is Tier.DEVICE else self._residency.host

"""Verification: the books against each other, every stored page against its checksums, both against the index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from tierd.tiers import check
from tierd.tiers.errand import Errand, Slices
from tierd.tiers.errors import StoreBroken
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import Node
from tierd.tiers.store import Store, Verified

if TYPE_CHECKING:
    from tierd.tiers.pager import Pager

T = TypeVar("T")

BOOK_PAGES = 256  # of a slice of the books: some 10 ms
READ_PAGES = 32  # of a slice of the store: a reader of the disk is taken for some 30 ms
ROW_KEYS = 512  # looked up in the index at a time


class Verification(Errand):
    """Looks at everything; with `repair` what is wrong is removed. Streams go on meanwhile, and change what is kept.

    Attributes:
        findings: what was wrong, a line each; empty when all is sound.
        read_pages: pages of the store that were read.
        total_pages: pages that the store had at the start.
    """

    def __init__(self, pager: Pager, repair: bool, deadline_s: float = float("inf")) -> None:
        super().__init__(pager, deadline_s)
        self.findings: list[str] = []
        self.read_pages = 0
        on = pager.store is not None and pager.writeback.on
        self.total_pages = pager.residency.durable_pages if on else 0
        self._repair = repair
        self._removed: list[PageKey] = []  # bad pages, of which the books do not know yet
        self._unknown: list[PageKey] = []  # rows of pages that the books did not hold for durable when they were read

    def stop(self, reason: str) -> None:
        """See `Errand.stop`."""
        if not self.ended:
            pages = f"{self.read_pages} of {self.total_pages} stored pages were read"
            self.findings.append(f"stopped, for {reason}: {pages}")
        super().stop(reason)

    def _arrived(self, done: Completion) -> None:
        """The books learn of what was removed at once, even when the errand is over by now.

        Removals run where writes do, and their ends come in that order: what is booked as durable now was removed after
        it was written.
        """
        if isinstance(done.result, Verified):
            self._removed += [key for key in done.result.removed if not self._forget(key)]
        super()._arrived(done)

    def _forget(self, key: PageKey) -> bool:
        """Books a page out whose row is gone. False when that has to wait: a copy is on its way from or to it."""
        residency, node = self._pager.residency, self._pager.index.get(key)
        if node is None or not node.durable:
            return True
        if node.moves:
            return False
        residency.take(node, Tier.NVME)
        residency.settle(node)
        return True

    def _slices(self) -> Slices:
        pager, store = self._pager, self._pager.store
        self.findings += check.check_ledgers(pager)
        nodes = list(pager.index.nodes.values())
        for slice_ in _slices_of(nodes, BOOK_PAGES):
            yield True
            self.findings += check.check_pages(pager, [node for node in slice_ if node.alive])
        if store is None:
            return
        try:
            yield from self._stored(store, nodes)
        except StoreBroken as exc:
            pager.writeback.turn_off(str(exc))
        if not pager.writeback.on:
            self.findings.append(f"the disk tier is off, not all pages were read: {pager.writeback.off_reason}")

    def _stored(self, store: Store, nodes: list[Node]) -> Slices:
        """Every page of the store, and its rows against the books. Raises StoreBroken when the tier is off."""
        repair = self._repair
        self._require_on()
        self.findings += yield from self._by_mover(Link.DISK_READ, lambda: store.inspect(repair))
        record_bytes, after, count = self._pager.residency.stored_bytes, -1, READ_PAGES
        while count == READ_PAGES:
            self._require_on()
            num_bytes = min(max(self.total_pages - self.read_pages, 1), READ_PAGES) * record_bytes
            look = partial(store.verify_pages, after, READ_PAGES)
            found = yield from self._by_mover(Link.DISK_READ, partial(look, False), num_bytes)
            if repair and found.findings:
                self._require_on()
                found = yield from self._by_mover(Link.DISK_WRITE, partial(look, True))
            self.findings += found.findings
            self.read_pages += len(found.keys)
            self._unknown += [key for key in found.keys if self._is_unknown(key)]
            after, count = found.last_slot, len(found.keys)
        lost: list[PageKey] = []
        for slice_ in _slices_of([node.key for node in nodes if node.durable], ROW_KEYS):
            self._require_on()
            lost += yield from self._by_mover(Link.DISK_READ, partial(store.missing, slice_))
        yield from self._compare(store, lost)

    def _compare(self, store: Store, lost: list[PageKey]) -> Slices:
        """Tell of rows without a page in the books, and of pages in the books without a row."""
        removed, unknown = set(self._removed), self._unknown
        self._require_on()
        # After every write and removal that was on its way: by the one thread that does them, in order.
        gone = set((yield from self._by_mover(Link.DISK_WRITE, lambda: store.missing([*unknown, *lost]))))
        self._require_on()
        lost = [key for key in lost if key in gone and key not in removed and self._is_durable(key)]
        unknown = [key for key in unknown if key not in gone and self._is_unknown(key)]
        if unknown or lost:
            self.findings.append(f"the store has {len(unknown)} rows too many and {len(lost)} too few")
        if self._repair:
            yield from self._mend(store, [*self._removed, *lost], unknown)

    def _mend(self, store: Store, lost: list[PageKey], unknown: list[PageKey]) -> Slices:
        dropped_rows = self._pager.residency.dropped_rows
        dropped_rows.update(dict.fromkeys(unknown))
        while lost or any(key in dropped_rows for key in unknown):
            gone = yield from self._by_mover(Link.DISK_WRITE, partial(store.missing, lost))
            self._require_on()
            lost = [key for key in gone if not self._forget(key)]
            yield False
            self._require_on()
        yield from self._by_mover(Link.DISK_WRITE, lambda: None)  # behind the removals

    def _require_on(self) -> None:
        """Raises StoreBroken when the tier has gone off: the books know nothing of its pages any more."""
        if not self._pager.writeback.on:
            raise StoreBroken(self._pager.writeback.off_reason)

    def _is_durable(self, key: PageKey) -> bool:
        node = self._pager.index.get(key)
        return node is not None and node.durable

    def _is_unknown(self, key: PageKey) -> bool:
        """Whether the books neither have the page as durable nor know of a change of its row on its way."""
        node = self._pager.index.get(key)
        known = node is not None and (node.durable or node.writing or node.moves > 0)
        return not known and key not in self._pager.residency.dropped_rows


def _slices_of(items: Sequence[T], size: int) -> Iterator[list[T]]:
    found = iter(items)
    while slice_ := list(islice(found, size)):
        yield slice_

"""Where the pages of a lease are read: addresses in memory, and keys of those that every step streams."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tierd.tiers.errors import StagingLost
from tierd.tiers.lease import Addresses, Lease
from tierd.tiers.page import PageKey
from tierd.tiers.promote import Promoter
from tierd.tiers.residency import Residency


class PageTables:
    """Not thread-safe: only the pager's thread calls it."""

    def __init__(self, residency: Residency, promoter: Promoter) -> None:
        self._residency = residency
        self._promoter = promoter

    def refresh(self, lease: Lease) -> None:
        """Brings `lease.table` up to date; a page that is nowhere any more becomes a hole, see `Lease.skip`."""
        version = (self._residency.version, lease.changes)
        if lease.table_version == version:
            return
        device, host = self._residency.device, self._residency.host
        table = [
            device.address(node.device) if node.device >= 0 else host.address(node.host) if node.host >= 0 else 0
            for node in lease.nodes
        ]
        table += [device.address(slot) for slot in lease.private]
        for place, slot in lease.filling.items():
            table[place] = device.address(slot)
        lease.table = np.array(table, np.int64)
        lease.table_version = version
        lease.streamed = 0
        for place in np.flatnonzero(lease.table == 0).tolist():
            if place in lease.absent:
                continue
            if lease.nodes[place].durable:
                lease.streamed += 1
            else:
                self._promoter.hole(lease, place)

    def addresses(self, lease: Lease, stop: int, first: int = 0, lead: int = 0) -> Addresses:
        """Where pages `first` to `stop` of the sequence lie in memory, and before them the first `lead` ones once more;
        0 for a page that is to be streamed. int64[lead + stop - first]

        Valid until anything is moved, so for the step that is about to run.
        """
        self.refresh(lease)
        if not (first or lead or lease.dropped):
            return lease.table[:stop]
        return lease.table[_places(lease, stop, first, lead)]

    def streamed(self, lease: Lease, addresses: Addresses, first: int = 0, lead: int = 0) -> list[PageKey]:
        """The keys of the pages whose address is 0, in order. `addresses` are those of these `first` and `lead`."""
        missing = np.flatnonzero(addresses == 0)
        if not len(missing):
            return []
        places = _places(lease, first + len(addresses) - lead, first, lead)
        return [lease.nodes[place].key for place in places[missing].tolist()]

    def streamed_at(self, lease: Lease, places: Addresses) -> list[PageKey]:
        """The keys of those of these pages of its table, which is up to date, that are to be streamed, in order."""
        return [lease.nodes[place].key for place in places[lease.table[places] == 0].tolist()]

    def lose(self, lost: StagingLost, leases: Iterable[Lease]) -> None:
        """Books pages that could not be streamed: their leases get holes. Bad ones are gone from the store."""
        late = set(lost.keys) - lost.bad.keys()
        for key, error in lost.bad.items():
            node = self._residency.index.get(key)
            if node is not None and node.durable and not node.readable:
                self._residency.drop_row(node)
                self._promoter.misses[self._promoter.failed(node, error)] += 1
                self._residency.settle(node)
        for lease in leases:
            self.refresh(lease)
            for place, node in enumerate(lease.nodes):
                if node.key in late and not node.readable and place not in lease.absent:
                    self._promoter.hole(lease, place)
                    lease.changes += 1


def _places(lease: Lease, stop: int, first: int, lead: int) -> Addresses:
    """Where in `lease.table` pages are, see `PageTables.addresses`. For one that was dropped, or has not begun, it is
    the last one: nobody looks, and it is there."""
    pages = np.concatenate((np.arange(lead), np.arange(first, stop)))
    known, last = len(lease.nodes), lease.num_pages - 1
    places = np.where(pages < known, pages, pages - lease.dropped)
    places[(pages >= known) & (pages < known + lease.dropped)] = last
    return np.minimum(places, last)

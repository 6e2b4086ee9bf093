"""A bounded cache that several tenants share: what one of them keeps does not push out what the others use.

Pure bookkeeping. When it is full, the tenant who has the most gives up what it used the longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Fair(Generic[K, V]):
    """Values by key. Threading: one at a time.

    A key belongs to one tenant: whoever makes keys has to put the tenant into them. `cost` is in whatever unit
    `most` has. The newest value stays even if it alone costs more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._owners: dict[K, bytes] = {}
        self._kept: dict[bytes, OrderedDict[K, tuple[V, int]]] = {}  # the least recently used first; none is empty
        self._costs: dict[bytes, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, key: object) -> bool:
        return key in self._owners

    def peek(self, key: K) -> V | None:
        """The value with this key; that is no use of it."""
        owner = self._owners.get(key)
        return None if owner is None else self._kept[owner][key][0]

    def get(self, key: K) -> V | None:
        """The value with this key, used now."""
        owner = self._owners.get(key)
        if owner is None:
            return None
        self._kept[owner].move_to_end(key)
        return self._kept[owner][key][0]

    def put(self, key: K, value: V, owner: bytes, cost: int = 1) -> list[K]:
        """Keep a value, in the place of one with the same key; returns the keys that had to make room."""
        self.drop(key)
        self._owners[key] = owner
        self._kept.setdefault(owner, OrderedDict())[key] = (value, cost)
        self._count(owner, cost)
        gone: list[K] = []
        while self._total > self._most and len(self._owners) > 1:
            richest = max(self._costs, key=self._costs.__getitem__)
            oldest = next(iter(self._kept[richest]))
            if oldest == key:  # alone of its owner, and the newest: the next richest makes room
                others = self._costs.keys() - {richest}
                oldest = next(iter(self._kept[max(sorted(others), key=self._costs.__getitem__)]))
            self.drop(oldest)
            gone.append(oldest)
        return gone

    def drop(self, key: K) -> None:
        """Forget a value, if there is one."""
        owner = self._owners.pop(key, None)
        if owner is None:
            return
        _, cost = self._kept[owner].pop(key)
        self._count(owner, -cost)
        if not self._kept[owner]:
            del self._kept[owner], self._costs[owner]

    def clear(self) -> None:
        """Forget all."""
        self._owners.clear()
        self._kept.clear()
        self._costs.clear()
        self._total = 0

    def _count(self, owner: bytes, cost: int) -> None:
        self._costs[owner] = self._costs.get(owner, 0) + cost
        self._total += cost

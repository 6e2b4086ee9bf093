"""Pages that turned out to hold no numbers: forgotten in all tiers, with all that go on from them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tierd.tiers.keys import TOKEN_BYTES
from tierd.tiers.prefix import Node
from tierd.tiers.residency import Residency

log = logging.getLogger(__name__)


class Distrust:
    """Threading: the step thread alone calls it. What a request or a copy still needs goes when that has ended."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._left: list[Node] = []

    def add(self, nodes: Sequence[Node]) -> None:
        """These pages are to be computed anew by whoever wants them next; so are those that go on from them, and those
        that begin with a token of theirs after the same text, for a page may have been copied as far as that goes.
        """
        if not nodes:
            return
        found: list[Node] = []
        seen, waiting = set(), list(nodes)
        while waiting:
            node = waiting.pop()
            if node.key not in seen:
                seen.add(node.key)
                found.append(node)
                index, first = self._residency.index, node.packed[:TOKEN_BYTES]
                waiting += index.children(node.key)
                waiting += (each for each in index.children(node.parent) if each.packed[:TOKEN_BYTES] == first)
        self._left += found
        log.error("the model gave no numbers: %d pages that it computed are forgotten", len(found))

    def work(self) -> None:
        """Forgets what nobody needs any more. To be called now and then."""
        if not self._left:
            return
        left: list[Node] = []
        for node in reversed(self._left):
            if not node.alive:
                continue
            if self._residency.is_idle(node):
                self._residency.forget(node)
            else:
                left.append(node)
        self._left = left[::-1]

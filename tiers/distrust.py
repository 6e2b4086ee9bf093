"""Pages that turned out to hold no numbers: forgotten in all tiers, with all that go on from them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tierd.tiers.prefix import Node
from tierd.tiers.residency import Residency

log = logging.getLogger(__name__)


class Distrust:
    """Threading: the step thread alone calls it. What a request or a copy still needs goes when that has ended."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._left: list[Node] = []

    def add(self, nodes: Sequence[Node]) -> None:
        """These pages, and those that go on from them, are to be computed anew by whoever wants them. Pins stay."""
        if not nodes:
            return
        found: list[Node] = []
        seen, waiting = set(), list(nodes)
        while waiting:
            node = waiting.pop()
            if node.key not in seen:
                seen.add(node.key)
                found.append(node)
                waiting += self._residency.index.children(node.key)
        known = {node.key for node in self._left}
        self._left += (node for node in found if node.key not in known and not node.kept)
        log.error("the model gave no numbers: %d pages of a text, and of those that go on from it, go", len(found))

    def work(self) -> None:
        """Forgets what nobody needs any more. To be called now and then."""
        if not self._left:
            return
        left: list[Node] = []
        for node in reversed(self._left):
            if not node.alive or node.kept:
                continue
            if self._residency.is_idle(node):
                self._residency.forget(node)
            else:
                left.append(node)
        self._left = left[::-1]

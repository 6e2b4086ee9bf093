"""Known prefixes as a person sees them: the tree of pages, each run without a branch one line; pinned and dropped.

And kept for a while, as requests ask for it: such a pin ends by itself, and makes room for one by hand.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tierd.tiers import pins_file
from tierd.tiers.errors import PrefixInUse, PrefixNotDurable, PrefixUnknown, TierFull
from tierd.tiers.journal import What
from tierd.tiers.keeps import Keeps
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import Node
from tierd.tiers.prefix_info import PrefixInfo, Run, Way, told

if TYPE_CHECKING:
    from tierd.tiers.pager import Pager
    from tierd.tiers.shares import Share

MIN_ID_DIGITS = 4
_KEPT_SHARE = 0.5  # of the largest tier: the other half is for work


class Prefixes:
    """Lists, pins, drops, persists and evicts. Not thread-safe: only the pager's thread calls it.

    Pins are kept in a file of the store's directory, by the keys of the last pages. After a restart they hold for the
    pages that the store has.

    Args:
        pager: whose pages.
        file: where pins are kept; None to keep them for the life of the process.
        wall: seconds since 1970.
    """

    def __init__(self, pager: Pager, file: Path | None, wall: Callable[[], float] = time.time) -> None:
        self.gave_up = 0  # pages that somebody wanted kept, and that had to be let go
        self._pager = pager
        self._file = file
        self._wall = wall
        self._pinned, until_s = pins_file.read(file)
        self._keeps = Keeps(until_s, wall())
        self._kept_pages = 0
        self._mark()

    def listing(self, limit: int) -> tuple[list[PrefixInfo], int]:
        """The prefixes used last, the newest first, and how many there are in all."""
        found: list[tuple[float, PrefixInfo]] = []
        now_s, by_hand = self._pager.page_time(), self._kept_for(self._pinned)
        ways: list[Way] = []
        for run in self.runs():
            info = told(run.nodes, ways[run.parent] if run.parent >= 0 else Way(), now_s, by_hand)
            found.append((run.nodes[-1].last_use_s, info))
            ways.append(Way(info.id, info.tokens, info.pages, info.device, info.host, info.nvme))
        found.sort(key=lambda item: item[0], reverse=True)
        return [info for _, info in found[:limit]], len(found)

    def runs(self) -> Iterator[Run]:
        """All known prefixes, each after the one that it goes on from: a walk over all pages.

        Pages may come and go between two of them: it misses what is new behind it, and what is gone before it.
        """
        stack = [(node, -1) for node in self._pager.index.first_pages()]
        place = 0
        while stack:
            node, parent = stack.pop()
            if not node.alive:
                continue
            run = Run(self._run(node), parent)
            stack += [(child, place) for child in self._pager.index.children(run.nodes[-1].key)]
            place += 1
            yield run

    def pin(self, prefix: str) -> int:
        """Keeps every page up to this one: the last copy of none of them is evicted. Returns how many pages.

        Raises PrefixUnknown; TierFull when too little would be left for work.
        """
        self._forget_gone()
        node = self._find(prefix)
        self._mark()
        way = self._way(node)
        pager, room = self._pager, self._room()
        more = sum(not known.kept for known in way)
        while self._kept_pages + more > room and (soonest := self._keeps.soonest()) is not None:
            self._keeps.drop({soonest})
            self._mark()
            more = sum(not known.kept for known in way)
        if self._kept_pages + more > room:
            raise TierFull(
                f"{self._kept_pages} pages are pinned and {more} more would be more than half of the {2 * room} pages "
                "of the largest tier"
            )
        self._pinned.add(node.key)
        self._mark()
        self._save()
        for known in way:
            if not known.durable:
                pager.writeback.add(known)
        self._tell(f"a prefix of {len(way)} pages was pinned", node)
        return len(way)

    def keep(self, node: Node, ttl_s: float) -> bool:
        """Keeps every page up to this one for so long, or longer if that was wished before.

        A wish, no order: when pins leave too little room for work, nothing happens. True when it holds.
        """
        if not node.alive:
            return False
        way = list(itertools.takewhile(lambda known: not known.kept, self._upwards(node)))
        if self._kept_pages + len(way) > self._room() or ttl_s <= 0.0 or _is_over(node.share, len(way)):
            return False
        gained, displaced = self._keeps.add(node.key, ttl_s, self._wall())
        if gained:
            for known in way:
                known.kept = True
                self._pager.residency.settle(known)
                if not known.durable:
                    self._pager.writeback.add(known)
            self._kept_pages += len(way)
            if displaced is not None:
                self._let_go(displaced)
            self._save()
        return True

    def expire(self) -> None:
        """Ends the wishes whose time is over. Cheap when there is none."""
        if self._keeps.expire(self._wall()):
            self._mark()
            self._save()

    def give_up(self) -> int:
        """Ends the pins and wishes of what only memory has; how many of their pages. Where nobody could go on else.

        Such pages were to live on a disk that is full, or off, and hold memory that was meant for work.
        """
        lost = sum(node.kept and not node.durable for node in self._pager.index.nodes.values())
        if lost:
            self._end([key for key in (*self._pinned, *self._keeps) if not self._is_durable(key)])
            self.gave_up += lost
            self._tell(f"{lost} pages that were to be kept may go: nobody could go on else", None)
        return lost

    def clear(self) -> int:
        """Ends every pin and every wish, those of pages too that nobody knows now; returns how many pins."""
        pins = len(self._pinned)
        self._end([*self._pinned, *self._keeps])
        return pins

    def unpin(self, prefix: str) -> int:
        """Lets go of a prefix that was pinned, and of pinned ones that go on from it; returns how many pages.

        Raises PrefixUnknown when it is not known or no such prefix is pinned.
        """
        self._forget_gone()
        node = self._find(prefix)
        below = {known.key for known in self._subtree(node)}
        released = self._pinned & below
        if not self._keeps.drop(below) and not released:
            raise PrefixUnknown(f"prefix {prefix} is not pinned")
        before = sum(known.kept for known in self._pager.index.nodes.values())
        self._pinned -= released
        self._mark()
        self._save()
        self._tell(f"a prefix was unpinned: {before - self._kept_pages} pages may go", node)
        return before - self._kept_pages

    def drop(self, prefix: str) -> int:
        """Forgets a run of pages in all tiers, and all that goes on from it; returns how many pages.

        What is before its branch stays, for other prefixes go on from there. Raises PrefixUnknown, and PrefixInUse when
        a running request needs one of the pages or one is being moved.
        """
        self._forget_gone()
        node = self._find(prefix)
        if self._keeps.drop({known.key for known in self._subtree(node)}):
            self._mark()
            self._save()
        nodes = self._whole(node)
        if any(known.kept for known in nodes):
            raise PrefixInUse(f"prefix {prefix}, or one that goes on from it, is pinned")
        self._require_idle(prefix, nodes)
        for known in reversed(nodes):
            self._pager.residency.forget(known)
        self._forget_gone()
        self._tell(f"a prefix of {len(nodes)} pages was dropped", None)
        return len(nodes)

    def way(self, prefix: str) -> list[Node]:
        """The pages up to this one, the last one first. A look at every page: raises PrefixUnknown."""
        return self._way(self._find(prefix))

    def persist(self, way: list[Node], *, anew: bool = False) -> int:
        """Has the pages of a way written before all others; returns how many are not durable yet.

        They are written whatever they are worth, within the budget of the day. To be asked again until it is 0; `anew`
        at first, for a disk that was full may have room now. Raises
        PrefixUnknown when they are forgotten, and PrefixNotDurable when nothing can be written now.
        """
        if not all(known.alive for known in way):
            raise PrefixUnknown("the prefix was forgotten: there was no room for it")
        writeback = self._pager.writeback
        missing = [known for known in way if not known.durable]
        if missing and not writeback.on:
            remedy = "load the model anew: `tierd unload MODEL`, then ask" if writeback.off_reason else "see --nvme-mem"
            raise PrefixNotDurable(f"the disk tier is off: {writeback.off_reason or 'there is none'}", remedy)
        if missing and anew:
            writeback.try_anew()
        writeback.admission.asked &= writeback.dirty.keys()  # what was asked for earlier and is gone since
        writeback.admission.asked.update(known.key for known in missing)
        for known in missing:  # the first page comes last here, and first in the queue
            if known.readable and not writeback.hurry(known):
                why, remedy = "may be written no more today", "see --nvme-daily-writes; a new day begins at 0:00 UTC"
                if writeback.paused:
                    why, remedy = "is full", "make room on the disk, or see --nvme-mem and --nvme-min-free"
                raise PrefixNotDurable(f"the disk tier {why}: {len(missing)} of its pages are not on disk", remedy)
        return len(missing)

    def evict(self, prefix: str) -> int:
        """Drops the copies in memory of a run of pages and of all that goes on from it; returns how many pages.

        They stay known, and come back from disk when they are needed. Raises PrefixUnknown, PrefixInUse, and
        PrefixNotDurable when one of them lies in memory alone: nothing has left it then.
        """
        nodes = self._whole(self._find(prefix))
        self._require_idle(prefix, nodes)
        if alone := sum(not known.durable for known in nodes):
            what = f"{alone} of the {len(nodes)} pages of prefix {prefix} are not on disk"
            raise PrefixNotDurable(what, "`tierd prefix persist` writes them")
        count = sum(known.readable for known in nodes)
        for known in reversed(nodes):
            for tier in (Tier.HOST, Tier.DEVICE):
                if known.is_in(tier):
                    self._pager.residency.evict(known, tier)
        self._tell(f"a prefix was evicted from memory: {count} pages stay on disk", nodes[0])
        return count

    def _whole(self, node: Node) -> list[Node]:
        """The run of a page, back to the branch it begins at, and all that goes on from it."""
        while (
            (parent := self._pager.index.get(node.parent)) is not None
            and len(self._children(parent)) == 1
            and parent.kept == node.kept
        ):
            node = parent
        return self._subtree(node)

    def _require_idle(self, prefix: str, nodes: list[Node]) -> None:
        if busy := sum(not self._pager.residency.is_idle(known) for known in nodes):
            raise PrefixInUse(f"{busy} of the {len(nodes)} pages of prefix {prefix} are in use")

    def _tell(self, text: str, node: Node | None) -> None:
        self._pager.residency.journal.tell(What.PREFIX, text, node)

    def _run(self, node: Node) -> list[Node]:
        """The pages from this one to the next branch or end. A branch, too, is where a pin ends."""
        run, children = [node], self._pager.index.children
        while len(after := children(node.key)) == 1:
            (child,) = after
            if child.kept != node.kept or node.key in self._pinned:
                break
            node = child
            run.append(node)
        return run

    def _children(self, node: Node) -> list[Node]:
        return list(self._pager.index.children(node.key))

    def _way(self, node: Node) -> list[Node]:
        return list(self._upwards(node))

    def _upwards(self, node: Node) -> Iterator[Node]:
        """This page, the one before it, and so on to the first."""
        found: Node | None = node
        while found is not None:
            yield found
            found = self._pager.index.get(found.parent)

    def _room(self) -> int:
        """Pages that may be kept."""
        pager = self._pager
        return int(max(pager.device.slots, pager.host.slots, pager.residency.store_slots) * _KEPT_SHARE)

    def _subtree(self, node: Node) -> list[Node]:
        """This page and all that go on from it; each after the one before it."""
        nodes = [node]
        for known in nodes:
            nodes += self._children(known)
        return nodes

    def _find(self, prefix: str) -> Node:
        wanted = prefix.lower()
        if len(wanted) < MIN_ID_DIGITS or not all(digit in "0123456789abcdef" for digit in wanted):
            raise PrefixUnknown(f"{prefix!r} is no id of a prefix: at least {MIN_ID_DIGITS} hexadecimal digits")
        start = bytes.fromhex(wanted[: len(wanted) // 2 * 2])
        nodes = self._pager.index.nodes.items()
        found = [node for key, node in nodes if key.startswith(start) and key.hex().startswith(wanted)]
        if not found:
            raise PrefixUnknown(f"no prefix {prefix} is known")
        if len(found) > 1:
            raise PrefixUnknown(f"{len(found)} pages have an id that begins with {prefix}; give more digits")
        return found[0]

    def _mark(self) -> None:
        """Sets `kept` of every page anew."""
        kept = self._kept_for((*self._pinned, *self._keeps))
        self._kept_pages = len(kept)
        for node in self._pager.index.nodes.values():
            if node.kept != (node.key in kept):
                node.kept = not node.kept
                self._pager.residency.settle(node)

    def _kept_for(self, ends: Collection[PageKey]) -> set[PageKey]:
        """The pages on the ways to these."""
        return {known.key for key in ends if (node := self._pager.index.get(key)) for known in self._upwards(node)}

    def _end(self, keys: list[PageKey]) -> None:
        """Forgets pins and wishes."""
        self._pinned.difference_update(keys)
        self._keeps.drop(set(keys))
        self._mark()
        self._save()

    def _is_durable(self, key: PageKey) -> bool:
        node = self._pager.index.get(key)
        return node is None or all(known.durable for known in self._upwards(node))

    def _let_go(self, key: PageKey) -> None:
        """A wish has gone: its pages are kept on as far as another one, or a pin, needs them."""
        node = self._pager.index.get(key)
        if node is None:
            self._mark()  # its last page is lost: which of those before it are still needed, nothing tells
        while node is not None and node.kept and not self._is_needed(node):
            node.kept = False
            self._kept_pages -= 1
            self._pager.residency.settle(node)
            node = self._pager.index.get(node.parent)

    def _is_needed(self, node: Node) -> bool:
        ends_here = node.key in self._pinned or node.key in self._keeps
        return ends_here or any(child.kept for child in self._pager.index.children(node.key))

    def _forget_gone(self) -> None:
        """Pins of pages that are not known any more: the store was cleared, or lost them."""
        gone = {key for key in (*self._pinned, *self._keeps) if self._pager.index.get(key) is None}
        if gone:
            self._pinned -= gone
            self._keeps.drop(gone)
            self._mark()
            self._save()

    def _save(self) -> None:
        pins_file.write(self._file, self._pinned, self._keeps.until_s())


def _is_over(share: Share | None, more: int) -> bool:
    """Whether so many more kept pages are too much of what a tenant may have."""
    if share is None:
        return False
    return sum(node.kept for node in share.nodes.values()) + more > share.quota_pages * _KEPT_SHARE

"""Known prefixes as a person sees them: the tree of pages, each run without a branch one line; pinned and dropped."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierd.tiers.errors import PrefixInUse, PrefixUnknown, TierFull
from tierd.tiers.keys import unpack_tokens
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import Node

if TYPE_CHECKING:
    from tierd.tiers.pager import Pager

FILE_NAME = "pinned.json"  # in the directory of a store
MIN_ID_DIGITS = 4
PREVIEW_TOKENS = 64
_KEPT_SHARE = 0.5  # of the largest tier: the other half is for work


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """One run of pages, up to a branch or an end. Tokens, pages and tiers are those of the whole way from the start.

    Attributes:
        id: hex; what `pin`, `unpin` and `drop` take, also shortened.
        parent: id of the run before it, "" for the first.
        tokens: from the start of the sequence to the end of this run.
        own_tokens: of this run.
        pages: on the whole way.
        device, host, nvme: pages of the whole way with a copy there.
        hits: of the last page: how often it was used since it was computed.
        idle_s: since its last use.
        pinned: the user wants all of the way kept.
        in_use: a running request has its last page.
        head: the first tokens of this run, at most `PREVIEW_TOKENS`.
    """

    id: str
    parent: str
    tokens: int
    own_tokens: int
    pages: int
    device: int
    host: int
    nvme: int
    hits: int
    idle_s: float
    pinned: bool
    in_use: bool
    head: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Pages without a branch. `parent`: place of the run before it in the list, -1 for the first of a sequence."""

    nodes: list[Node]
    parent: int


@dataclass(slots=True)
class _Way:
    """What lies between the start and a run."""

    parent: str = ""
    tokens: int = 0
    pages: int = 0
    device: int = 0
    host: int = 0
    nvme: int = 0


class Prefixes:
    """Lists, pins and drops. Not thread-safe: only the pager's thread calls it.

    Pins are kept in a file of the store's directory, by the keys of the last pages. After a restart they hold for the
    pages that the store has.

    Args:
        pager: whose pages.
        file: where pins are kept; None to keep them for the life of the process.
    """

    def __init__(self, pager: Pager, file: Path | None) -> None:
        self._pager = pager
        self._file = file
        self._pinned: set[PageKey] = _read(file)
        self._mark()

    def listing(self, limit: int) -> tuple[list[PrefixInfo], int]:
        """The prefixes used last, the newest first, and how many there are in all."""
        found: list[tuple[float, PrefixInfo]] = []
        now_s = self._pager.page_time()
        ways: list[_Way] = []
        for run in self.runs():
            info = self._info(run.nodes, ways[run.parent] if run.parent >= 0 else _Way(), now_s)
            found.append((run.nodes[-1].last_use_s, info))
            ways.append(_Way(info.id, info.tokens, info.pages, info.device, info.host, info.nvme))
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
        way = self._way(node)
        kept = sum(known.kept for known in self._pager.index.nodes.values())
        more = sum(not known.kept for known in way)
        pager = self._pager
        largest = max(pager.device.slots, pager.host.slots, pager.residency.store_slots)
        if kept + more > largest * _KEPT_SHARE:
            raise TierFull(
                f"{kept} pages are pinned and {more} more would be more than half of the {largest} pages of the "
                "largest tier"
            )
        self._pinned.add(node.key)
        self._mark()
        self._write()
        for known in way:
            if not known.durable:
                pager.writeback.add(known)
        return len(way)

    def unpin(self, prefix: str) -> int:
        """Lets go of a prefix that was pinned, and of pinned ones that go on from it; returns how many pages.

        Raises PrefixUnknown when it is not known or no such prefix is pinned.
        """
        self._forget_gone()
        node = self._find(prefix)
        below = {known.key for known in self._subtree(node)}
        released = self._pinned & below
        if not released:
            raise PrefixUnknown(f"prefix {prefix} is not pinned")
        before = sum(known.kept for known in self._pager.index.nodes.values())
        self._pinned -= released
        self._mark()
        self._write()
        return before - sum(known.kept for known in self._pager.index.nodes.values())

    def drop(self, prefix: str) -> int:
        """Forgets a run of pages in all tiers, and all that goes on from it; returns how many pages.

        What is before its branch stays, for other prefixes go on from there. Raises PrefixUnknown, and PrefixInUse when
        a running request needs one of the pages or one is being moved.
        """
        self._forget_gone()
        node = self._find(prefix)
        start = node
        while (
            (parent := self._pager.index.get(start.parent)) is not None
            and len(self._children(parent)) == 1
            and parent.kept == node.kept
        ):
            start = parent
        nodes = self._subtree(start)
        residency = self._pager.residency
        if any(known.kept for known in nodes):
            raise PrefixInUse(f"prefix {prefix}, or one that goes on from it, is pinned")
        busy = sum(not residency.is_idle(known) for known in nodes)
        if busy:
            raise PrefixInUse(f"{busy} of the {len(nodes)} pages of prefix {prefix} are in use")
        for known in reversed(nodes):
            residency.forget(known)
        self._forget_gone()
        return len(nodes)

    def _info(self, run: list[Node], way: _Way, now_s: float) -> PrefixInfo:
        last = run[-1]
        head: list[int] = []
        for node in run:
            if len(head) >= PREVIEW_TOKENS:
                break
            head += unpack_tokens(node.packed)
        own_tokens = sum(node.num_tokens for node in run)
        counts = [sum(node.is_in(tier) for node in run) for tier in Tier]
        return PrefixInfo(
            id=last.key.hex(),
            parent=way.parent,
            tokens=way.tokens + own_tokens,
            own_tokens=own_tokens,
            pages=way.pages + len(run),
            device=way.device + counts[Tier.DEVICE],
            host=way.host + counts[Tier.HOST],
            nvme=way.nvme + counts[Tier.NVME],
            hits=last.hits,
            idle_s=round(max(0.0, now_s - last.last_use_s), 1),
            pinned=last.kept,
            in_use=last.pins > 0,
            head=tuple(head[:PREVIEW_TOKENS]),
        )

    def _run(self, node: Node) -> list[Node]:
        """The pages from this one to the next branch or end. A branch, too, is where being pinned ends."""
        run, children = [node], self._pager.index.children
        while len(after := children(node.key)) == 1:
            (child,) = after
            if child.kept != node.kept:
                break
            node = child
            run.append(node)
        return run

    def _children(self, node: Node) -> list[Node]:
        return list(self._pager.index.children(node.key))

    def _way(self, node: Node) -> list[Node]:
        way = [node]
        while (parent := self._pager.index.get(way[-1].parent)) is not None:
            way.append(parent)
        return way

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
        found = [node for key, node in self._pager.index.nodes.items() if key.hex().startswith(wanted)]
        if not found:
            raise PrefixUnknown(f"no prefix {prefix} is known")
        if len(found) > 1:
            raise PrefixUnknown(f"{len(found)} pages have an id that begins with {prefix}; give more digits")
        return found[0]

    def _mark(self) -> None:
        """Sets `kept` of every page anew."""
        kept = {known.key for key in self._pinned if (node := self._pager.index.get(key)) for known in self._way(node)}
        for node in self._pager.index.nodes.values():
            if node.kept != (node.key in kept):
                node.kept = not node.kept
                self._pager.residency.settle(node)

    def _forget_gone(self) -> None:
        """Pins of pages that are not known any more: the store was cleared, or lost them."""
        gone = {key for key in self._pinned if self._pager.index.get(key) is None}
        if gone:
            self._pinned -= gone
            self._mark()
            self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # the pins hold until the process ends
            temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(sorted(key.hex() for key in self._pinned), file)
            os.replace(temporary, self._file)


def _read(file: Path | None) -> set[PageKey]:
    """The keys in a file; none when it is not there or damaged."""
    if file is None:
        return set()
    try:
        found = json.loads(file.read_bytes())
        return {PageKey(key) for key in map(bytes.fromhex, _texts(found)) if len(key) == 16}
    except (OSError, ValueError):
        return set()


def _texts(found: object) -> Iterable[str]:
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError("not a list of keys")
    return found

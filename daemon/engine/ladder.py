"""The precision ladder: beside packed pages, exact copies of a sequence's first tokens and of those of its last block.

A row sees 0 .. first - 1 and its own block exact, and all else packed (`kernels.rows.Ladder`): that follows from its
position alone. Where a block begins, everything before it is packed; so whoever goes on with a known prefix needs exact
copies of its first tokens and of those from the last block on. Copies that memory still holds are found by the keys of
their pages. The others are *made up*: the rows are computed once more, for nothing but their copies. They are rows like
those of a prompt: the scheduler says how many of them a step has, and until all are made up the request waits.

Threading: step thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierd.daemon.engine.batch import Addresses
from tierd.daemon.errors import BadRequest, Unsupported
from tierd.daemon.kv_mode import KvMode
from tierd.kernels.rows import COPY_FORMAT, Ladder
from tierd.tiers.exact import Copy, ExactPages
from tierd.tiers.keys import pack_tokens, page_key
from tierd.tiers.lease import Lease
from tierd.tiers.page import PageKey

Span = tuple[int, int]  # first token, and the one behind the last
Marks = NDArray[np.bool_]  # [tokens of a prompt]


@dataclass(slots=True)
class Rungs:
    """The copies of one request.

    Attributes:
        ladder: which of its tokens have one.
        copies: by page.
        places: where they lie, by page; 0 for a page without one. At least as long as the last copy's number says.
        tail: the page that begins with tokens of another one, and that one's key.
        missing: tokens whose copies are to be made up before its next row.
        found: marks tokens of its prompt whose pages were there, or came from somebody else, once it is accepted.
        computed: those that it has computed, for their pages or for copies alone.
    """

    ladder: Ladder
    found: Marks
    computed: Marks
    copies: dict[int, Copy] = field(default_factory=dict)
    places: Addresses = field(default_factory=lambda: np.zeros(0, np.int64))
    tail: tuple[int, PageKey] | None = None
    missing: Sequence[Span] = ()

    @classmethod
    def of(cls, ladder: Ladder, prompt_tokens: int) -> Rungs:
        """Those of a request that has not begun."""
        return cls(ladder, np.zeros(prompt_tokens, np.bool_), np.zeros(prompt_tokens, np.bool_))

    def __str__(self) -> str:
        return str(KvMode(exact_first=self.ladder.first, exact_last=self.ladder.last))

    @property
    def lacks(self) -> int:
        """Rows to be made up before its next one."""
        return sum(stop - first for first, stop in self.missing)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed, and need not be: neither for their pages nor for copies."""
        left = self.found & ~self.computed
        for first, stop in self.missing:
            left[first:stop] = False
        return int(np.count_nonzero(left))

    def find(self, lease: Lease) -> int:
        """Marks what a ready lease spares. Returns how many tokens, whether they were computed here or not."""
        end, wanted = lease.page_tokens * len(lease.origins), len(self.found)
        there = np.array([origin is not None for origin in lease.origins], np.bool_)
        self.found[:] = False
        self.found[:end] = np.repeat(there, lease.page_tokens)[:wanted]
        self.found[end : end + lease.tail_tokens] = True
        return int(np.count_nonzero(self.found))

    def put(self, page: int, copy: Copy, address: int) -> None:
        """Adds the copy of a page."""
        if page >= len(self.places):
            self.places = np.concatenate((self.places, np.zeros(page + 1, np.int64)))
        self.copies[page], self.places[page] = copy, address

    def pop(self, page: int) -> Copy:
        """Takes it away."""
        self.places[page] = 0
        return self.copies.pop(page)


class Ladders:
    """The copies of all requests of an engine.

    Args:
        pages: where they lie.
        most: the ladder that `pages` was made for: no request may have a longer one.
        nowhere: a page's address that may be written to, for rows that are made up: nobody reads it.
        page_tokens: of a page.
    """

    def __init__(self, pages: ExactPages, most: Ladder, nowhere: int, page_tokens: int) -> None:
        self.pages = pages
        self.most = most
        self.made_up_rows = 0  # since the start
        self._nowhere = nowhere
        self._size = page_tokens

    def statistics(self) -> dict[str, int]:
        """What the copies take, and what was computed for nothing but them since the start."""
        return self.pages.statistics()._asdict() | {"made_up_rows": self.made_up_rows}

    def open(self, rungs: Rungs, lease: Lease) -> None:
        """Takes the copies of what a new lease has found, before others need their place."""
        rungs.tail = None
        if lease.tail is not None and lease.tail.source is not None:
            rungs.tail = len(lease.nodes), lease.tail.source.key
        self.prepare(rungs, lease, len(lease.nodes) * self._size + lease.tail_tokens)

    def prepare(self, rungs: Rungs, lease: Lease, start: int) -> None:
        """Takes the copies of all tokens before `start` that rows from there on see exact, and gives the others back.

        Afterwards `rungs.missing` are the tokens whose copies have to be made up.
        """
        ladder, size = rungs.ladder, self._size
        block = ladder.block(start)
        spans = [(0, min(ladder.first, block)), (block, start)]  # apart, or one behind the other
        pages = {page for first, stop in spans for page in range(first // size, -(-stop // size))}
        self._drop(rungs, [page for page in rungs.copies if page not in pages])
        missing: list[Span] = []
        for first, stop in spans:
            for page in range(first // size, -(-stop // size)):
                if not self._has(rungs, lease, page, min(stop - page * size, size)):
                    begun = self._begun(rungs, page)
                    missing.append((page * size + begun, stop))
                    self._renew(rungs, range(page + (begun > 0), -(-stop // size)))
                    break
        rungs.missing = missing

    def cover(self, rungs: Rungs, start: int, stop: int) -> None:
        """Makes copies for rows from `start` to `stop`, where there are none yet."""
        for page in range(start // self._size, -(-stop // self._size)):
            if page not in rungs.copies:
                self._put(rungs, page, self.pages.make())
            copy = rungs.copies[page]
            copy.tokens = max(copy.tokens, min(stop - page * self._size, self._size))

    def make_up(
        self, rungs: Rungs, lease: Lease, spans: Iterable[Span]
    ) -> Iterator[tuple[int, int, Addresses, Addresses]]:
        """The rows that make up some of what is missing, in its order, each with its pages and the copies of those."""
        for first, stop in spans:
            self.cover(rungs, first, stop)
            for start, end in blocks(rungs.ladder, first, stop, stop - first):
                where = lease.table[: -(-end // self._size)]
                yield start, end, *self.table(rungs, where, start, len(where))

    def made_up(self, rungs: Rungs, spans: Sequence[Span]) -> None:
        """Books what a step has made up: the first of what is missing."""
        count = sum(stop - first for first, stop in spans)
        self.made_up_rows += count
        rungs.missing = behind(rungs.missing, count)

    def table(self, rungs: Rungs, pages: Addresses, start: int, unwritten: int) -> tuple[Addresses, Addresses]:
        """For rows from `start` on, of one block: their pages, and the copies of those. Of the first `unwritten` pages
        that have a copy nothing is read, and nothing is to be written to them."""
        count, size, ladder = len(pages), self._size, rungs.ladder
        exact, pages = np.zeros(count, np.int64), pages.copy()
        known = rungs.places[:count]
        exact[: len(known)] = known
        exact[ladder.first // size : ladder.block(start) // size] = 0
        pages[:unwritten][exact[:unwritten] != 0] = self._nowhere
        return pages, exact

    def trust(self, rungs: Rungs, computed: int, made_up: Iterable[Span] = ()) -> None:
        """Of what was written, only tokens before `computed` count: the rest were drafts that were wrong, or a step
        that was void. `made_up`: tokens before `computed` that do not count either."""
        for first, stop in made_up:
            for page in range(first // self._size, -(-stop // self._size)):
                copy = rungs.copies[page]
                copy.tokens = min(copy.tokens, max(first - page * self._size, 0))
        for page, copy in rungs.copies.items():
            if copy.key is None:
                copy.tokens = min(copy.tokens, max(computed - page * self._size, 0))
        self._drop(rungs, [page for page, copy in rungs.copies.items() if not copy.tokens])

    def settle(self, rungs: Rungs, lease: Lease, computed: int) -> None:
        """Makes the copies of whole pages known, and gives back those that no row from `computed` on sees. (Those
        behind it stay: drafts may be right.)"""
        for page, copy in rungs.copies.items():
            if page < len(lease.nodes) and (page + 1) * self._size <= computed and copy.tokens == self._size:
                self.pages.name(copy, lease.nodes[page].key, self._size)
        first, block = rungs.ladder.first // self._size, rungs.ladder.block(computed) // self._size
        self._drop(rungs, [page for page in rungs.copies if first <= page < block])

    def close(self, rungs: Rungs, lease: Lease, known: list[int]) -> None:
        """Gives all copies back; that of a page that is not full stays known as well. `known`: computed tokens."""
        self.settle(rungs, lease, len(known))
        page = len(known) // self._size
        copy, rest = rungs.copies.get(page), known[page * self._size :]
        has_rest = copy is not None and 0 < len(rest) <= copy.tokens
        if copy is not None and has_rest and len(lease.nodes) == page and not lease.unkeyed:
            parent = lease.nodes[-1].key if lease.nodes else lease.root
            self.pages.name(copy, page_key(parent, pack_tokens(rest)), len(rest))
        self._drop(rungs, list(rungs.copies))
        rungs.missing = ()

    def _has(self, rungs: Rungs, lease: Lease, page: int, tokens: int) -> bool:
        """Whether the copy of a page holds so many tokens; it is taken, if there is one."""
        held = rungs.copies.get(page)
        if held is not None and held.tokens >= tokens:
            return True
        if tokens == self._size and page < len(lease.nodes):
            found = self.pages.find(lease.nodes[page].key, tokens)
            if found is None:
                return False
            if held is not None:  # the page was taken over from somebody who has filled it
                self.pages.drop(held)
            self._put(rungs, page, found)
            return True
        if held is not None or rungs.tail is None or rungs.tail[0] != page or tokens > lease.tail_tokens:
            return False  # behind what both texts share the other one's copy is of its own
        if (source := self.pages.find(rungs.tail[1], tokens)) is None:
            return False
        own = self.pages.make(source)  # others may write what follows into theirs
        own.tokens = tokens  # behind them the other page has its own
        self._put(rungs, page, own)
        self.pages.drop(source)
        return True

    def _begun(self, rungs: Rungs, page: int) -> int:
        """How many tokens the copy of a page holds that is being written, where there is one."""
        held = rungs.copies.get(page)
        return held.tokens if held is not None and held.key is None else 0

    def _renew(self, rungs: Rungs, pages: Iterable[int]) -> None:
        """Copies of its own for pages whose rows are made up."""
        for page in pages:
            if page in rungs.copies:
                self.pages.drop(rungs.pop(page))
            self._put(rungs, page, self.pages.make())

    def _put(self, rungs: Rungs, page: int, copy: Copy) -> None:
        rungs.put(page, copy, self.pages.address(copy))

    def _drop(self, rungs: Rungs, pages: Iterable[int]) -> None:
        for page in pages:
            self.pages.drop(rungs.pop(page))


def before(spans: Iterable[Span], count: int) -> list[Span]:
    """The first `count` tokens of some spans."""
    found: list[Span] = []
    for first, stop in spans:
        if count > 0:
            found.append((first, min(stop, first + count)))
        count -= stop - first
    return found


def behind(spans: Iterable[Span], count: int) -> list[Span]:
    """What is left of some spans without their first `count` tokens."""
    found: list[Span] = []
    for first, stop in spans:
        if count < stop - first:
            found.append((first + max(count, 0), stop))
        count -= stop - first
    return found


def blocks(ladder: Ladder, start: int, stop: int, most: int) -> Iterator[Span]:
    """The tokens `start` to `stop`, block by block, and at most so many at a time."""
    while start < stop:
        end = min(stop, ladder.block(start) + ladder.last, start + most)
        yield start, end
        start = end


def checked(mode: KvMode, most: Ladder | None, beam_width: int) -> Ladder:
    """The ladder that a request names. Raises BadRequest where it can't be; `most`: that there is memory for."""
    ladder = Ladder(mode.exact_first, mode.exact_last)
    if beam_width:
        raise Unsupported("beam search keeps no exact copies", hint="leave kv_mode out", param="kv_mode")
    if most is None or ladder.first > most.first or ladder.last > most.last:
        held = "none" if most is None else f"the first {most.first} tokens and a block of {most.last}"
        raise BadRequest(
            f"kv_mode asks for the first {ladder.first} tokens and a block of {ladder.last} to be exact; there is "
            f"memory for {held}",
            hint=f"start it with --kv-exact-first {ladder.first} --kv-exact-last {ladder.last} and a packed "
            "--kv-format, or ask for less", param="kv_mode",
        )  # fmt: skip
    return ladder


def page_salt(salt: bytes, ladder: Ladder | None) -> bytes:
    """What pages are told apart by: under a ladder the same tokens have other keys and values.

    Salts are UTF-8, in which there is no byte of 255. What copies are kept in is part of it.
    """
    return salt if ladder is None else b"\xff%d %d %s\xff" % (*ladder, COPY_FORMAT.encode()) + salt

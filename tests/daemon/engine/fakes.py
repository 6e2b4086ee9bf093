"""Small stand-ins: a decoder whose logits are a function of what the pages say, and pages staged from memory."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from tests.tiers.fakes import damaged
from tierd.daemon.engine.heavy import FADING, OBSERVED_TOKENS
from tierd.kernels.rows import Ladder
from tierd.tiers.errors import PageLost
from tierd.tiers.staging import StagingStats

PAGE = 4
VOCAB = 64
EXACT = 1000  # added to the positions in exact copies
RECORD = PAGE * 8  # token and position of each place, int32


class FakeDecoder:
    """Writes (token, position) into the pages; a row's logits depend on all it reads back at its positions and before.

    So a wrong page, a stale page or a wrong slot gives other tokens, as in a real model. A row that sees less than all
    before it says so where it writes its position: who reads that without seeing as little gets other tokens, too.
    An exact copy of a page says by `EXACT` that it is one.
    """

    def __init__(self) -> None:
        self.fail_with: Exception | None = None
        self.rows = 0
        self.batches: list[int] = []
        self.chosen: list[int] = []  # how many pages passes with rows that choose have read

    def forward(
        self, memories, tokens, positions, row_seq, pages, page_offsets, logit_rows, bounds=None, between=None,
        observed=None, exact=None,
    ):  # fmt: skip
        self.start(tokens, positions, row_seq, page_offsets, logit_rows, None, bounds, observed, exact)
        if between is not None:
            between()
        self.layer(0, memories, pages)
        return self.finish()

    def start(
        self, tokens, positions, row_seq, page_offsets, logit_rows, rows=None, bounds=None, observed=None, exact=None
    ):
        self._observed = observed
        if self.fail_with is not None:
            raise self.fail_with
        self.rows += len(tokens)
        self.batches.append(len(tokens))
        self._batch = (tokens, positions, row_seq, page_offsets, logit_rows)
        self._exact = exact
        self._bounds = np.zeros((len(page_offsets) - 1, 4), np.int32) if bounds is None else bounds

    def layer(self, index, memories, pages, placed=None, experts=None, choose=None):
        assert index == 0
        tokens, positions, row_seq, page_offsets, logit_rows = self._batch
        places = [_place(memories, int(address)) for address in pages]
        for row, token in enumerate(tokens):
            window, sinks, lead, base = self._bounds[row_seq[row]]
            mine = places[page_offsets[row_seq[row]] + lead : page_offsets[row_seq[row] + 1]]
            mark = marked(positions[row], window, sinks) if window or not base else -1 - positions[row]
            mine[(positions[row] - base) // PAGE][positions[row] % PAGE] = (token, mark)
        if self._exact is not None:
            copies = [_place([self._exact.memory], int(at)) if at else None for at in self._exact.pages]
            for row, token in enumerate(tokens):
                _, _, lead, base = self._bounds[row_seq[row]]
                copy = copies[page_offsets[row_seq[row]] + lead + (positions[row] - base) // PAGE]
                if copy is not None:
                    copy[positions[row] % PAGE] = (token, EXACT + positions[row])
            places = [place if copy is None else copy for place, copy in zip(places, copies, strict=True)]
        if choose is not None:
            memories, pages = choose(positions.astype(np.float32)[:, None, None])
            places = [_place(memories, int(address)) for address in pages]
            self.chosen.append(len(set(pages.tolist())))
        self._places = places
        self._out = self.hidden(logit_rows)

    def finish(self):
        return self._out

    def masses(self):
        """A row looks at each page as much as its position and what the page says tell, of what it sees of it."""
        _, positions, row_seq, page_offsets, _ = self._batch
        found = np.zeros((len(self._observed), int(positions.max()) // PAGE + 1))
        for place, row in enumerate(self._observed):
            base, at = self._bounds[row_seq[row], 3], int(positions[row])
            mine = self._places[page_offsets[row_seq[row]] :][: (at - base) // PAGE + 1]
            for number, page in enumerate(mine):
                seen = page if number + 1 < len(mine) else page[: at % PAGE + 1]
                found[place, number] = worth_of(at, seen.tobytes())
        return found

    def hidden(self, rows):
        _, positions, row_seq, page_offsets, _ = self._batch
        out = np.empty((len(rows), VOCAB), dtype=np.float32)
        for place, row in enumerate(rows):
            window, sinks, lead, base = self._bounds[row_seq[row]]
            mine = self._places[page_offsets[row_seq[row]] : page_offsets[row_seq[row] + 1]]
            first = first_seen(positions[row], window, sinks) if window else base
            history = np.concatenate(mine[lead:])[first - base : positions[row] + 1 - base]
            if sinks and first:
                history = np.concatenate((np.concatenate(mine[:lead])[:sinks], history))
            out[place] = logits_for(history[:, 0], history[:, 1])
        return out


def _place(memories, address: int) -> np.ndarray:
    """The page at an address as int32[PAGE, 2]."""
    for memory in memories:
        at = address - memory.ctypes.data
        if 0 <= at <= memory.nbytes - RECORD:
            return memory.reshape(-1)[at : at + RECORD].view(np.int32).reshape(PAGE, 2)
    raise AssertionError(f"address {address} lies in no memory")


def logits_for(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    digest = hashlib.blake2b(tokens.astype(np.int32).tobytes() + positions.astype(np.int32).tobytes()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(VOCAB).astype(np.float32) * 3


def first_seen(position: int, window: int, sinks: int) -> int:
    """The first token, sinks apart, that a row sees."""
    return max(0, position - window + 1) if window and position >= window + sinks else 0


def marked(position: int, window: int, sinks: int) -> int:
    """What a row writes as its position."""
    return -1 - position if first_seen(position, window, sinks) else position


def expected(prompt: Sequence[int], count: int, window: int = 0, sinks: int = 0) -> list[int]:
    """The greedy answer of the fake decoder."""
    tokens = list(prompt)
    for _ in range(count):
        position = len(tokens) - 1
        first = first_seen(position, window, sinks)
        seen = [*(range(sinks) if first else ()), *range(first, position + 1)]
        marks = np.array([marked(place, window, sinks) for place in seen], np.int32)
        tokens.append(int(np.argmax(logits_for(np.array(tokens, np.int32)[seen], marks))))
    return tokens[len(prompt) :]


def expected_on(ladder: Ladder, prompt: Sequence[int], count: int) -> list[int]:
    """The same under a ladder."""
    tokens = list(prompt)
    for _ in range(count):
        block = ladder.block(len(tokens) - 1)
        marks = [place + EXACT * (place < ladder.first or place >= block) for place in range(len(tokens))]
        tokens.append(int(np.argmax(logits_for(np.array(tokens, np.int32), np.array(marks, np.int32)))))
    return tokens[len(prompt) :]


class FakeBounds:
    """Bounds that are all that a page says: what it is worth to a row follows from both."""

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}

    def learn(self, layer, first, addresses):
        for place, address in enumerate(addresses.tolist(), first):
            self.pages[place] = ctypes.string_at(address, RECORD)

    def worth(self, layer, query, first, stop):
        return np.array([worth_of(int(query[0, 0]), self.pages[place]) for place in range(first, stop)], np.float32)


def worth_of(position: int, page: bytes) -> float:
    return int.from_bytes(hashlib.blake2b(page, key=position.to_bytes(4, "little"), digest_size=3).digest(), "little")


def expected_selecting(prompt: Sequence[int], count: int, read: int) -> list[int]:
    """The greedy answer of the fake decoder to a request whose rows read `read` tokens, of pages that they choose."""
    tokens, marks = list(prompt), list(range(max(len(prompt), read)))
    for _ in range(count):
        position = len(tokens) - 1
        seen = list(range(position + 1))
        if position >= len(marks):
            marks.append(-1 - position)
        if marks[position] < 0:
            pages, kept = position // PAGE + 1, read // PAGE
            said = np.stack((tokens, marks[: len(tokens)]), 1).astype(np.int32)
            worth = [worth_of(position, said[PAGE * page : PAGE * page + PAGE].tobytes()) for page in range(pages - 2)]
            best = sorted(range(1, pages - 2), key=lambda page: (-np.float32(worth[page]), page))[: kept - 3]
            chosen = [0, *sorted(best), pages - 2, pages - 1]
            seen = [at for at in seen if at // PAGE in chosen]
        history = np.array([marks[at] for at in seen], np.int32)
        tokens.append(int(np.argmax(logits_for(np.array(tokens, np.int32)[seen], history))))
    return tokens[len(prompt) :]


def expected_thinning(prompt: Sequence[int], count: int, kept: int) -> list[int]:
    """The greedy answer of the fake decoder to a request that keeps the pages of `kept` tokens, half of them newest."""
    tokens, first = list(prompt), max(len(prompt), kept)
    marks, masses = list(range(first)), np.zeros(len(prompt) + count)
    pages: list[int] = []  # that are left
    for at in range(min(first - OBSERVED_TOKENS, len(prompt) - 1), len(prompt) + count - 1):
        page = at // PAGE
        if at == first or (at > first and at % PAGE == 0):
            pages = [one for one in pages if one < page] if at > first else list(range(page))
            may_go = [one for one in pages if one > 0 and one <= page - kept // 2 // PAGE]
            spare = len(pages) + 1 - kept // PAGE
            gone = sorted(may_go, key=lambda one: (masses[one], one))[: max(spare, 0)]
            pages = [one for one in pages if one not in gone] + [page]
        seen = pages if at >= first else list(range(page + 1))
        if at >= first:
            marks.append(at if seen == list(range(page + 1)) else -1 - at)
        if at >= len(tokens) - 1:
            places = [one for one in range(at + 1) if one // PAGE in seen]
            said = np.array(tokens, np.int32)[places], np.array(marks, np.int32)[places]
            tokens.append(int(np.argmax(logits_for(*said))))
        if at % PAGE == 0:
            masses *= FADING
        for one in seen if at >= first - OBSERVED_TOKENS else ():
            where = slice(PAGE * one, min(PAGE * one + PAGE, at + 1))
            page_says = np.stack((tokens[where], marks[where]), 1).astype(np.int32)
            masses[one] += worth_of(at, page_says.tobytes())
    return tokens[len(prompt) :]


class PickedPages:
    """`Picker` over a store in memory."""

    def __init__(self, store) -> None:
        self._store = store
        self.lost: list[bytes] = []  # keys that can't be read from now on
        self.memory = np.empty(0, np.uint8)
        self.reads = self.read_bytes = 0

    def release(self) -> None:
        pass

    def read(self, keys, section, deadline_s):
        self.reads += len(keys)
        block = np.empty((len(keys), RECORD), np.uint8)
        for row, key in zip(block, keys, strict=True):
            if key in self.lost:
                raise damaged([key])
            self._store.read_into(key, row)
        self.memory = block
        self.read_bytes += block.nbytes
        return block.ctypes.data + RECORD * np.arange(len(keys))


class StagedPages:
    """`Staging` without look-ahead, over a store in memory."""

    def __init__(self, store) -> None:
        self._store = store
        self.lost: list[bytes] = []  # keys that can't be read from now on
        self.passes = 0

    def statistics(self):
        return StagingStats(self.passes, 0, 0.0, 0, 0)

    def release(self) -> None:
        pass

    @contextlib.contextmanager
    def open(self, keys, overlap=True):
        self.passes += 1
        block = np.empty((len(keys), RECORD), np.uint8)
        missing = [key for key in keys if key in self.lost]
        for row, key in zip(block, keys, strict=True):
            try:
                self._store.read_into(key, row)
            except PageLost:
                missing.append(key)
        if missing:
            raise damaged(missing)
        slices = block.ctypes.data + RECORD * np.arange(len(keys))
        yield SimpleNamespace(memories=[block], section=lambda _index, _deadline_s: slices)

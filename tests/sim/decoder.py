"""A decoder whose logits hash every key and value it reads, and the oracle that computes the same without any tiers.

The "key and value" of a token in a layer is 8 bytes: a hash of the row's state, which in turn hashes all keys and
values of the layer below up to its position. So a page that is wrong, stale, poisoned or another one's changes every
token after it, as in a real model.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import xxhash

from tests.sim.clock import Clock
from tierd.kernels.layout import PageLayout

LAYERS = 4
PAGE_TOKENS = 4
ENTRY_BYTES = 8
LAYER_BYTES = PAGE_TOKENS * ENTRY_BYTES
RECORD_BYTES = LAYERS * LAYER_BYTES
LAYOUT = PageLayout(LAYERS, 1, 1, "fp32", PAGE_TOKENS)
assert LAYOUT.layer_bytes == LAYER_BYTES
VOCAB = 64

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_PACK = struct.Struct("<II").pack


def first_state(token: int, position: int) -> bytes:
    """The row's state before the first layer."""
    return xxhash.xxh3_64_digest(_PACK(token, position))


def entry(state: bytes, layer: int) -> bytes:
    """Key and value of the row in a layer."""
    return xxhash.xxh3_64_digest(state + bytes([layer]))


def next_state(state: bytes, history: xxhash.xxh3_64) -> bytes:
    """The row's state after a layer whose keys and values up to the row are hashed in `history`."""
    return xxhash.xxh3_64_digest(state + history.digest())


def logits(state: bytes) -> Floats:
    """A row's logits. float32[VOCAB]"""
    return np.frombuffer(blake2b(state, digest_size=VOCAB).digest(), np.uint8).astype(np.float32) / 24


class Memory:
    """Finds the bytes at an address in the memories that a decoder was given."""

    def __init__(self, memories: Sequence[Bytes]) -> None:
        self._blocks = [
            (flat.ctypes.data, flat.nbytes, flat)
            for flat in (memory.reshape(-1).view(np.uint8) for memory in memories if memory.nbytes)
        ]

    def at(self, address: int, count: int) -> Bytes:
        """The `count` bytes at an address; one outside of every memory fails."""
        for base, size, flat in self._blocks:
            if base <= address and address + count <= base + size:
                return flat[address - base : address - base + count]
        raise AssertionError(f"{count} bytes at {address:#x} lie in none of the memories")


@dataclass(slots=True)
class _Rows:
    """Consecutive rows of one sequence."""

    first: int  # row number in the batch
    start: int  # position
    states: list[bytes]
    begin: int  # of its pages in the page table
    end: int


class HashDecoder:
    """Takes what `CpuDecoder` takes, with pages as addresses. Computing moves the clock."""

    def __init__(self, clock: Clock, *, step_s: float, row_s: float) -> None:
        self._clock = clock
        self._step_s = step_s
        self._row_s = row_s
        self._groups: list[_Rows] = []
        self._logit_rows: Sequence[int] = ()
        self.fail_with: BaseException | None = None  # the next step fails
        self.rows = 0

    def forward(
        self,
        memories: Sequence[Bytes],
        tokens: Ints,
        positions: Ints,
        row_seq: Ints,
        pages: Ints,
        page_offsets: Ints,
        logit_rows: Ints,
        *,
        between: Callable[[], None] | None = None,
    ) -> Floats:
        """One step; logits [L, VOCAB]."""
        self.start(tokens, positions, row_seq, page_offsets, logit_rows)
        for index in range(LAYERS):
            if between is not None:
                between()
            self.layer(index, memories, pages)
        return self.finish()

    def start(self, tokens: Ints, positions: Ints, row_seq: Ints, page_offsets: Ints, logit_rows: Ints) -> None:
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        self._groups, last = [], None
        for row, (token, position, sequence) in enumerate(
            zip(tokens.tolist(), positions.tolist(), row_seq.tolist(), strict=True)
        ):
            state = first_state(token, position)
            group = self._groups[-1] if self._groups else None
            if group is not None and sequence == last and position == group.start + len(group.states):
                group.states.append(state)
            else:
                begin, end = int(page_offsets[sequence]), int(page_offsets[sequence + 1])
                self._groups.append(_Rows(row, position, [state], begin, end))
            last = sequence
        self._logit_rows = logit_rows.tolist()
        self.rows += len(tokens)
        self._clock.go_to(self._clock.now_s + self._step_s + self._row_s * len(tokens))

    def layer(self, index: int, memories: Sequence[Bytes], pages: Ints) -> None:
        memory = Memory(memories)
        for group in self._groups:
            table = [
                memory.at(int(page) + index * LAYER_BYTES, LAYER_BYTES) for page in pages[group.begin : group.end]
            ]
            for place, state in enumerate(group.states, group.start):
                offset = place % PAGE_TOKENS * ENTRY_BYTES
                written = np.frombuffer(entry(state, index), np.uint8)
                table[place // PAGE_TOKENS][offset : offset + ENTRY_BYTES] = written
            held = b"".join(piece.tobytes() for piece in table)
            history = xxhash.xxh3_64(held[: group.start * ENTRY_BYTES])
            for number, place in enumerate(range(group.start, group.start + len(group.states))):
                history.update(held[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES])
                group.states[number] = next_state(group.states[number], history)

    def finish(self) -> Floats:
        states = [state for group in self._groups for state in group.states]
        out = np.empty((len(self._logit_rows), VOCAB), np.float32)
        for place, row in enumerate(self._logit_rows):
            out[place] = logits(states[row])
        return out


class Oracle:
    """The same arithmetic for one sequence, with its keys and values in running hashes."""

    def __init__(self) -> None:
        self._histories = [xxhash.xxh3_64() for _ in range(LAYERS)]
        self._length = 0

    def fork(self) -> Oracle:
        """Another sequence that begins with this one."""
        twin = Oracle()
        twin._histories = [history.copy() for history in self._histories]
        twin._length = self._length
        return twin

    def push(self, token: int) -> Floats:
        """The logits after one more token."""
        state = first_state(token, self._length)
        for index, history in enumerate(self._histories):
            history.update(entry(state, index))
            state = next_state(state, history)
        self._length += 1
        return logits(state)

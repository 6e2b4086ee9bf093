"""Sequences with a bound, and their twin: for the tests of every backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierd.kernels import reference
from tierd.kernels.rows import BASE_TOKENS, Bound

from .decoders import TinyModel, addresses

TABLE = 96  # positions with tables; those beyond come from `far`
HEAD_DIM = 32
INVERSE = torch.tensor(10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)), dtype=torch.float64)


def far(positions: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    cos, sin = reference.angles(torch.from_numpy(positions), INVERSE)
    return cos.float().numpy(), sin.float().numpy()


@dataclass
class Bounded:
    """A sequence with a bound, all of its pages, and what of it has been computed."""

    tokens: list[int]
    bound: Bound
    slots: list[int] = field(default_factory=list)

    def table(self, start: int, stop: int, page_base: int | None) -> tuple[list[int], Bound]:
        """The pages that rows start..stop are given, and the bound that says so."""
        window, sinks = self.bound.window, self.bound.sinks
        lead = -(-sinks // 16)
        lowest = max(start - window + 1, 0) if window and start >= sinks + window else 0
        base = lowest // BASE_TOKENS * BASE_TOKENS if page_base is None else page_base
        sinks_in = [self.slots[min(page, len(self.slots) - 1)] for page in range(lead)]  # some may not have begun
        return sinks_in + self.slots[base // 16 : -(-stop // 16)], Bound(window, sinks, lead, base)


def run(
    decoder: Any,  # of any backend
    arena: NDArray[np.uint8],
    spans: list[tuple[Bounded, int, int]],
    page_base: int | None = None,
) -> NDArray[np.float32]:
    """One pass over rows start..stop of some sequences; logits of all."""
    tables = [sequence.table(start, stop, page_base) for sequence, start, stop in spans]
    positions = np.concatenate([np.arange(start, stop, dtype=np.int32) for _, start, stop in spans])
    logits: NDArray[np.float32] = decoder.forward(
        [arena],
        np.concatenate([np.array(s.tokens[start:stop], np.int32) for s, start, stop in spans]),
        positions,
        np.repeat(np.arange(len(spans), dtype=np.int32), [stop - start for _, start, stop in spans]),
        addresses(arena, np.array([slot for slots, _ in tables for slot in slots])),
        np.cumsum([0] + [len(slots) for slots, _ in tables]).astype(np.int32),
        np.arange(len(positions), dtype=np.int32),
        bounds=np.array([bound for _, bound in tables], np.int32),
    )
    return logits


def sequences(seed: int, model: TinyModel, lengths: list[int], bounds: list[Bound]) -> tuple[list[Bounded], int]:
    rng = np.random.default_rng(seed)
    slots = rng.permutation(sum(-(-length // 16) for length in lengths) + 2).tolist()
    made = []
    for length, bound in zip(lengths, bounds, strict=True):
        mine = [slots.pop() for _ in range(-(-length // 16))]
        made.append(Bounded(rng.integers(0, model.shape.vocab, length).tolist(), bound, mine))
    return made, sum(-(-length // 16) for length in lengths) + 2


def twin(model: TinyModel, arena: NDArray[np.uint8], sequence: Bounded) -> NDArray[np.float32]:
    """Logits of all rows; tables as long as the sequence."""
    length = len(sequence.tokens)
    cos, sin = far(np.arange(length, dtype=np.int32))
    return reference.forward(
        model.shape, model.layers, model.embed, model.final_norm, model.head, model.layout, cos, sin, arena,
        np.array(sequence.tokens, np.int32), np.arange(length, dtype=np.int32), np.zeros(length, np.int32),
        np.array(sequence.slots, np.int32), np.array([0, len(sequence.slots)], np.int32),
        np.arange(length, dtype=np.int32), [sequence.bound], INVERSE,
    ).numpy()  # fmt: skip

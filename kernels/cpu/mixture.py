"""A layer whose experts are not all in memory: routed first, then computed a few experts at a time, as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.cpu.forward import ALL_GROUPS, COMBINE, GROUPS, QUERIES, UNTIL_GROUPS, WHOLE_LAYER
from tierd.kernels.cpu.scratch import Scratch
from tierd.kernels.cpu.weights import DecoderShape, WeightTable

_GUESS_ROWS = 16  # with more rows most experts of a layer are needed, and a guess says nothing


class ExpertSource(Protocol):
    """Who brings experts."""

    def bring(
        self, layer: int, wanted: Mapping[int, int], guessed: Mapping[int, int]
    ) -> Iterator[Sequence[int]]:
        """Yields some of the `wanted` experts of a layer (expert to rows) when they have been put where launches find
        them, every one of them once; what was yielded before need not stay.

        `guessed`: what the next layer will probably ask for, its experts to rows.
        """
        ...


def run_mixture(
    shape: DecoderShape, job: Any, scratch: Scratch, weights: WeightTable, index: int, source: ExpertSource | None,
    launch: Callable[[], None],
) -> None:  # fmt: skip
    """Computes layer `index`; `launch` launches what the job says of it. The bits are those of one launch.

    Raises ValueError without a source, and whatever that raises.
    """
    if source is None:
        raise ValueError(f"experts of layer {index} are streamed: say where they come from")
    job["steps"] &= QUERIES | UNTIL_GROUPS  # the first of them may be done
    guesses = _can_guess(shape, weights, index + 1, int(job["rows"]))
    job["foreseen_layer"] = index + 1 if guesses else 0
    try:
        launch()
        groups = scratch.groups[index, : int(scratch.num_groups[index])]
        found = groups.copy()
        at = {int(expert): number for number, expert in enumerate(found[:, 0])}
        wanted = {expert: int(found[number, 2]) for expert, number in at.items()}
        done = 0
        for wave in source.bring(index, wanted, _guessed(shape, job, scratch) if guesses else {}):
            groups[done : done + len(wave)] = found[[at[expert] for expert in wave]]
            job["first_group"], job["stop_group"] = done, done + len(wave)
            done += len(wave)
            job["steps"] = GROUPS | COMBINE if done == len(found) else GROUPS
            launch()
        if done != len(found):
            raise AssertionError(f"{done} of {len(found)} experts were brought")
    finally:
        job["steps"], job["first_group"], job["stop_group"], job["foreseen_layer"] = WHOLE_LAYER, 0, ALL_GROUPS, 0


def _can_guess(shape: DecoderShape, weights: WeightTable, following: int, rows: int) -> bool:
    """Whether the next layer's router can be asked already."""
    if following >= shape.num_layers or rows > _GUESS_ROWS or weights.experts.has_all(following):
        return False
    return weights.is_resident(following)


def _guessed(shape: DecoderShape, job: Any, scratch: Scratch) -> dict[int, int]:
    assert shape.experts is not None
    pairs: NDArray[np.int32] = scratch.foreseen[: int(job["rows"]) * shape.experts.used]
    experts, counts = np.unique(pairs, return_counts=True)
    return dict(zip(experts.tolist(), counts.tolist(), strict=True))

"""The seam for mixtures whose experts are not all on the card: who brings them, and who computes those that stay away.

As `kernels.cpu.mixture`, with one more way for an expert: its rows may be computed by whoever brings experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from tierd.kernels.cpu.weights import Floats
    from tierd.kernels.gpu.layers import GpuLayer


class Wave(NamedTuple):
    """Some of the experts that a layer wants.

    placed    experts that launches queued from now on find in the layer's `GpuExperts` (`put`)
    computed  experts that were computed elsewhere: what each makes of its rows, fp32 [its rows, hidden], contiguous,
              in the order of `rows_of`; biases are in it, shares of rows are not
    """

    placed: Sequence[int] = ()
    computed: Mapping[int, Floats] = {}


class CardExpertSource(Protocol):
    """Who brings experts to the card. `bring` is called once for each mixture of a pass."""

    def bring(
        self, layer: int, wanted: Mapping[int, int], guessed: Mapping[int, int], rows_of: Callable[[int], Floats]
    ) -> Iterator[Wave]:
        """Yields waves, in which every expert of `wanted` is once, placed or computed. Experts that are on the card
        already belong into one, too.

        layer    of the model, from 0
        wanted   what the router chose: expert -> rows that go through it
        guessed  what the next layer will probably choose, its experts -> rows; empty where that layer is no mixture, is
                 not on the card, or a pass has more than 16 rows
        rows_of  for one of `wanted`: its rows as experts take them, normed, fp32 [rows, hidden], in ascending order of
                 rows. The first call waits for what was launched so far, so it is best made before the first wave

        When the next wave is asked for, all that a placed expert does has been queued on the compute stream, and not
        more: its memory may be given to another expert by what that stream runs, or by a copy that waits for it. The
        wave's experts may then be out of their places.

        What a row gets is the same in whatever waves its experts come: each leaves fp32 numbers for each of its rows,
        in a place for that row and rank, and these are added up when all are there, the most probable expert first.
        Only whether an expert was placed or computed elsewhere makes a difference, as two ways to compute a product do.

        Threading: on the step thread, with the compute stream as torch's current one. What it raises ends the pass.
        """
        ...


class Bringing(NamedTuple):
    """Who brings a layer's experts; `following`: the next layer if it is on the card, for a guess of its experts."""

    source: CardExpertSource
    following: GpuLayer | None

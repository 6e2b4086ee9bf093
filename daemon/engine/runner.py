"""Runs batches: the decoder and the memory its pages lie in, and the pages that are streamed past it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.batch import Addresses, Batch, Ints
from tierd.kernels.layout import PageLayout
from tierd.tiers.page import PageKey

if TYPE_CHECKING:
    from tierd.tiers.staging import Staging

Logits = npt.NDArray[np.float32]
Memory = npt.NDArray[np.uint8]

# Reading one layer of all streamed pages. A disk that needs longer has stopped.
SECTION_TIMEOUT_S = 30.0


class Decoder(Protocol):
    """What the runner needs of `kernels.cpu.step.CpuDecoder`."""

    def forward(
        self,
        memories: Sequence[Memory],
        tokens: Ints,
        positions: Ints,
        row_seq: Ints,
        pages: Addresses,
        page_offsets: Ints,
        logit_rows: Ints,
    ) -> Logits: ...

    def start(self, tokens: Ints, positions: Ints, row_seq: Ints, page_offsets: Ints, logit_rows: Ints) -> None: ...

    def layer(self, index: int, memories: Sequence[Memory], pages: Addresses) -> None: ...

    def finish(self) -> Logits: ...


class Runner:
    """Owns the decoder. Threading: step thread only.

    Args:
        memories: the arenas that pages lie in.
        staging: reads streamed pages; None where there is no store.
        overlap: False reads each layer when it is needed, and not ahead: slower, and the same bits.
        clock: that of the staging.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: PageLayout,
        memories: Sequence[Memory],
        staging: Staging | None = None,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder = decoder
        self._layout = layout
        self._memories = tuple(memories)
        self._staging = staging
        self._overlap = overlap
        self._clock = clock

    def run(self, batch: Batch, streamed: Sequence[PageKey] = ()) -> Logits:
        """Compute all rows, write their keys and values into their pages; logits `[L, vocab]`.

        `streamed` names the pages of the batch whose address is 0, in order. Raises StagingLost when some of them
        could not be read: then the step counts for nothing.
        """
        if streamed:
            return self._run_streamed(batch, streamed)
        return self._decoder.forward(
            self._memories,
            batch.tokens,
            batch.positions,
            batch.row_seq,
            batch.pages,
            batch.page_offsets,
            batch.logit_rows,
        )

    @property
    def streaming(self) -> dict[str, int | float]:
        """What was streamed since the start, and the memory that it takes now."""
        return self._staging.statistics()._asdict() if self._staging is not None else {}

    def rest(self) -> None:
        """No step follows soon: gives the memory of streamed pages back."""
        if self._staging is not None:
            self._staging.release()

    def _run_streamed(self, batch: Batch, keys: Sequence[PageKey]) -> Logits:
        if self._staging is None:
            raise AssertionError(f"{len(keys)} pages are to be streamed without a store")
        decoder, layer_bytes = self._decoder, self._layout.layer_bytes
        places = np.flatnonzero(batch.pages == 0)
        pages = batch.pages.copy()
        # Sequences that share a prefix share its pages: each is read once.
        order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        numbers = [order[key] for key in keys]
        decoder.start(batch.tokens, batch.positions, batch.row_seq, batch.page_offsets, batch.logit_rows)
        with self._staging.open(list(order), overlap=self._overlap) as flow:
            memories = (*self._memories, *flow.memories)
            for layer in range(self._layout.num_layers):
                slices = flow.section(layer, self._clock() + SECTION_TIMEOUT_S)
                pages[places] = slices[numbers] - layer * layer_bytes  # where the record would start
                decoder.layer(layer, memories, pages)
        return decoder.finish()

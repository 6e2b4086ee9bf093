"""Runs batches: the decoder and the device arena together, and nothing else."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.batch import Batch, Ints


class Decoder(Protocol):
    """What the runner needs of `kernels.cpu.step.CpuDecoder`."""

    def forward(
        self,
        arena: npt.NDArray[np.uint8],
        tokens: Ints,
        positions: Ints,
        row_seq: Ints,
        page_table: Ints,
        page_offsets: Ints,
        logit_rows: Ints,
    ) -> npt.NDArray[np.float32]: ...


class Runner:
    """Owns the decoder and the memory its pages lie in. Threading: step thread only."""

    def __init__(self, decoder: Decoder, arena: npt.NDArray[np.uint8]) -> None:  # arena [slots, record_bytes]
        self._decoder = decoder
        self._arena = arena

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Compute all rows, write their keys and values into their pages; logits `[L, vocab]`."""
        return self._decoder.forward(
            self._arena,
            batch.tokens,
            batch.positions,
            batch.row_seq,
            batch.page_table,
            batch.page_offsets,
            batch.logit_rows,
        )

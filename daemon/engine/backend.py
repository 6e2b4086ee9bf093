"""What an engine computes on: the CPU, or a card where there is one. Chosen once, when the engine is built.

Everything above is the same code for both: arenas are one class with other memory under them, the mover is handed
another copy, the runner another decoder. This module and the CPU's backend load neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.model.held import HeldWeights
from tierd.daemon.engine.model.weights import ModelWeights
from tierd.daemon.engine.runner import Decoder
from tierd.daemon.engine.selection import Selection
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.kv_mode import Kind
from tierd.daemon.machine import total_memory_bytes
from tierd.daemon.models.catalog import Manifest
from tierd.kernels.cpu.selection import PageBounds
from tierd.kernels.cpu.step import Angles, CpuDecoder, DecoderShape
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import COPY_FORMAT
from tierd.tiers.blocks import Block, HostBlock
from tierd.tiers.copies import copy_on_host
from tierd.tiers.cuda_driver import CudaDriver
from tierd.tiers.gpu import Gpu, GpuError, Row
from tierd.tiers.mover import Mover
from tierd.tiers.store_io import huge_block

Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]
Note = Callable[[str], None]


class OwnDecoder(Decoder, Protocol):
    """A decoder that ends with its engine."""

    def close(self) -> None: ...


class Backend(Protocol):
    """One engine's. All methods from the thread that builds it; `close` after everything that it made."""

    @property
    def name(self) -> str:
        """For people: what computes."""
        ...

    @property
    def on_card(self) -> bool:
        """Whether a card computes: it rounds differently."""
        ...

    @property
    def modes(self) -> Set[Kind]:
        """The memory modes that its decoder has."""
        ...

    @property
    def device_memory(self) -> tuple[int, int]:
        """(bytes that the device arena and weights could have now, bytes if nothing else ran)."""
        ...

    def device_block(self, size_bytes: int, max_bytes: int) -> Block:
        """Memory of the device arena. Raises OSError (ENOMEM)."""
        ...

    def host_block(self, size_bytes: int, max_bytes: int, record_bytes: int) -> Block:
        """Memory of the host arena. Raises OSError (ENOMEM)."""
        ...

    def ready_host_bytes(self, block: Block) -> int:
        """How much of the host arena can be used, once this is known. Raises OSError when it can't become known."""
        ...

    def ring(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """CPU memory that kernels read while it is filled from the disk."""
        ...

    @property
    def copy_format(self) -> str:
        """Of exact copies beside packed pages: what is computed with."""
        ...

    def copy(self, dest: Row, source: Row) -> None:
        """Copies a row of an arena; returns when it is there."""
        ...

    def mover(self, wake: Callable[[], None]) -> Mover:
        """Moves bytes between all of these and the disk."""
        ...

    def weights(
        self, config: EngineConfig, manifest: Manifest, max_rows: int, mover: Mover, progress: Progress
    ) -> HeldWeights:
        """The weights of the engine's model where it computes, and past it. `progress` counts bytes.

        Raises DoesNotFit, ModelInvalid, and ValueError for a model that it doesn't run.
        """
        ...

    def decoder(
        self, weights: HeldWeights, layout: PageLayout, cos: Floats, sin: Floats, max_rows: int, progress: Progress,
        far: Angles | None = None, copies: bool = False,
    ) -> OwnDecoder:  # fmt: skip
        """Computes with these weights. `progress` counts stages while kernels are compiled; `far`: angles of positions
        beyond the tables, for texts without an end; `copies`: pages will have exact ones, compile for them as well.
        Raises ValueError for what it can't do.
        """
        ...

    def selection(self, layout: PageLayout, shape: DecoderShape) -> Selection:
        """What a sequence needs whose rows choose their pages."""
        ...

    def close(self) -> None:
        """Gives back what is not memory of an arena. Idempotent."""
        ...


class CpuBackend:
    """Threads and plain memory.

    Args:
        threads: that compute.
        make_decoder: the decoder, or one that watches it.
    """

    def __init__(self, threads: int, make_decoder: type[CpuDecoder] = CpuDecoder) -> None:
        self._threads = threads
        self._make_decoder = make_decoder

    @property
    def name(self) -> str:
        return f"the CPU, {self._threads} threads"

    @property
    def on_card(self) -> bool:
        return False

    @property
    def modes(self) -> Set[Kind]:
        return frozenset(Kind)

    @property
    def device_memory(self) -> tuple[int, int]:
        return (total_memory_bytes(),) * 2  # what is in use may be given back: the system decides

    def device_block(self, size_bytes: int, max_bytes: int) -> Block:
        return HostBlock(size_bytes, max_bytes)

    def host_block(self, size_bytes: int, max_bytes: int, record_bytes: int) -> Block:
        return HostBlock(size_bytes, max_bytes)

    def ready_host_bytes(self, block: Block) -> int:
        return block.size_bytes

    def ring(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        return huge_block(size_bytes)

    @property
    def copy_format(self) -> str:
        return COPY_FORMAT

    def copy(self, dest: Row, source: Row) -> None:
        copy_on_host(dest, source)

    def mover(self, wake: Callable[[], None]) -> Mover:
        return Mover(wake=wake)

    def weights(
        self, config: EngineConfig, manifest: Manifest, max_rows: int, mover: Mover, progress: Progress
    ) -> HeldWeights:
        return ModelWeights(Path(config.model_dir), manifest, config.weights_bytes, max_rows, mover, progress)

    def decoder(
        self, weights: HeldWeights, layout: PageLayout, cos: Floats, sin: Floats, max_rows: int, progress: Progress,
        far: Angles | None = None, copies: bool = False,
    ) -> OwnDecoder:  # fmt: skip
        assert isinstance(weights, ModelWeights)
        decoder = self._make_decoder(
            weights.shape, weights.layers, weights.embed, weights.final_norm, weights.head, layout, cos, sin,
            max_rows, self._threads, far,
        )  # fmt: skip
        weights.attach(decoder)
        return decoder

    def selection(self, layout: PageLayout, shape: DecoderShape) -> Selection:
        return Selection(PageBounds(layout, shape.heads), shape.windows)

    def close(self) -> None:
        """Nothing is left."""


def choose(
    threads: int,
    note: Note,
    make_decoder: type[CpuDecoder] = CpuDecoder,
    card: bool = True,
    open_card: Callable[[], Gpu] = CudaDriver,
) -> Backend:
    """The card if it is wanted, there is a driver for one, and torch and Triton can use it; else the CPU.

    `note` is told when there is a card that can't be used, and why. A decoder of the CPU's that is not the ordinary one
    asks for the CPU.
    """
    if not card or make_decoder is not CpuDecoder:
        return CpuBackend(threads, make_decoder)
    try:
        gpu = open_card()
    except GpuError:
        return CpuBackend(threads)
    try:
        from tierd.daemon.engine import backend_cuda

        refusal = backend_cuda.refusal()
    except ImportError as exc:
        refusal = f'{exc.name or exc} is not installed (`pip install "tierd[gpu]"`)'
    if refusal:
        gpu.close()
        note(f"there is a card, and {refusal}: computing on the CPU")
        return CpuBackend(threads)
    return backend_cuda.CudaBackend(gpu, note, threads=threads)

"""The card as an engine's backend: its memory for the device arena, pinned memory for the host's, Triton's kernels.

Imported only where there is a driver: it loads torch and Triton, which take seconds and hundreds of MB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tierd.daemon.engine.model.card_memory import Card
from tierd.daemon.engine.model.held import HeldWeights
from tierd.daemon.engine.model.weights_card import CardWeights
from tierd.daemon.engine.model.weights_status import WEIGHTS_TIMEOUT_S
from tierd.daemon.engine.selection import Selection
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.kv_mode import Kind
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.plan.auto_card import CARD_COPY_FORMAT
from tierd.kernels.cpu.step import Angles, CpuDecoder, DecoderShape
from tierd.kernels.gpu.choice import CardBounds
from tierd.kernels.gpu.decoder import GpuDecoder
from tierd.kernels.gpu.graphs import CudaCapturer
from tierd.kernels.layout import PageLayout
from tierd.tiers.blocks import Block
from tierd.tiers.cuda_copies import CudaCopies
from tierd.tiers.cuda_memory import DeviceBlock, PinnedBlock, pinned_array
from tierd.tiers.gpu import Gpu, Row, Stream
from tierd.tiers.mover import Mover

Floats = npt.NDArray[np.float32]

# Each waits for the event of one copy: so the next ones are queued meanwhile, those of weights among them.
COPY_THREADS = 8
PIN_TIMEOUT_S = 600.0
MODES = frozenset(Kind)  # what `GpuDecoder` has
MIN_CAPABILITY = (8, 0)  # bfloat16 on tensor cores, and copies to shared memory that nobody waits for


def refusal() -> str:
    """Why torch can't use the card; "" if it can."""
    if not torch.cuda.is_available():
        return f"this torch ({torch.__version__}) is built without CUDA, or its driver is too old"
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        return f"its compute capability is {found}, the kernels need 8.0"
    return ""


class CudaBackend:
    """See `Backend`. `device`, `capture` and `allocate` are handed in by tests, which have no card.

    Args:
        gpu: the driver.
        note: told what a user should know.
        threads: of the processors, for experts that it misses; 0: they compute none.
    """

    def __init__(
        self,
        gpu: Gpu,
        note: Callable[[str], None],
        *,
        threads: int = 0,
        device: torch.device | None = None,
        capture: Callable[[torch.device], CudaCapturer | None] = CudaCapturer,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._gpu = gpu
        self._note = note
        self._threads = threads
        self._device = torch.device("cuda", 0) if device is None else device
        self._capture = capture
        self._allocate = allocate
        self._compute = gpu.new_stream()
        self._copies = CudaCopies(gpu, self._compute)
        self._blocks: list[DeviceBlock | PinnedBlock] = []

    @property
    def name(self) -> str:
        if self._device.type != "cuda":
            return f"a card in the place of {self._device}"
        return f"{torch.cuda.get_device_name(self._device)}, compute capability " + ".".join(
            map(str, torch.cuda.get_device_capability(self._device))
        )

    @property
    def on_card(self) -> bool:
        return True

    @property
    def modes(self) -> Set[Kind]:
        return MODES

    @property
    def device_memory(self) -> tuple[int, int]:
        return self._gpu.memory()

    def device_block(self, size_bytes: int, max_bytes: int) -> Block:
        block = DeviceBlock(self._gpu, size_bytes, max_bytes)
        self._blocks.append(block)
        return block

    def host_block(self, size_bytes: int, max_bytes: int, record_bytes: int) -> Block:
        block = PinnedBlock(self._gpu, size_bytes, max_bytes, record_bytes)
        self._blocks.append(block)
        return block

    def ready_host_bytes(self, block: Block) -> int:
        assert isinstance(block, PinnedBlock)
        ready = block.wait(PIN_TIMEOUT_S)
        if block.refusal():
            self._note(f"only {ready / 1e9:.1f} GB of CPU memory could be pinned for pages: {block.refusal()}")
        return ready

    def ring(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        return pinned_array(self._gpu, size_bytes)

    @property
    def copy_format(self) -> str:
        return CARD_COPY_FORMAT

    def copy(self, dest: Row, source: Row) -> None:
        self._copies.copy(dest, source)

    def mover(self, wake: Callable[[], None]) -> Mover:
        return Mover(COPY_THREADS, wake=wake, copy=self._copies.copy, crossing=self._copies)

    @property
    def _is_cuda(self) -> bool:
        """Whether this is a card, and not a stand-in that computes on the host."""
        return str(self._device.type) == "cuda"

    @property
    def _stream(self) -> torch.cuda.Stream | None:
        """The compute stream as torch names it."""
        return torch.cuda.ExternalStream(self._compute, self._device) if self._is_cuda else None

    def weights(
        self,
        config: EngineConfig,
        manifest: Manifest,
        max_rows: int,
        mover: Mover,
        progress: Callable[[int, int], None],
    ) -> HeldWeights:
        dtype = torch.float16 if config.kv_format == "fp16" else torch.bfloat16
        card = Card(self._gpu, self._compute, self._device, dtype, self._stream, self._allocate)
        return CardWeights(
            Path(config.model_dir), manifest, config.weights_bytes, config.host_weights_bytes, card, mover, progress,
            threads=self._threads if config.missing_experts == "auto" else 0,
        )

    def decoder(
        self,
        weights: HeldWeights,
        layout: PageLayout,
        cos: Floats,
        sin: Floats,
        max_rows: int,
        progress: Callable[[int, int], None],
        far: Angles | None = None,
        copies: bool = False,
    ) -> GpuDecoder:
        assert isinstance(weights, CardWeights)
        decoder = GpuDecoder(
            weights.shape, weights.layers, weights.ends, layout, cos, sin, max_rows, weights.dtype,
            capture=self._capture(self._device), stream=self._stream, note=self._note,
            embed_rows=weights.embed_rows if weights.ends.embed is None else None,
            far=far,
        )  # fmt: skip
        weights.attach(decoder)
        if weights.can_compute:
            CpuDecoder.warm_up(progress)
            weights.begin_computing()

        def deadline_s() -> float:
            return time.monotonic() + WEIGHTS_TIMEOUT_S

        decoder.warm_up(
            progress, lambda index: weights.layer(index, deadline_s()), copies, lambda: weights.experts(deadline_s())
        )
        if weights.streams:
            self._note(f"{weights.describe()}; steps run without CUDA graphs")
        return decoder

    def selection(self, layout: PageLayout, shape: DecoderShape) -> Selection:
        bounds = CardBounds(layout, self._device, self._stream)
        return Selection(bounds, shape.windows, bounds)

    def close(self) -> None:
        self._copies.close()
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            block.close()
        if self._compute:
            self._gpu.free_stream(self._compute)
            self._compute = Stream(0)
        self._gpu.close()

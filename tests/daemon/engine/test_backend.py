"""What an engine computes on: who is chosen, and a whole engine whose device arena is a card made of CPU memory."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble, backend
from tierd.kernels.cpu.step import CpuDecoder
from tierd.tiers.blocks import Block
from tierd.tiers.cuda_copies import CudaCopies
from tierd.tiers.cuda_memory import DeviceBlock, PinnedBlock, pinned_array
from tierd.tiers.gpu import DeviceRow, GpuError
from tierd.tiers.mover import Disturbance, Mover


def no_card() -> FakeGpu:
    raise GpuError(errno.ENODEV, "no CUDA driver")


def test_without_a_driver_the_cpu_computes() -> None:
    notes: list[str] = []
    chosen = backend.choose(2, notes.append, open_card=no_card)
    assert isinstance(chosen, backend.CpuBackend) and chosen.name == "the CPU, 2 threads" and not notes


def test_a_card_that_nobody_wants_is_left_alone() -> None:
    notes: list[str] = []
    chosen = backend.choose(1, notes.append, card=False, open_card=lambda: pytest.fail("the card was opened"))
    assert isinstance(chosen, backend.CpuBackend) and not notes


def test_a_card_that_torch_can_not_use_is_named() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    notes: list[str] = []
    chosen = backend.choose(2, notes.append, open_card=FakeGpu)
    assert isinstance(chosen, backend.CpuBackend)
    assert len(notes) == 1 and "there is a card" in notes[0] and "computing on the CPU" in notes[0]


def test_a_card_without_torch_is_named_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("tierd.daemon.engine.backend_cuda", raising=False)
    monkeypatch.setitem(sys.modules, "tierd.daemon.engine.backend_cuda", None)  # as an import that fails
    card, notes = FakeGpu(), []
    chosen = backend.choose(2, notes.append, open_card=lambda: card)
    assert isinstance(chosen, backend.CpuBackend) and card.closed
    assert len(notes) == 1 and "is not installed" in notes[0] and "tierd[gpu]" in notes[0]


def test_a_decoder_of_the_cpus_that_is_watched_asks_for_the_cpu() -> None:
    class Watched(CpuDecoder):
        pass

    assert isinstance(backend.choose(1, print, Watched, open_card=FakeGpu), backend.CpuBackend)


class Mixed(backend.CpuBackend):
    """The CPU's decoder over a card's memory, which here is the CPU's: everything but the kernels is the card's."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(2)
        self.gpu = gpu
        self.copies = CudaCopies(gpu, gpu.new_stream())
        self.blocks: list[DeviceBlock | PinnedBlock] = []

    def device_block(self, size_bytes: int, max_bytes: int) -> Block:
        self.blocks.append(DeviceBlock(self.gpu, size_bytes, size_bytes))
        return self.blocks[-1]

    def host_block(self, size_bytes: int, max_bytes: int, record_bytes: int) -> Block:
        block = PinnedBlock(self.gpu, size_bytes, size_bytes, record_bytes)
        self.blocks.append(block)
        return block

    def ready_host_bytes(self, block: Block) -> int:
        assert isinstance(block, PinnedBlock)
        return block.wait(10)

    def ring(self, size_bytes: int) -> np.ndarray:
        return pinned_array(self.gpu, size_bytes)

    def mover(self, wake: Any) -> Mover:
        before = Disturbance(0, 0.001, fill=self.copies.poison)
        return Mover(3, wake=wake, copy=self.copies.copy, crossing=self.copies, before=before)

    def decoder(self, weights: Any, layout: Any, *rest: Any) -> Any:
        decoder = super().decoder(weights, layout, *rest)
        forward, layer = decoder.forward, decoder.layer

        def arrays(memories: Any) -> list[np.ndarray]:
            return [whole_array(memory) for memory in memories]

        decoder.forward = lambda memories, *more, **named: forward(arrays(memories), *more, **named)
        decoder.layer = lambda index, memories, *more: layer(index, arrays(memories), *more)
        return decoder

    def close(self) -> None:
        self.copies.close()
        while self.blocks:
            self.blocks.pop().close()


def whole_array(memory: Any) -> np.ndarray:
    if not isinstance(memory, DeviceRow):
        return memory
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory.address))


PROMPT = [place % 150 + 20 for place in range(90)]


def test_an_engine_over_memory_of_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare(reference("llama"), tmp_path / "model")
    ask = {"tokens": PROMPT, "max_tokens": 20}
    with Live(model, tmp_path / "plain", device=16, host=8, nvme=0) as live:
        ((wanted, _),) = live.run([ask])
    gpu = FakeGpu()
    mixed = Mixed(gpu)
    monkeypatch.setattr(assemble, "choose", lambda *_: mixed)
    with Live(model, tmp_path / "card", device=16, host=8, nvme=64) as live:
        ((cold, _),) = live.run([ask])
        live.flush()
        live.clear_device()
        ((warm, end),) = live.run([ask])
        timings = end.data["timings"]
        assert cold == warm == wanted and timings.hit_host + timings.hit_nvme > 0
        assert live.engine.pager.check() == []
        statistics = live.engine.pager.mover.statistics()
        assert sum(stats.count for stats in statistics.values()) > 0
    assert not gpu.mapped and not gpu.registered

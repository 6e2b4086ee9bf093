"""Layers that pass through slots on the card: a step beside what link and disk allow; for `gpu.py`."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from tests.bench.gpu_model import LLAMA3_8B, TINY, Shape
from tierd.kernels.gpu.decoder import GpuDecoder
from tierd.kernels.gpu.layers import Ends, Piece, SlotLayer, place_bytes
from tierd.kernels.layout import PageLayout
from tierd.kernels.packing import WeightFormat, packed_bytes, sections
from tierd.tiers.cuda_copies import CudaCopies
from tierd.tiers.cuda_memory import DeviceBlock, pinned_array
from tierd.tiers.gpu import DeviceRow
from tierd.tiers.links import Link
from tierd.tiers.mover import Mover
from tierd.tiers.weights_device import DeviceRing, Record
from tierd.tiers.weights_file import Span, WeightFile
from tierd.tiers.weights_read import Piece as DiskPiece
from tierd.tiers.weights_ring import WeightRing

SLOTS, DISK_SLOTS, DEADLINE_S = 3, 4, 60.0


def layer_pieces(shape: Shape) -> tuple[list[Piece], int]:
    """The tensors of a layer with int4-g32 matrices, and the bytes of its record."""
    fused = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    pieces, at = [], 0
    for name, rows, cols in (
        ("attn_norm", 1, shape.hidden), ("qkv", fused, shape.hidden), ("o", shape.hidden, shape.heads * shape.head_dim),
        ("mlp_norm", 1, shape.hidden), ("gate_up", 2 * shape.intermediate, shape.hidden),
        ("down", shape.hidden, shape.intermediate),
    ):  # fmt: skip
        format = None if rows == 1 else WeightFormat.INT4_G32
        size = 4 * cols if format is None else packed_bytes(format, rows, cols)
        pieces.append(Piece(name, format, rows, cols, at, size))
        at += -(-size // 64) * 64
    return pieces, -(-at // 4096) * 4096


def fill(memory: np.ndarray, pieces: Sequence[Piece], seed: int) -> None:
    """Random codes, scales that keep activations small, norms of one."""
    rng = np.random.default_rng(seed)
    for piece in pieces:
        block = memory[piece.offset : piece.offset + piece.num_bytes]
        if piece.format is None:
            block.view(np.float32)[:] = 1
            continue
        at = sections(piece.format, piece.rows, piece.cols)
        block[: at.quants_bytes] = rng.integers(0, 256, at.quants_bytes, np.uint8)
        block[at.scales_offset : at.scales_offset + at.scales_bytes].view(np.float16)[:] = 0.2 / piece.cols**0.5
        block[at.minimums_offset : at.minimums_offset + at.minimums_bytes].view(np.float16)[:] = -1.5 / piece.cols**0.5


class Model:
    """A decoder without layers, a page for it, and records of its layers in registered memory."""

    def __init__(self, bench: Any, shape: Shape, dry: bool) -> None:
        self.gpu, self.shape, self.dry, device = bench.gpu, shape, dry, bench.device
        self.device, self.stream = device, bench.gpu.new_stream()
        self.pieces, self.record_bytes = layer_pieces(shape)
        block = pinned_array(self.gpu, shape.num_layers * self.record_bytes)
        self.host = block.reshape(shape.num_layers, self.record_bytes)
        for number, row in enumerate(self.host):
            fill(row, self.pieces, number)
        ones = torch.ones(shape.hidden, device=device)
        table = (torch.randn((shape.vocab, shape.hidden), device=device) / shape.hidden**0.5).to(torch.bfloat16)
        self.layout = PageLayout(shape.num_layers, shape.kv_heads, shape.head_dim, "bf16")
        angles = np.outer(np.arange(64), 10000.0 ** (-np.arange(shape.head_dim // 2) / shape.head_dim * 2))
        self.torch_stream = None if dry else torch.cuda.ExternalStream(self.stream, device)
        self.decoder = GpuDecoder(
            shape, [None] * shape.num_layers, Ends(table, ones, table), self.layout,
            np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), 16, torch.bfloat16,
            stream=self.torch_stream,
        )  # fmt: skip
        self.page = DeviceBlock(self.gpu, self.layout.record_bytes, self.layout.record_bytes)
        if not dry:
            torch.cuda.synchronize()

    def memory(self, size_bytes: int) -> torch.Tensor:
        block = torch.empty(size_bytes + 256, dtype=torch.uint8, device=self.device)
        return block[-block.data_ptr() % 256 :][:size_bytes]

    def step(self, layer: Any) -> np.ndarray:
        """The logits of one row; `layer(index)` gives the layers."""
        one, zero = np.array([0, 1], np.int32), np.zeros(1, np.int32)
        pages = np.array([self.page.address], np.int64)
        self.decoder.start(np.array([7 % self.shape.vocab], np.int32), zero, zero, one, zero)
        for index in range(self.shape.num_layers):
            self.decoder.layer(
                index, [DeviceRow(self.page.address, self.layout.record_bytes)], pages, layer(index)
            )
        return self.decoder.finish()

    def resident(self) -> np.ndarray:
        """The logits when all layers are on the card."""
        layers = []
        for row in self.host:
            slot = torch.from_numpy(row).to(self.device)
            layers.append(SlotLayer(self.pieces, slot, self.memory(place_bytes(self.pieces)), torch.bfloat16).lay_out())
        if not self.dry:
            torch.cuda.synchronize()
        return self.step(lambda index: layers[index])

    def close(self) -> None:
        self.decoder.close()
        self.page.close()
        self.gpu.free_stream(self.stream)


def run(bench: Any, dry: bool, directory: Path) -> None:
    """From registered memory, and from the disk."""
    shape = TINY if dry else LLAMA3_8B
    layers = 2 if dry else 12  # not all: passes take their time over the link
    model = Model(bench, dataclasses.replace(shape, num_layers=layers, windows=(0,) * layers), dry)
    path = directory / f"tierd-gpu-{os.getpid()}.weights"
    try:
        wanted = model.resident()
        link = _link_bytes_per_s(bench, model)
        bench.add("weights", "registered memory to the card", link / 1e9, "GB/s")
        _stream(bench, model, wanted, None, link, "CPU memory")
        path.write_bytes(model.host.data)
        file = WeightFile(path)
        try:
            _stream(bench, model, wanted, file, link, str(directory))
        finally:
            file.close()
    finally:
        path.unlink(missing_ok=True)
        model.close()


def _stream(bench: Any, model: Model, wanted: np.ndarray, file: WeightFile | None, link: float, where: str) -> None:
    copies = CudaCopies(model.gpu, model.stream)
    mover = Mover(6, copy=copies.copy, crossing=copies)
    disk, size, count = None, model.record_bytes, model.shape.num_layers
    if file is not None:
        digests = [xxhash.xxh3_128_hexdigest(row.data) for row in model.host]
        pieces = [DiskPiece(f"layer {n}", (Span(n * size, size),), (digests[n],)) for n in range(count)]
        disk = WeightRing(file, mover, pieces, DISK_SLOTS, allocate=lambda each: pinned_array(model.gpu, each))
    slots = [model.memory(size) for _ in range(SLOTS)]
    place = model.memory(place_bytes(model.pieces))
    ring = DeviceRing(
        model.gpu, model.stream, mover,
        [Record(f"layer {n}", size, None if disk is not None else model.host[n]) for n in range(count)],
        [DeviceRow(slot.data_ptr(), slot.nbytes) for slot in slots], disk=disk,
    )  # fmt: skip
    passing = [SlotLayer(model.pieces, slot, place, torch.bfloat16) for slot in slots]

    def layer(index: int) -> Any:
        slot = ring.take(index, time.monotonic() + DEADLINE_S)
        with torch.cuda.stream(model.torch_stream):
            laid_out = passing[slot].lay_out()
        ring.release()
        return laid_out

    try:
        spent = []
        for _ in range(1 if model.dry else 12):
            ring.begin()
            start = time.perf_counter()
            found = model.step(layer)
            spent.append(time.perf_counter() - start)
            if not np.array_equal(found, wanted):
                raise AssertionError(f"layers from {where} give other logits than resident ones")
        step_s, floor_s = sorted(spent[1:] or spent)[len(spent[1:]) // 2], count * size / link
        if file is not None:
            read = mover.statistics()[Link.DISK_READ]
            bench.add("weights", f"read of {where}, checked", read.bytes_per_s / 1e9, "GB/s")
            floor_s = max(floor_s, count * size / read.peak_bytes_per_s) if read.peak_bytes_per_s else floor_s
        bench.add("weights", f"step of {count} layers from {where}", step_s * 1e3, "ms", floor_s / step_s, 0.9)
    finally:
        ring.close()
        mover.close()
        copies.close()


def _link_bytes_per_s(bench: Any, model: Model) -> float:
    """Of one long copy, the best of some."""
    gpu, size = model.gpu, model.record_bytes * 2
    dest, event, best = model.memory(size), model.gpu.new_event(), 0.0
    for _ in range(1 if model.dry else 5):
        start = time.perf_counter()
        gpu.copy(dest.data_ptr(), int(model.host.ctypes.data), size, model.stream)
        gpu.record(event, model.stream)
        gpu.synchronize(event)
        best = max(best, size / (time.perf_counter() - start))
    gpu.free_event(event)
    return best

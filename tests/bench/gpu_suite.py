"""What the kernels and the CUDA backend do on the card at hand; `gpu.py` is how to run it."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench import gpu_experts, gpu_kernels, gpu_mixture, gpu_model, gpu_weights
from tests.bench.gpu_kernels import random_matrix
from tierd.kernels.gpu.decode import plan_decode
from tierd.kernels.gpu.matmul import plan_matmul
from tierd.kernels.gpu.pages import PageTable, base_of
from tierd.kernels.layout import PageLayout
from tierd.kernels.packing import WeightFormat
from tierd.tiers.cuda_copies import CudaCopies
from tierd.tiers.cuda_driver import CudaDriver
from tierd.tiers.cuda_memory import DeviceBlock, pinned_array
from tierd.tiers.gpu import Gpu, GpuError
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, Disturbance, JobClass, Mover

DRY = "--dry" in sys.argv  # tiny sizes, no card
PARTS = ("rates", "kernels", "attention", "matmul", "mixture", "copies", "trips", "weights", "experts", "model")


@dataclass(frozen=True)
class Row:
    """One figure. `share`: of what the hardware allows, where that is known; `target` of the share, 0 for none."""

    part: str
    what: str
    value: float
    unit: str
    share: float = 0.0
    target: float = 0.0


class Bench:
    """The parts, and what they have found."""

    def __init__(self, gpu: Gpu, device: torch.device, options: argparse.Namespace) -> None:
        self.gpu, self.device, self.options = gpu, device, options
        self.rows: list[Row] = []
        self.copy_bytes_per_s = self.flops = 1.0
        self._flush = torch.empty(1 << 10 if DRY else 256 << 20, dtype=torch.uint8, device=device)

    def add(self, part: str, what: str, value: float, unit: str, share: float = 0.0, target: float = 0.0) -> None:
        row = Row(part, what, value, unit, share, target)
        self.rows.append(row)
        of = f"{share:7.1%}" + (f" (target {target:.0%})" if target else "") if share else ""
        print(f"{part:10} {what:52} {value:12.4g} {unit:10} {of}", flush=True)

    def seconds(self, run: Callable[[], object], times: int = 20) -> float:
        """Median time on the card, the second-level cache full of something else."""
        if DRY:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        for _ in range(3):
            run()
        found = []
        for _ in range(times):
            self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1000)
        return sorted(found)[len(found) // 2]

    def rates(self) -> None:
        size = 1 << 12 if DRY else 1 << 30
        source, dest = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        self.copy_bytes_per_s = 2 * size / self.seconds(lambda: dest.copy_(source))
        self.add("rates", "copy on the card, read and write", self.copy_bytes_per_s / 1e9, "GB/s")
        n = 64 if DRY else 8192
        a, b = (torch.randn((n, n), device=self.device).to(torch.bfloat16) for _ in range(2))
        self.flops = 2 * n**3 / self.seconds(lambda: a @ b)
        self.add("rates", f"torch matmul bf16 {n}", self.flops / 1e12, "TFLOP/s")

    def kernels(self) -> None:
        scale = gpu_kernels.TINY if DRY else gpu_kernels.FULL
        for seed in range(1 if DRY else 3):
            mixtures = gpu_mixture.compare(gpu_kernels.Case(self.device, scale, seed))
            for name, error in (*gpu_kernels.compare_all(self.device, scale, seed), *mixtures):
                self.add("kernels", f"{name}, seed {seed}: error over bound", error, "")
                if not error <= 1:
                    raise AssertionError(f"{name} is wrong: {error:.3g} times what rounding explains")

    def attention(self) -> None:
        heads, kv_heads, head_dim = (4, 2, 32) if DRY else (32, 8, 128)
        layout = PageLayout(1, kv_heads, head_dim, "bf16")
        for batch, context in ((1, 32),) if DRY else ((1, 8192), (8, 8192), (32, 8192), (8, 1024), (1, 32768)):
            self._attend(layout, heads, batch, context)

    def _attend(self, layout: PageLayout, heads: int, batch: int, context: int) -> None:
        kv_heads, head_dim, pages = layout.kv_heads, layout.head_dim, context // 16
        slots = batch * pages
        memory = torch.zeros(slots * layout.record_bytes + 64, dtype=torch.uint8, device=self.device)
        memory = memory[-memory.data_ptr() % 64 :][: slots * layout.record_bytes]
        addresses = [memory.data_ptr() + slot * layout.record_bytes for slot in torch.randperm(slots).tolist()]
        tables = [addresses[row * pages : (row + 1) * pages] for row in range(batch)]
        table = PageTable.build(layout, tables, [context] * batch, [memory], base_of(layout, self.device))
        queries = torch.randn((batch, heads, head_dim), device=self.device).to(torch.bfloat16)
        floor_s = batch * context * 2 * kv_heads * head_dim * 2 / self.copy_bytes_per_s
        target = 0.85 if batch >= 8 and context >= 8192 else 0.0
        spent_s = self.seconds(plan_decode(queries, table, 0).run)
        self.add("attention", f"decode {batch} x {context}", spent_s * 1e6, "us", floor_s / spent_s, target)
        shape = (batch, kv_heads, context, head_dim)
        keys, values = (torch.randn(shape, device=self.device).to(torch.bfloat16) for _ in range(2))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        spent_s = self.seconds(lambda: sdpa(queries[:, :, None], keys, values, enable_gqa=True))
        self.add("attention", f"torch SDPA, contiguous {batch} x {context}", spent_s * 1e6, "us", floor_s / spent_s)
        self._flash(queries, keys, values, floor_s)

    def _flash(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, floor_s: float) -> None:
        try:
            from flash_attn import flash_attn_with_kvcache
        except ImportError:
            return
        k, v = (plane.transpose(1, 2).contiguous() for plane in (keys, values))
        spent_s = self.seconds(lambda: flash_attn_with_kvcache(queries[:, None], k, v))
        batch, context = k.shape[:2]
        self.add("attention", f"flash-attn, contiguous, {batch} x {context}", spent_s * 1e6, "us", floor_s / spent_s)

    def matmul(self) -> None:
        shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
        if DRY:
            shapes = {"tiny": (64, 64)}
        for format in (WeightFormat.INT4_G32, WeightFormat.INT8_G32):
            for name, (rows, cols) in shapes.items():
                matrix = random_matrix(format, rows, cols, self.device)
                size = matrix.quants.nbytes + matrix.scales.nbytes
                for count in (1,) if DRY else (1, 8, 32, 64, 2048):
                    x = torch.randn((count, cols), device=self.device).to(torch.bfloat16)
                    spent_s = self.seconds(plan_matmul(x, matrix).run)
                    floor_s = max(size / self.copy_bytes_per_s, 2 * count * rows * cols / self.flops)
                    target = 0.8 if format is WeightFormat.INT4_G32 and count <= 8 else 0.0
                    what = f"{format} {name} {rows} x {cols}, {count} rows"
                    self.add("matmul", what, spent_s * 1e6, "us", floor_s / spent_s, target)

    def mixture(self) -> None:
        gpu_mixture.run(self, DRY)

    def copies(self) -> None:
        record, count = (4096, 4) if DRY else (2 << 20, 512)
        host = pinned_array(self.gpu, record * count)
        block = DeviceBlock(self.gpu, record * count, record * count)
        stream = self.gpu.new_stream()
        copies = CudaCopies(self.gpu, stream)
        event = self.gpu.new_event()
        plain = {}
        far, near = block.address, int(host.ctypes.data)
        for link, dest, source in ((Link.HOST_TO_DEVICE, far, near), (Link.DEVICE_TO_HOST, near, far)):
            for _ in range(2):
                start = time.perf_counter()
                self.gpu.copy(dest, source, record * count, stream)
                self.gpu.record(event, stream)
                self.gpu.synchronize(event)
                plain[link] = record * count / (time.perf_counter() - start)
            self.add("copies", f"one pinned copy, {link}", plain[link] / 1e9, "GB/s")
        order = list(range(count))
        random.Random(0).shuffle(order)
        mover = Mover(4, copy=copies.copy, crossing=copies)
        for link in (Link.HOST_TO_DEVICE, Link.DEVICE_TO_HOST):
            for _ in range(2):
                start = time.perf_counter()
                for number in order:
                    here, there = host[number * record : (number + 1) * record], block.row(number * record, record)
                    pair = (there, here) if link is Link.HOST_TO_DEVICE else (here, there)
                    mover.submit(mover.copy_job(*pair, link, check), JobClass.NOW)
                drain(mover)
                rate = record * count / (time.perf_counter() - start)
            what = f"pages of {record / 2**20:.1f} MiB by the mover, {link}"
            self.add("copies", what, rate / 1e9, "GB/s", rate / plain[link], 0.9)
        mover.close()
        copies.close()
        block.close()
        self.gpu.free_event(event)
        self.gpu.free_stream(stream)

    def trips(self) -> None:
        record, slots, trips = (4096, 4, 20) if DRY else (1 << 20, 64, 5000)
        host = pinned_array(self.gpu, record * slots).reshape(slots, record)
        block = DeviceBlock(self.gpu, record * slots, record * slots)
        stream = self.gpu.new_stream()
        copies = CudaCopies(self.gpu, stream)
        mover = Mover(4, copy=copies.copy, crossing=copies, before=Disturbance(0, 0.001, fill=copies.poison))
        rng = np.random.default_rng(0)
        originals = rng.integers(0, 256, (slots, record), dtype=np.uint8)
        left, wrong = trips, 0

        def up(slot: int) -> None:
            host[slot] = originals[slot]
            row = block.row(slot * record, record)
            job = mover.copy_job(row, host[slot], Link.HOST_TO_DEVICE, lambda done: down(slot, done))
            mover.submit(job, JobClass.NOW)

        def down(slot: int, done: Completion) -> None:
            check(done)
            row = block.row(slot * record, record)
            job = mover.copy_job(host[slot], row, Link.DEVICE_TO_HOST, lambda done: back(slot, done))
            mover.submit(job, JobClass.NOW)

        def back(slot: int, done: Completion) -> None:
            nonlocal left, wrong
            check(done)
            wrong += not np.array_equal(host[slot], originals[slot])
            left -= 1
            if left >= slots:
                up(slot)

        start = time.perf_counter()
        for slot in range(slots):
            up(slot)
        drain(mover)
        self.add("trips", f"{trips} page round trips with random delays: wrong ones", wrong, "")
        self.add("trips", "of them a second", trips / (time.perf_counter() - start), "1/s")
        mover.close()
        copies.close()
        block.close()
        self.gpu.free_stream(stream)
        if wrong or left:
            raise AssertionError(f"{wrong} pages came back with other bytes, {left} did not come back")

    def weights(self) -> None:
        gpu_weights.run(self, DRY, Path(self.options.nvme))

    def experts(self) -> None:
        gpu_experts.run(self, DRY)

    def model(self) -> None:
        gpu_model.run(self, DRY, Path(self.options.nvme))


def check(done: Completion) -> None:
    """A copy that failed ends the part."""
    if done.error is not None:
        raise done.error


def drain(mover: Mover) -> None:
    """Waits for everything that was submitted."""
    while mover.outstanding:
        if not mover.wait(30):
            raise TimeoutError("a copy has not ended in 30 seconds")
        for done in mover.drain():
            done.job.on_done(done)


def open_card() -> tuple[Gpu, torch.device]:
    """The card, or one that is made of CPU memory. Raises GpuError when there is none."""
    if DRY:
        from tests.kernels.gpu import bfloat16
        from tests.tiers.fake_gpu import FakeGpu

        bfloat16.teach()
        torch.set_num_threads(1)
        return FakeGpu(), torch.device("cpu")
    gpu = CudaDriver()
    if not torch.cuda.is_available():
        raise GpuError(f"torch {torch.__version__} can't use the card: it is built without CUDA, or the driver is old")
    torch.cuda.init()
    return gpu, torch.device("cuda", 0)


def main() -> int:
    """0 when all that ran is right, 1 when a part failed, 2 without a card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", default="", help="write the figures to this file")
    parser.add_argument("--only", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--cap", type=float, default=24.0, help="GB of memory of the card that may be used")
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a directory on the disk that is measured")
    parser.add_argument("--dry", action="store_true", help="tiny sizes in the interpreter, without a card")
    options = parser.parse_args()
    try:
        gpu, device = open_card()
    except GpuError as exc:
        print(f"this machine has no card that tierd can use: {exc.strerror or exc}", file=sys.stderr)
        return 2
    facts: dict[str, Any] = {"torch": torch.__version__, "card": "none (dry)", "cap_gb": options.cap}
    if not DRY:
        properties = torch.cuda.get_device_properties(device)
        facts |= {"card": properties.name, "memory_gb": properties.total_memory / 1e9}
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap * 1e9 / properties.total_memory))
    print(facts)
    bench, failed, begun = Bench(gpu, device, options), [], time.perf_counter()
    for part in options.only.split(","):
        try:
            getattr(bench, part)()
        except Exception as exc:  # the other parts still have something to say
            if DRY:
                raise
            failed.append(f"{part}: {type(exc).__name__}: {exc}")
            print("FAILED", failed[-1], flush=True)
        if not DRY:
            torch.cuda.empty_cache()
    facts["seconds"] = round(time.perf_counter() - begun, 1)
    missed = [row for row in bench.rows if row.target and row.share < row.target]
    print(f"{len(bench.rows)} figures in {facts['seconds']} s, {len(missed)} below target, {len(failed)} parts failed")
    if options.json:
        found = {**facts, "failed": failed, "rows": [asdict(row) for row in bench.rows]}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed else 0

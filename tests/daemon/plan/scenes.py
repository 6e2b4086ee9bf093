"""Machines that tests plan for."""

from __future__ import annotations

from typing import Any

from tierd.daemon.plan.cost import Machine
from tierd.daemon.plan.known import known_shape
from tierd.daemon.plan.planner import Format, Task
from tierd.daemon.plan.processors import Cores
from tierd.daemon.plan.rates import FORMAT_VERSION, Compute, DiskRate, Fingerprint, Loop, Measured, Streaming
from tierd.daemon.plan.weights import weight_bytes

GB = 10**9
FINGERPRINT = Fingerprint("a processor", 2, 24 << 30, "fe00")
COMPUTE = Compute("int4-g32", (1, 8, 512), (1e-10, 4e-10, 2e-8), (1e-10, 4e-10, 2e-8), {"fp32": 1e-10}, {"fp32": 5e-11})
LOOP = Loop(1e-3, 1e-4, 1e-2)
MEASURED = Measured(
    FORMAT_VERSION, FINGERPRINT, 1.7e9, 20e9, (DiskRate(128 << 10, 5e8, 3e8), DiskRate(1 << 20, 2e9, 4e8)),
    {"int4-g32": COMPUTE}, LOOP, Streaming(1e9, 1e-10, 2e9, 1e-10),
)  # fmt: skip
CORES = Cores(COMPUTE, LOOP)
CPU = Machine(True, 16 * GB, 0, 20 * GB, 1.0, 2e9, 1e9, 1e-10, 1e-10)


def task(name: str = "llama-3-8b", **changes: Any) -> Task:
    """A model in int4 with fp32 pages on 16 GB, one stream, 896 + 128 tokens."""
    shape = known_shape(name)
    values: dict[str, Any] = {
        "shape": shape, "formats": (Format("int4-g32", weight_bytes(shape, "int4-g32"), "fp32", CORES),),
        "machine": CPU, "prompt_tokens": 896, "answer_tokens": 128, "streams": 1,
        "throughput": False, "workspace": lambda streams: 1000 * streams, "request_s": LOOP.request_s,
    }  # fmt: skip
    return Task(**values | changes)

"""Measures this machine for the planner: `python -m tierd.daemon.engine.measure`, started by `tierd doctor --measure`.

What is timed is the real thing: the decoder on a prepared model or, for each weight format, on a random one whose
weights fill more than a cache; the whole engine on that prepared model; pages and weights streamed past a decoder. The
request comes as JSON on the standard input, progress goes to the standard error, one line each, and the result, a
`plan.rates.Measured`, to the standard output. It runs as a process of its own, because it imports the kernels.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tierd.daemon.plan import rates
from tierd.daemon.plan.disk import probe_disk
from tierd.kernels.cpu.cache import cache_directory

if TYPE_CHECKING:
    from tierd.daemon.engine.measure_decoder import Rig

ROUNDS = 3
FORMATS = ("int4-g32", "int8-g32", "bf16", "fp32")
DISK_SIZES = (128 << 10, 1 << 20)  # a read of some layers of a page, and about a whole page or a record
DISK_BYTES = 192 << 20
MAX_DISK_S = 2.0  # of reading or writing at one size, on a slow disk


class Request(msgspec.Struct, frozen=True):
    """What to measure. `formats`: of random models; `model_dir`: empty for none."""

    cache_dir: str
    threads: int
    memory_bytes: int
    kv_format: str
    model_dir: str = ""
    formats: tuple[str, ...] = FORMATS
    rounds: int = ROUNDS


def main() -> int:
    """Measure what the standard input asks for; returns the exit code."""
    request = msgspec.json.decode(sys.stdin.buffer.read(1 << 20), type=Request)
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_directory(Path(request.cache_dir) / "numba")))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # as in an engine
    measured = measure(request, lambda text: sys.stderr.write(text + "\n"))
    sys.stdout.buffer.write(msgspec.json.encode(measured))
    sys.stdout.flush()
    return 0


def measure(request: Request, tell: Callable[[str], object]) -> rates.Measured:
    """All of it; `tell` hears what is being measured. Raises OSError when the cache directory can't be written."""
    cache_dir = Path(request.cache_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    fingerprint = rates.fingerprint(cache_dir, request.threads, request.memory_bytes)
    fallback = rates.assumed(fingerprint)
    compute: dict[str, rates.Compute] = {}
    memory_bytes_per_s = fallback.memory_bytes_per_s
    loop = fallback.loop
    with tempfile.TemporaryDirectory(prefix="measure-", dir=cache_dir) as work:
        tell("the disk")
        disk = tuple(probe_disk(Path(work), size, DISK_BYTES, MAX_DISK_S).rate for size in DISK_SIZES)
        from tierd.daemon.engine import measure_decoder as decoder  # the kernels: compiled at the first use

        for format in request.formats:
            tell(f"a random model in {format}")
            with decoder.random_rig(format, request.threads, request.kv_format) as rig:
                compute[format] = decoder.compute_rates(rig, request.rounds)
                if format == "fp32":  # nothing but reading memory: a multiplication for each number read
                    memory_bytes_per_s = 4.0 / compute[format].layer_s[0]
        if request.model_dir:
            from tierd.daemon.engine import measure_engine as engine

            tell(f"the model in {request.model_dir}")
            digest, own = engine.model_rates(Path(request.model_dir), request)
            compute[f"model:{digest}"] = own
            tell("an engine around it")
            loop = engine.loop_costs(Path(request.model_dir), Path(work), request)
        tell("pages and weights streamed past the decoder")
        with _streaming_rig(request) as rig:
            pages = decoder.page_rates(rig, Path(work) / "store", request.rounds)
            streaming = rates.Streaming(*pages, *decoder.weight_rates(Path(work) / "weights", rig, request.rounds))
    return rates.Measured(
        rates.FORMAT_VERSION, fingerprint, time.time(), memory_bytes_per_s, disk, compute, loop, streaming
    )


def _streaming_rig(request: Request) -> contextlib.AbstractContextManager[Rig]:
    """What streams: the model, for small records come slower than large ones, or a random one."""
    if request.model_dir:
        from tierd.daemon.engine.measure_engine import model_rig

        return model_rig(Path(request.model_dir), request.threads, request.kv_format)
    from tierd.daemon.engine.measure_decoder import random_rig

    return random_rig(FORMATS[0], request.threads, request.kv_format)


if __name__ == "__main__":
    sys.exit(main())

"""What pages that are packed more on the disk cost and bring: rates of the codec, bytes of a token.

    python -m tests.bench.stored [--model-dir DIR] [--kv-format fp32] [--pages 64] [--rounds 5]

Each format is encoded and decoded in one thread, alternating with a plain copy of the same pages; medians are printed.
Rates count bytes of memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tierd.daemon.models.catalog import load_manifest
from tierd.kernels.cpu.quant import PageCodec
from tierd.kernels.layout import PAGE_FORMATS, PAGE_TOKENS, PageLayout

REPOSITORY = Path(__file__).resolve().parents[2]


def rate(work: Callable[[], None], num_bytes: int) -> float:
    """Bytes a second of one run."""
    start_s = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, default=REPOSITORY / ".cache" / "test-models" / "smollm2-135m")
    parser.add_argument("--kv-format", default="fp32", choices=PAGE_FORMATS)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    spec = load_manifest(options.model_dir).spec
    memory = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, options.kv_format)
    numbers = np.random.default_rng(0).standard_normal((options.pages, memory.record_bytes // 4), np.float32)
    pages = numbers.view(np.uint8)
    if options.kv_format != "fp32":
        exact = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim)
        codec = PageCodec(exact, memory)
        source = np.random.default_rng(0).standard_normal(exact.record_bytes // 4).astype(np.float32).view(np.uint8)
        for page in pages:
            codec.encode(source, page)
    back, total = np.empty_like(pages), pages.nbytes
    print(f"{options.kv_format}: {memory.record_bytes / PAGE_TOKENS:.0f} bytes of a token in memory")
    print(f"{'stored':8}{'bytes':>8}{'share':>8}{'encode':>12}{'decode':>12}{'copy':>12}")
    for name in PAGE_FORMATS:
        stored = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, name)
        if stored.record_bytes >= memory.record_bytes:
            continue
        codec, packed = PageCodec(memory, stored), np.empty((options.pages, stored.record_bytes), np.uint8)

        def encode(codec: PageCodec = codec, packed: np.ndarray = packed) -> None:
            for page, row in zip(pages, packed, strict=True):
                codec.encode(page, row)

        def decode(codec: PageCodec = codec, packed: np.ndarray = packed) -> None:
            for page, row in zip(back, packed, strict=True):
                codec.decode(row, page, spec.num_layers)

        found: dict[str, list[float]] = {"encode": [], "decode": [], "copy": []}
        for round_ in range(options.rounds + 1):
            for what, work in (("encode", encode), ("decode", decode), ("copy", lambda: np.copyto(back, pages))):
                speed = rate(work, total)
                if round_:
                    found[what].append(speed)
        rates = "".join(f"{statistics.median(found[what]) / 1e9:7.2f} GB/s" for what in found)
        share = stored.record_bytes / memory.record_bytes
        print(f"{name:8}{stored.record_bytes / PAGE_TOKENS:8.0f}{share:8.1%}{rates}")


if __name__ == "__main__":
    main()

"""Benchmarks, run by hand: `python -m tests.bench.NAME`. Kernels are compiled into the cache that the tests use."""

from __future__ import annotations

import os
from pathlib import Path

from tierd.kernels.cpu.cache import cache_directory

# Before anything imports numba: what is compiled beside the sources does not know that a function it calls was edited.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_directory(Path(__file__).resolve().parents[2] / ".cache" / "numba")))

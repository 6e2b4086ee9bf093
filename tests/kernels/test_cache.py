"""cache: the directory follows the sources, and finding it needs no numba."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tierd.kernels.cpu import cache


def test_changes_with_any_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    sources = [tmp_path / name for name in ("cpu/a.py", "cpu/b.py", "bits.py", "layout.py", "packing.py")]
    for source in sources:
        source.write_text("1")
    monkeypatch.setattr(cache, "_HERE", tmp_path / "cpu")
    seen = {cache.cache_directory(tmp_path)}
    assert seen == {cache.cache_directory(tmp_path)}
    for source in sources:
        source.write_text("2")
        seen.add(cache.cache_directory(tmp_path))
    assert len(seen) == 6 and all(directory.parent == tmp_path for directory in seen)


def test_needs_no_numba() -> None:
    code = "import sys, tierd.kernels.cpu.cache; assert 'numba' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)

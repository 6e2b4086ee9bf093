"""engine_config: an engine is told what its daemon was."""

from __future__ import annotations

from pathlib import Path

from tierd.daemon.config import load
from tierd.daemon.engine_config import engine_config
from tierd.daemon.machine import Sizes


def test_exact_tokens_reach_the_engine(tmp_path: Path) -> None:
    flags = {"kv_format": "k8v4", "kv_exact_first": 4, "kv_exact_last": 128}
    (tmp_path / "config.toml").write_text("")
    settings = load(flags, {}, tmp_path / "config.toml").settings
    told = engine_config(settings, Sizes(1, 2, 3, 4, 5), tmp_path)
    assert (told.kv_format, told.kv_exact_first, told.kv_exact_last) == ("k8v4", 32, 128)

"""Measuring: what comes out can be computed with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tierd.daemon.engine import measure, measure_decoder
from tierd.daemon.plan import rates


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes with which measuring takes a moment; the rates mean nothing then."""
    for name, value in {
        "DECODE_ROWS": (1, 4), "PROMPT_ROWS": (16, 32), "CHUNK_ROWS": 32, "LONG_TOKENS": 256, "STREAM_PAGES": 8,
        "RANDOM_BYTES": 1, "_HIDDEN": 64, "_INNER": 96, "_HEADS": 4, "_KV_HEADS": 2, "_HEAD_DIM": 16, "_VOCAB": 64,
    }.items():  # fmt: skip
        monkeypatch.setattr(measure_decoder, name, value)


@pytest.mark.parametrize("format", measure.FORMATS)
def test_the_rates_of_a_decoder(small: None, format: str) -> None:
    with measure_decoder.random_rig(format, 2, "fp32") as rig:
        found = measure_decoder.compute_rates(rig, 1)
    assert found.format == format and found.rows == (1, 4, 16, 32)
    assert rates._sound(found)
    assert set(found.attend_s) == set(found.attend_many_s) == {"fp32"}


def test_the_rates_of_streaming(small: None, tmp_path: Path) -> None:
    with measure_decoder.random_rig("int4-g32", 2, "fp32") as rig:
        for per_s, cost_s in (
            measure_decoder.page_rates(rig, tmp_path / "store", 1),
            measure_decoder.weight_rates(tmp_path / "weights", rig, 1),
        ):
            assert per_s > 0 and cost_s >= 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_whole_measurement_of_a_model(model_dir: Path, tmp_path: Path) -> None:
    request = measure.Request(str(tmp_path / "cache"), 2, 1 << 30, "fp32", str(model_dir), (), 1)
    done = subprocess.run(
        [sys.executable, "-m", "tierd.daemon.engine.measure"], input=msgspec.json.encode(request), capture_output=True,
        check=True, timeout=500,
    )  # fmt: skip
    found = msgspec.json.decode(done.stdout, type=rates.Measured)
    manifest = json.loads((model_dir / "manifest.json").read_text())
    compute, what = found.compute_for(manifest["digest"], "int4-g32")
    assert what == "this model" and set(compute.attend_s) == {"fp32", "fp16", "k8v4"}
    assert found.loop.step_s + found.loop.stream_s > 0
    rates.save(tmp_path / "cache", found)
    assert rates.load(tmp_path / "cache", found.fingerprint) == found

"""Weight formats that nobody asked for by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tierd.daemon.config import Settings
from tierd.daemon.machine import Machine
from tierd.daemon.plan.choose_format import Chosen, choose_format, fitting_format
from tierd.daemon.plan.known import known_shape
from tierd.daemon.plan.weights import weight_bytes

GB = 10**9
SHAPE = known_shape("llama-3-8b")


def choose(tmp_path: Path, available: int, own: str = "bf16", **asked: Any) -> Chosen:
    settings = dataclasses.replace(Settings(Path("/m"), tmp_path, Path("/s")), ctx=2048, threads=2, **asked)
    assert SHAPE.spec is not None
    machine = Machine(64 * GB, available, 100 * GB)
    return choose_format(SHAPE.spec, own, weight_bytes(SHAPE, own).total, settings, machine)


@pytest.mark.parametrize(
    ("available", "format"), [(40 * GB, None), (14 * GB, "int8-g32"), (9 * GB, "int4-g32"), (3 * GB, "int4-g32")]
)
def test_as_exact_as_fits(tmp_path: Path, available: int, format: str | None) -> None:
    chosen = choose(tmp_path, available)
    assert chosen.format == format
    assert ("don't fit" in chosen.why) == (format is not None)
    assert ("streamed" in chosen.why) == (available == 3 * GB)


def test_the_memory_for_weights_that_was_asked_for_counts(tmp_path: Path) -> None:
    assert choose(tmp_path, 40 * GB, weights_mem=9 * GB).format == "int8-g32"


@pytest.mark.parametrize(("own", "format"), [("int4-g32", None), ("int8-g32", "int4-g32")])
def test_never_wider_than_the_source(tmp_path: Path, own: str, format: str | None) -> None:
    assert choose(tmp_path, 3 * GB, own).format == format


@pytest.mark.parametrize(("available", "format"), [(14 * GB, "int8-g32"), (9 * GB, "int4-g32"), (3 * GB, None)])
def test_one_that_fits_is_the_one_that_a_pull_chooses(tmp_path: Path, available: int, format: str | None) -> None:
    settings = dataclasses.replace(Settings(Path("/m"), tmp_path, Path("/s")), ctx=2048, threads=2)
    assert SHAPE.spec is not None
    found = fitting_format(SHAPE.spec, 16 * GB, settings, Machine(64 * GB, available, 100 * GB))
    assert (found.format if found else None) == format
    if found is not None:
        assert found.bytes == weight_bytes(SHAPE, found.format).total
        assert choose(tmp_path, available).format == format

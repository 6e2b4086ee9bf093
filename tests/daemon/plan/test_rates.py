"""Measurements: kept, found again, refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.daemon.plan.scenes import COMPUTE, FINGERPRINT, MEASURED
from tierd.daemon.plan import rates


def test_kept_and_found_again(tmp_path: Path) -> None:
    rates.save(tmp_path / "cache", MEASURED)
    assert rates.load(tmp_path / "cache", FINGERPRINT) == MEASURED
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [rates.FILE_NAME]


@pytest.mark.parametrize("change", [{"cpu": "another"}, {"threads": 4}, {"memory_bytes": 1}, {"disk": "ffff"}])
def test_of_another_machine_it_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    rates.save(tmp_path, MEASURED)
    assert rates.load(tmp_path, msgspec.structs.replace(FINGERPRINT, **change)) is None


BROKEN = [
    b"", b"{", b"[]", b"\xff", b"[" * 100_000, msgspec.json.encode(msgspec.structs.replace(MEASURED, version=99)),
    msgspec.json.encode(msgspec.structs.replace(MEASURED, compute={})),
    *(
        msgspec.json.encode(
            msgspec.structs.replace(MEASURED, compute={"x": msgspec.structs.replace(COMPUTE, **change)})
        )
        for change in ({"rows": (1, 2)}, {"rows": (8, 1, 512)}, {"layer_s": (0.0, 1.0, 1.0)}, {"attend_s": {}})
    ),
]  # fmt: skip


@pytest.mark.parametrize("raw", BROKEN, ids=range(len(BROKEN)))
def test_what_cannot_be_computed_with_is_none(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / rates.FILE_NAME).write_bytes(raw)
    assert rates.load(tmp_path, FINGERPRINT) is None


def test_straight_lines_between_rows() -> None:
    assert COMPUTE.layer_element_s(1) == 1e-10
    assert COMPUTE.layer_element_s(4.5) == pytest.approx(2.5e-10)
    assert COMPUTE.layer_element_s(1024) == pytest.approx(4e-8)
    assert COMPUTE.head_element_s(0) == 0
    assert COMPUTE.attention_s("fp16", prompt=False) == 1e-10  # not measured: that of what was


def test_the_rates_nearest_to_a_model() -> None:
    other = msgspec.structs.replace(COMPUTE, format="fp32")
    measured = msgspec.structs.replace(MEASURED, compute={"int4-g32": COMPUTE, "fp32": other, "model:abc": COMPUTE})
    assert measured.compute_for("abc", "fp32")[1] == "this model"
    assert measured.compute_for("", "fp32") == (other, "a random model in fp32")
    assert measured.compute_for("", "int8-g32")[0] == COMPUTE
    assert measured.compute_for("", "bf16")[1] == "a model in int4-g32, not bf16"
    assert measured.disk_rate(200_000).request_bytes == 128 << 10


def test_assumed_figures_say_so_and_read_no_faster_than_memory() -> None:
    found = rates.assumed(FINGERPRINT)
    assert found.assumed
    for name, compute in found.compute.items():
        assert compute.layer_s[0] >= rates.BITS[name] / 8 / found.memory_bytes_per_s


def test_the_fingerprint_of_a_directory_that_is_not_there(tmp_path: Path) -> None:
    there, absent = (rates.fingerprint(path, 2, 100) for path in (tmp_path, tmp_path / "a" / "b"))
    assert there == absent and there.cpu

"""Measurements: kept, found again, refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.daemon.plan.scenes import COMPUTE, FINGERPRINT, MEASURED
from tierd.daemon.machine import total_memory_bytes
from tierd.daemon.plan import rates
from tierd.kernels.packing import WeightFormat


def test_kept_and_found_again(tmp_path: Path) -> None:
    rates.save(tmp_path / "cache", MEASURED)
    assert rates.load(tmp_path / "cache", FINGERPRINT) == MEASURED
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [rates.FILE_NAME]


def test_here_what_was_measured_here_counts(tmp_path: Path) -> None:
    here = rates.fingerprint(tmp_path, 2, total_memory_bytes())
    assert rates.of_this_machine(tmp_path, 2) == rates.assumed(here)
    measured = msgspec.structs.replace(MEASURED, fingerprint=here)
    rates.save(tmp_path, measured)
    assert rates.of_this_machine(tmp_path, 2) == measured
    assert rates.of_this_machine(tmp_path, 3).assumed


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


@pytest.mark.parametrize("format", list(WeightFormat))
def test_every_weight_format_is_alike_to_one_of_its_bits(format: WeightFormat) -> None:
    names = ("fp32", "bf16", "int8-g32", "int4-g32")  # what is measured
    table = {name: msgspec.structs.replace(COMPUTE, format=name) for name in names}
    nearest = msgspec.structs.replace(MEASURED, compute=table).compute_for("", format)[0].format
    wanted = {"fp32": "fp32", "bf16": "bf16"}.get(format, "int8-g32" if format.startswith("int8") else "int4-g32")
    assert nearest == wanted and rates.assumed(FINGERPRINT).compute_for("", format)[0].format == format


MOUNTS = """\
21 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 21 0:25 / {cache} rw - btrfs /dev/sdb1 rw,space_cache
31 21 0:26 / {spaced} rw shared:7 master:2 - xfs /dev/sdc1 rw
32 21 0:27 / {cache} rw - tmpfs tmpfs rw
a line that is none
"""


def test_a_disk_has_the_name_of_what_is_mounted(tmp_path: Path) -> None:
    cache, spaced, mounts = tmp_path / "cache", tmp_path / "my disk", tmp_path / "mountinfo"
    for directory in (cache / "kv", spaced):
        directory.mkdir(parents=True)
    mounts.write_text(MOUNTS.format(cache=cache, spaced=str(spaced).replace(" ", "\\040")))
    assert rates.disk_name(cache / "kv", mounts) == "tmpfs tmpfs"  # what was mounted over the other
    assert rates.disk_name(spaced, mounts) == "xfs /dev/sdc1"
    assert rates.disk_name(tmp_path, mounts) == "ext4 /dev/nvme0n1p2"
    assert rates.disk_name(tmp_path, tmp_path / "nowhere") == f"{tmp_path.stat().st_dev:x}"
    assert rates.fingerprint(cache / "not" / "yet", 2, 1).disk == rates.disk_name(cache)


def test_assumed_figures_say_so_and_read_no_faster_than_memory() -> None:
    found = rates.assumed(FINGERPRINT)
    assert found.assumed
    for name, compute in found.compute.items():
        assert compute.layer_s[0] >= rates.BITS[name] / 8 / found.memory_bytes_per_s


def test_the_fingerprint_of_a_directory_that_is_not_there(tmp_path: Path) -> None:
    there, absent = (rates.fingerprint(path, 2, 100) for path in (tmp_path, tmp_path / "a" / "b"))
    assert there == absent and there.cpu

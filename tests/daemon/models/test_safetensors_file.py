"""Sound files are read as the safetensors library reads them; damaged or unsafe ones are refused."""

import json
import pickle
import random
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import GgmlType
from tierd.daemon.models.safetensors_file import INDEX_NAME, SafetensorsFile, model_files


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refused(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    started = time.process_time()
    with pytest.raises(ModelFileError, match=match):
        SafetensorsFile(path)
    assert time.process_time() - started < 1


def test_reads_what_was_saved(tmp_path):
    rng = np.random.default_rng(0)
    saved = {
        "a": rng.standard_normal((6, 4)).astype(np.float32),
        "b": rng.standard_normal(5).astype(np.float16),
        "c": np.arange(3, dtype=np.int64),
    }
    save_file(saved, tmp_path / "m.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.path.name == "m.safetensors" and set(file.tensors) == set(saved)
    a, b = file.tensors["a"], file.tensors["b"]
    assert (a.rows, a.cols, a.num_dims, a.kind) == (6, 4, 2, GgmlType.F32)
    assert (b.rows, b.cols, b.num_dims, b.kind) == (1, 5, 1, GgmlType.F16)
    np.testing.assert_array_equal(file.read_rows(a, 2, 4).view(np.float32), saved["a"][2:4])
    np.testing.assert_array_equal(file.read_rows(b, 0, 1).view(np.float16)[0], saved["b"])
    with pytest.raises(ModelFileError, match="tensor c is I64; supported are F32, F16, BF16"):
        _ = file.tensors["c"].kind
    with pytest.raises(ValueError, match="rows 0:7"):
        file.read_rows(a, 0, 7)
    file.close()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "truncated"),
        (raw({}, length=1 << 62), "claims a header"),
        (raw({}, length=101_000_000), "claims a header"),
        (raw(b"[]"), "isn't a safetensors file"),
        (raw(b"{"), "isn't valid JSON"),
        (raw(b'{"a": ' + b"[" * 100_000), "description that is too long|isn't valid JSON"),
        (raw(b'{"a":' + b'"' + b":" * 2_000_000 + b'"}'), "too many entries"),
        (raw({f"t{i}": 0 for i in range(70_000)}), "70,000 tensors"),
        (raw({"a": 1}), "the file is damaged"),
        (raw({"a": {**entry([1], 0, 4), "extra": 1}}, bytes(4)), "unknown field `extra`"),
        (raw({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)), "missing required field"),
        (raw({"a": entry([1], 0, 4, "F99")}, bytes(4)), "unknown type 'F99'"),
        (raw({"a": entry([-1, -1], 0, 4)}, bytes(4)), "shape that isn't valid"),
        (raw({"a": entry([1] * 9, 0, 4)}, bytes(4)), "shape that isn't valid"),
        (raw({"a": entry([1 << 62, 1 << 62], 0, 4)}, bytes(4)), "damaged or truncated"),
        (raw({"a": entry([2], 0, 4)}, bytes(4)), "damaged or truncated"),
        (raw({"a": entry([1], 4, 8)}, bytes(4)), "damaged or truncated"),
        (raw({"a": entry([1], -4, 0)}, bytes(4)), "damaged or truncated"),
        (raw({"a": entry([1], 4, 8)}, bytes(8)), "leaves a gap"),
        (raw({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)), "overlaps"),
        (raw({"a": entry([1], 0, 4)}, bytes(8)), "longer or shorter"),
        (raw({"a" * 2000: entry([1], 0, 4)}, bytes(4)), "too long"),
        (raw({"a": entry([1] * 2000, 0, 4)}, bytes(4)), "too long"),
    ],
)
def test_damage_is_refused(tmp_path, data, match):
    refused(tmp_path, data, match)


class Bomb:
    """A pickle that would write a file when loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_by_another_name_is_refused_and_not_run(tmp_path, protocol):
    trace = tmp_path / "ran"
    refused(tmp_path, pickle.dumps(Bomb(str(trace)), protocol=protocol) + bytes(64), "safetensors|header")
    assert not trace.exists()


def test_files_of_a_directory(tmp_path):
    with pytest.raises(ModelFileError, match="has no safetensors file"):
        model_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"pytorch_model.bin can run code"):
        model_files(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"x")
    assert [p.name for p in model_files(tmp_path)] == ["a.safetensors"]
    (tmp_path / "b.safetensors").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="several safetensors"):
        model_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert [p.name for p in model_files(tmp_path)] == ["model.safetensors"]
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    assert [p.name for p in model_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors", "/etc/passwd", "..", "", "a/../../b.safetensors", "sub/a.safetensors",
        ".hidden.safetensors", "a.bin", "a.safetensors\n", "a.safetensors\0.bin", "~/a.safetensors",
        "C:\\a.safetensors", "a\\b.safetensors", "-a.safetensors", "ａ.safetensors", "a.safetensors/",
        "a" * 300 + ".safetensors",
    ],
)  # fmt: skip
def test_an_index_can_not_leave_the_directory(tmp_path, name):
    (tmp_path / "a.safetensors").write_bytes(b"x")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelFileError, match="no plain file name"):
        model_files(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map"'])
def test_damaged_indexes(tmp_path, text):
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(ModelFileError, match="index.json"):
        model_files(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"gone.safetensors is missing"):
        model_files(tmp_path)


def fuzz(tmp_path: Path, rounds: int) -> None:
    save_file({f"t{i}": np.ones((i + 1, 3), np.float32) for i in range(20)}, tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    rng = random.Random(5)
    refusals, slowest_s = 0, 0.0
    for _ in range(rounds):
        mutated = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(end)
            match rng.randrange(3):
                case 0:
                    mutated[at] = rng.randrange(256)
                case 1:
                    mutated[at : at + 1] = rng.choice([b"9" * 30, b"-1", b"null", b"[[[[", b'"', b"1e999", b"{}"])
                case _:
                    del mutated[at : at + rng.randint(1, 40)]
        (tmp_path / "bad.safetensors").write_bytes(mutated)
        started = time.process_time()
        try:
            SafetensorsFile(tmp_path / "bad.safetensors").close()
        except ModelFileError:
            refusals += 1
        slowest_s = max(slowest_s, time.process_time() - started)
    assert slowest_s < 1
    assert refusals > rounds // 2


def test_fuzz(tmp_path):
    fuzz(tmp_path, 2000)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fuzz_long(tmp_path):
    fuzz(tmp_path, 50_000)


def test_truncations(tmp_path):
    save_file({"a": np.ones((100, 30), np.float32)}, tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    for size in [*range(0, 200), *range(200, len(data), 997), len(data) - 1]:
        refused(tmp_path, data[:size], "truncated|header|damaged")

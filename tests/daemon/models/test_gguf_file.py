"""Sound files are read as the `gguf` package reads them; damaged ones give one kind of error, soon."""

import random
import struct
import time

import gguf
import numpy as np
import pytest

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.gguf_file import GgufFile


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(tensors: int = 0, keys: bytes = b"", num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, num_keys) + keys


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def refused(tmp_path, data: bytes, match: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    started = time.process_time()
    with pytest.raises(ModelFileError, match=match):
        GgufFile(path)
    assert time.process_time() - started < 1


def test_reads_what_the_gguf_package_reads(tmp_path, make_gguf):
    path = tmp_path / "m.gguf"
    stored = make_gguf(path, "llama", "Q4_1")
    theirs = gguf.GGUFReader(path)
    with GgufFile(path) as file:
        assert file.path == path
        assert set(file.tensors) == {t.name for t in theirs.tensors} == set(stored)
        for t in theirs.tensors:
            ours = file.tensors[t.name]
            assert (ours.offset, ours.size_bytes, ours.type_id) == (t.data_offset, t.n_bytes, int(t.tensor_type))
            raw = file.read_rows(ours, 0, ours.rows)
            np.testing.assert_array_equal(raw.reshape(-1), np.asarray(t.data).view(np.uint8).reshape(-1))
            np.testing.assert_array_equal(file.read_rows(ours, ours.rows - 1, ours.rows), raw[-1:])
        for key, field in theirs.fields.items():
            if not key.startswith("GGUF."):
                value = file.metadata[key]
                expected = field.contents()
                assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected
        with pytest.raises(ValueError, match="rows 0:999"):
            file.read_rows(file.tensors["token_embd.weight"], 0, 999)


def test_many_strings_beyond_the_read_ahead(tmp_path):
    words = [f"token-{i}" * 3 for i in range(60_000)]
    keys = text("a") + struct.pack("<IIQ", 9, 8, len(words)) + b"".join(map(text, words))
    path = tmp_path / "m.gguf"
    path.write_bytes(header(keys=keys, num_keys=1))
    with GgufFile(path) as file:
        assert file.metadata["a"] == words


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "truncated"),
        (b"GGU", "truncated"),
        (b"PK\x03\x04" + bytes(100), "isn't a GGUF file"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=1 << 63), "number of tensors"),
        (header(num_keys=1 << 40), "number of keys"),
        (header(num_keys=1), "truncated"),
        (header(num_keys=1, keys=struct.pack("<Q", 1 << 62)), "length of a key"),
        (header(num_keys=1, keys=text("k") + struct.pack("<I", 77)), "unknown value type 77"),
        (header(num_keys=2, keys=(text("k") + struct.pack("<IB", 0, 1)) * 2), "occurs twice"),
        (header(num_keys=1, keys=text("k") + struct.pack("<II", 9, 9)), "nests arrays"),
        (header(num_keys=1, keys=text("k") + struct.pack("<IIQ", 9, 10, 1 << 61)), "number of items"),
        (header(num_keys=1, keys=text("k") + struct.pack("<IIQ", 9, 10, 1 << 20)), "truncated"),
        (header(num_keys=1, keys=text("k") + struct.pack("<IIQ", 9, 8, 1 << 20)), "truncated"),
        (header(num_keys=1, keys=text("k") + struct.pack("<IQ", 8, 1 << 40)), "length of key"),
        (header(num_keys=1, keys=struct.pack("<Q", 2) + b"\xff\xfe"), "isn't UTF-8"),
        (header(num_keys=1, keys=text("general.alignment") + struct.pack("<II", 4, 0)), "alignment is 0"),
        (header(num_keys=1, keys=text("general.alignment") + struct.pack("<II", 4, 48)), "power of two"),
        (header(num_keys=1, keys=text("general.alignment") + struct.pack("<II", 4, 1 << 21)), "alignment is 2097152"),
        (header(num_keys=1, keys=text("general.alignment") + struct.pack("<If", 6, 32.0)), "isn't a number"),
        (header(1) + tensor("t", []), "0 dimensions"),
        (header(1) + tensor("t", [1] * 5), "5 dimensions"),
        (header(1) + tensor("t", [4, 0]), "empty dimension"),
        (header(1) + tensor("t", [1 << 62, 4]), "a dimension of 't'"),
        (header(1) + tensor("t", [400, 400, 400, 400]), "truncated"),
        (header(1) + tensor("t", [33], kind=8), "isn't whole Q8_0 blocks"),
        (header(1) + tensor("t", [32], kind=1000), "unknown tensor type 1000"),
        (header(1) + tensor("t", [4], offset=1 << 60), "truncated"),
        (header(1) + tensor("t", [4], offset=5) + bytes(100), "isn't aligned"),
        (header(2) + tensor("t", [4]) + tensor("t", [4], offset=32) + bytes(100), "occurs twice"),
        (header(2) + tensor("t", [16]) + tensor("u", [4], offset=32) + bytes(200), "overlap"),
    ],
)
def test_damage_is_refused(tmp_path, data, match):
    refused(tmp_path, data, match)


def test_arrays_are_bounded_together(tmp_path):
    """Three arrays that are each allowed, of strings of no bytes, are too many together."""
    empty = bytes(8) * 400_000
    keys = b"".join(text(f"k{i}") + struct.pack("<IIQ", 9, 8, 400_000) + empty for i in range(3))
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(num_keys=3, keys=keys))
    with pytest.raises(ModelFileError, match="number of items"):
        GgufFile(path)


def test_every_truncation_of_the_header(tmp_path, make_gguf):
    path = tmp_path / "m.gguf"
    make_gguf(path)
    data = path.read_bytes()
    with GgufFile(path) as file:
        first_data = min(t.offset for t in file.tensors.values())
    for size in [*range(0, first_data, 7), *range(first_data, len(data), 9973), len(data) - 1]:
        refused(tmp_path, data[:size], "truncated|incomplete")


def fuzz(tmp_path, make_gguf, rounds: int) -> None:
    """Mutations of a sound header: each is read or refused, none takes a second or raises anything else."""
    path, bad = tmp_path / "m.gguf", tmp_path / "bad.gguf"
    make_gguf(path)
    data = path.read_bytes()
    with GgufFile(path) as file:
        first_data = min(t.offset for t in file.tensors.values())
    rng = random.Random(20)
    nasty = [b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << 63), struct.pack("<q", -1), b"\x7f\xff\xff", b"\x09\0\0\0"]
    refusals, slowest_s = 0, 0.0
    for _ in range(rounds):
        mutated = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(4, first_data)
            match rng.randrange(3):
                case 0:
                    mutated[at] = rng.randrange(256)
                case 1:
                    piece = rng.choice(nasty)
                    mutated[at : at + len(piece)] = piece
                case _:
                    del mutated[at : at + rng.randint(1, 40)]
        bad.write_bytes(mutated)
        started = time.process_time()
        try:
            with GgufFile(bad) as file:
                for t in file.tensors.values():
                    file.read_rows(t, 0, 1)
        except ModelFileError:
            refusals += 1
        slowest_s = max(slowest_s, time.process_time() - started)
    assert slowest_s < 1
    assert refusals > rounds // 3


def test_fuzz(tmp_path, make_gguf):
    fuzz(tmp_path, make_gguf, 2000)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fuzz_long(tmp_path, make_gguf):
    fuzz(tmp_path, make_gguf, 50_000)

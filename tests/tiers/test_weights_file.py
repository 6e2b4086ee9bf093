"""Files of weights: the right bytes past the page cache, with and without O_DIRECT, and digests of their parts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.tiers.faults import HookedIO
from tierd.tiers.store_io import aligned_block
from tierd.tiers.weights_file import BATCHED_BYTES, Span, WeightFile, scan

pytestmark = pytest.mark.usefixtures("no_files_left")

SIZE = 3 * BATCHED_BYTES + 5 * 4096


class NoDirect(HookedIO):
    """A file system that refuses O_DIRECT, when the file is opened or when it is read."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.direct = False

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "open":
            self.direct = bool(args[1] & os.O_DIRECT)
        if name == self.at and self.direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(*args)


class NoBatches(HookedIO):
    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "preadv_batch":
            raise OSError(errno.ENOSYS, "Function not implemented")
        return call(*args)


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    data = np.random.default_rng(1).bytes(SIZE)
    (tmp_path / "w").write_bytes(data)
    return data


def read_parts(file: WeightFile) -> list[bytes]:
    blocks = [aligned_block(2 * BATCHED_BYTES + 4096), aligned_block(4096), aligned_block(8192)]
    file.read([(4096, blocks[0]), (SIZE - 4096, blocks[1]), (0, blocks[2])])
    return [block.tobytes() for block in blocks]


@pytest.mark.parametrize("io", [None, NoDirect("open"), NoDirect("preadv"), NoBatches()])
def test_bytes_come_from_where_they_lie(tmp_path: Path, content: bytes, io: HookedIO | None) -> None:
    file = WeightFile(tmp_path / "w", None if io is None else io.as_io())
    try:
        assert file.direct is not isinstance(io, NoDirect) and file.size_bytes == SIZE
        wanted = [content[4096 : 8192 + 2 * BATCHED_BYTES], content[-4096:], content[:8192]]
        assert read_parts(file) == wanted
        assert read_parts(file) == wanted
    finally:
        file.close()


def test_a_file_that_was_cut_is_an_error(tmp_path: Path, content: bytes) -> None:
    file = WeightFile(tmp_path / "w")
    os.truncate(tmp_path / "w", SIZE - 4096)
    with pytest.raises(OSError, match="ends too early"):
        read_parts(file)
    file.close()


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        WeightFile(tmp_path / "nothing")
    (tmp_path / "odd").write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="5000 bytes, which are no whole blocks"):
        WeightFile(tmp_path / "odd")


def test_spans_know_the_blocks_around_them() -> None:
    span = Span(10_000, 5_000)
    assert (span.lead, span.blocks_offset, span.blocks_bytes) == (1808, 8192, 8192)
    assert Span(4096, 4096).blocks_bytes == 4096 and Span(4095, 2).blocks_bytes == 8192


def test_one_pass_gives_the_digests_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(2).bytes(40 * 4096)
    (tmp_path / "w").write_bytes(data)
    monkeypatch.setattr("tierd.tiers.weights_file._SCAN_BYTES", 3 * 4096)  # parts reach over several blocks
    tables = [
        [Span(4096 + 64 + n * 700, 700) for n in range(100)],
        [Span(4096, 30 * 4096), Span(31 * 4096 + 1, 4095), Span(32 * 4096, 8192)],
        [],
    ]
    file = WeightFile(tmp_path / "w")
    whole, found = scan(file, Span(4096, 35 * 4096), tables)
    file.close()
    assert whole == xxhash.xxh3_128_hexdigest(data[4096 : 36 * 4096])
    wanted = [[xxhash.xxh3_128_hexdigest(data[s.offset : s.offset + s.num_bytes]) for s in spans] for spans in tables]
    assert found == wanted

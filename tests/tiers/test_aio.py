"""Batches of reads: what they bring, and what happens where there are none."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierd.tiers.aio import MAX_BATCH, MAX_CONTEXTS, AioReader
from tierd.tiers.store_io import Bytes, address_of, aligned_block

pytestmark = pytest.mark.usefixtures("no_files_left")


@pytest.fixture
def content(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """A file of 64 blocks and its content."""
    data = np.random.default_rng(1).bytes(64 * 4096)
    (tmp_path / "file").write_bytes(data)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    yield fd, data
    os.close(fd)


@pytest.fixture
def aio() -> Iterator[AioReader]:
    reader = AioReader()
    yield reader
    reader.close()


def vectors_of(block: Bytes, *lengths: int) -> Any:
    """Each row of the block as buffers of these lengths."""
    starts = np.cumsum([0, *lengths[:-1]])
    vectors = np.empty((len(block), len(lengths), 2), dtype=np.uint64)
    vectors[:, :, 0] = address_of(block) + np.arange(len(block))[:, None] * block.shape[1] + starts[None]
    vectors[:, :, 1] = lengths
    return vectors


def test_each_piece_fills_its_buffers(aio: AioReader, content: tuple[int, bytes]) -> None:
    fd, data = content
    order = np.random.default_rng(2).permutation(60)
    block = aligned_block(60 * 12288).reshape(60, 12288)
    for lengths in ((4096, 8192), (12288,), (4096, 4096, 4096)):
        block[:] = 0
        moved = aio.read(fd, order * 4096, vectors_of(block, *lengths))
        assert moved.tolist() == [12288] * 60
        for row, place in zip(block, order.tolist(), strict=True):
            assert row.tobytes() == data[place * 4096 : place * 4096 + 12288]


def test_pieces_at_the_end_and_of_bad_memory(aio: AioReader, content: tuple[int, bytes]) -> None:
    fd, data = content
    block = aligned_block(4 * 8192).reshape(4, 8192)
    vectors = vectors_of(block, 8192)
    vectors[2, 0, 0] = 4096  # nothing is mapped there
    moved = aio.read(fd, np.array([0, 63, 5, 64]) * 4096, vectors)
    assert moved.tolist() == [8192, 4096, -errno.EFAULT, 0]
    assert block[0].tobytes() == data[:8192]


def test_a_bad_descriptor_is_an_error_of_the_batch(aio: AioReader) -> None:
    block = aligned_block(4096).reshape(1, 4096)
    with pytest.raises(OSError, match="Bad file") as caught:
        aio.read(1_000_000, np.zeros(1, np.int64), vectors_of(block, 4096))
    assert caught.value.errno == errno.EBADF


def test_a_batch_is_bounded(aio: AioReader, content: tuple[int, bytes]) -> None:
    block = aligned_block((MAX_BATCH + 1) * 4096).reshape(-1, 4096)
    with pytest.raises(ValueError, match="at most"):
        aio.read(content[0], np.zeros(len(block), np.int64), vectors_of(block, 4096))
    moved = aio.read(content[0], np.zeros(MAX_BATCH, np.int64), vectors_of(block[:-1], 4096))
    assert moved.tolist() == [4096] * MAX_BATCH


def test_threads_have_contexts_of_their_own(aio: AioReader, content: tuple[int, bytes]) -> None:
    fd, data = content
    wrong: list[int] = []

    def work(seed: int) -> None:
        block = aligned_block(16 * 4096).reshape(16, 4096)
        rng = np.random.default_rng(seed)
        for _ in range(20):
            places = rng.integers(0, 64, 16)
            aio.read(fd, places * 4096, vectors_of(block, 4096))
            wrong.extend(
                place
                for row, place in zip(block, places.tolist(), strict=True)
                if row.tobytes() != data[place * 4096 : place * 4096 + 4096]
            )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(MAX_CONTEXTS + 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(aio._contexts) <= MAX_CONTEXTS


def test_a_machine_without_the_calls(aio: AioReader, content: tuple[int, bytes]) -> None:
    aio._calls = None
    with pytest.raises(OSError) as caught:
        aio.read(content[0], np.zeros(1, np.int64), vectors_of(aligned_block(4096).reshape(1, -1), 4096))
    assert caught.value.errno == errno.ENOSYS


@pytest.mark.parametrize(("name", "value"), [("platform", "darwin"), ("maxsize", (1 << 31) - 1)])
def test_no_call_is_made_where_its_number_is_another_one(
    monkeypatch: pytest.MonkeyPatch, content: tuple[int, bytes], name: str, value: object
) -> None:
    monkeypatch.setattr(sys, name, value)
    reader = AioReader()
    monkeypatch.undo()
    with pytest.raises(OSError) as caught:
        reader.read(content[0], np.zeros(1, np.int64), vectors_of(aligned_block(4096).reshape(1, -1), 4096))
    assert caught.value.errno == errno.ENOSYS


class Reluctant(AioReader):
    """Takes three pieces at a time, and refuses more after `limit` of them."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def _call(self, number: int, *arguments: int) -> int:
        if self._calls is not None and number == self._calls[3]:
            context, count, pointers = arguments
            count = min(count, 3, self.limit)
            self.limit -= count
            if not count:
                raise OSError(errno.EAGAIN, "the test says so")
            arguments = (context, count, pointers)
        return super()._call(number, *arguments)


def test_a_batch_that_is_taken_piece_by_piece(content: tuple[int, bytes]) -> None:
    fd, data = content
    reader, block = Reluctant(10), aligned_block(10 * 4096).reshape(10, 4096)
    assert reader.read(fd, np.arange(10) * 4096, vectors_of(block, 4096)).tolist() == [4096] * 10
    assert block.tobytes() == data[: 10 * 4096]
    reader.close()


def test_a_batch_that_is_refused_halfway_leaves_nothing_under_way() -> None:
    reader, block = Reluctant(4), aligned_block(10 * 4096).reshape(10, 4096)
    fd = os.open("/dev/zero", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="the test says so"):
            reader.read(fd, np.arange(10) * 4096, vectors_of(block, 4096))
    finally:
        os.close(fd)
    assert not reader._contexts  # given back to the kernel, which has waited for what ran

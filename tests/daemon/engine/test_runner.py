from __future__ import annotations

import numpy as np
import pytest

from tests.daemon.engine.fakes import PAGE, RECORD, FakeBounds, FakeDecoder, StagedPages, expected
from tests.tiers.stand_ins import MemoryStore
from tierd.daemon.engine.batch import Batch, Rows, build
from tierd.daemon.engine.runner import GaveWay, Runner
from tierd.daemon.engine.selection import Lesson, Selection
from tierd.kernels.layout import PageLayout
from tierd.tiers.errors import StagingLost
from tierd.tiers.keys import page_key, root_key
from tierd.tiers.store import PageMeta

LAYOUT = PageLayout(1, 1, 1, "fp32", PAGE)
PROMPT = [5, 6, 7, 8, 9]
KEY = page_key(root_key("runner"), b"first")


def rows(*addresses: int) -> Batch:
    return build([Rows(PROMPT, 0, np.array(addresses, np.int64), sample=True)], PAGE)


def test_rows_go_into_their_pages_and_logits_come_out() -> None:
    device, host = np.zeros((6, RECORD), np.uint8), np.zeros((2, RECORD), np.uint8)
    runner = Runner(FakeDecoder(), LAYOUT, (device, host))
    logits = runner.run(rows(host[1].ctypes.data, device[2].ctypes.data))
    assert [int(np.argmax(logits[0]))] == expected(PROMPT, 1)
    assert host[1].any() and device[2].any() and not host[0].any() and not device[[0, 1, 3, 4, 5]].any()


def test_a_page_at_address_0_is_streamed() -> None:
    device, store, decoder = np.zeros((2, RECORD), np.uint8), MemoryStore(), FakeDecoder()
    whole = Runner(decoder, LAYOUT, (device,))
    wanted = whole.run(rows(device[0].ctypes.data, device[1].ctypes.data))
    store.write([(PageMeta(KEY, root_key("runner"), (1,), 0, 0.0), device[0])])
    staged = StagedPages(store)
    runner = Runner(decoder, LAYOUT, (device,), staged)  # type: ignore[arg-type]
    last = build([Rows(PROMPT[4:], 4, np.array([0, device[1].ctypes.data], np.int64), sample=True)], PAGE)
    assert np.array_equal(runner.run(last, [KEY]), wanted) and staged.passes == 1
    staged.lost.append(KEY)
    with pytest.raises(StagingLost):
        runner.run(last, [KEY])


def test_a_streamed_page_of_two_sequences_is_read_once() -> None:
    device, store, decoder = np.zeros((3, RECORD), np.uint8), MemoryStore(), FakeDecoder()
    staged = StagedPages(store)
    runner = Runner(decoder, LAYOUT, (device,), staged)  # type: ignore[arg-type]
    wanted = runner.run(rows(device[0].ctypes.data, device[1].ctypes.data))
    store.write([(PageMeta(KEY, root_key("runner"), (1,), 0, 0.0), device[0])])
    last = [
        Rows(PROMPT[4:], 4, np.array([0, device[slot].ctypes.data], np.int64), sample=True) for slot in (1, 2)
    ]
    found = runner.run(build(last, PAGE), [KEY, KEY])
    assert np.array_equal(found, [wanted[0], wanted[0]])
    assert store.reads == [KEY]


class Layers(FakeDecoder):
    """Notes which layers were computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[int] = []

    def layer(self, index, memories, pages, placed=None, experts=None, choose=None):
        self.layers.append(index)
        super().layer(0, memories, pages, placed, experts, choose)


def test_a_pass_that_takes_bounds_gives_way_between_two_layers() -> None:
    device, decoder = np.zeros((2, RECORD), np.uint8), Layers()
    runner = Runner(decoder, PageLayout(3, 1, 1, "fp32", PAGE), (device,))
    batch = rows(device[0].ctypes.data, device[1].ctypes.data)
    lesson = [(0, Lesson(Selection(FakeBounds(), [0, 0, 0]), 1))]
    with pytest.raises(GaveWay):
        runner.run(batch, gives_way=lambda: len(decoder.layers) == 2, wanted=lesson)
    assert decoder.layers == [0, 1]
    runner.run(batch, gives_way=lambda: False, wanted=lesson)
    assert decoder.layers == [0, 1, 0, 1, 2]

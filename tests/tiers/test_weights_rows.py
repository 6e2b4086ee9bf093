"""Rows of an embedding on the disk: the panels that were asked for, checked one by one."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.tiers.faults import HookedIO, flip
from tierd.tiers.errors import WeightsLost
from tierd.tiers.mover import Mover
from tierd.tiers.weights_file import WeightFile
from tierd.tiers.weights_rows import PanelReader

pytestmark = pytest.mark.usefixtures("no_files_left")

PANELS = 300
SECTIONS = ((4096 + 64, 1000), (4096 + 64 + PANELS * 1000 + 24, 48))
SIZE = 4096 * 80
SOON_S = 20.0


class Failing(HookedIO):
    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.left and name in ("preadv", "preadv_batch"):
            self.left -= 1
            raise OSError(errno.EIO, "Input/output error")
        return call(*args)


class Rig:
    def __init__(self, path: Path) -> None:
        self.path, self.io = path, Failing()
        self.data = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
        path.write_bytes(self.data.tobytes())
        self.file, self.mover = WeightFile(path, self.io.as_io()), Mover(1, disk_threads=2)
        digests = [[xxhash.xxh3_128_hexdigest(self.panel(s, n).data) for n in range(PANELS)] for s in range(2)]
        self.reader = PanelReader(self.file, self.mover, "embed", SECTIONS, digests, 200)

    def panel(self, section: int, number: int) -> np.ndarray:
        offset, size = SECTIONS[section]
        return self.data[offset + number * size : offset + (number + 1) * size]

    def gather(self, *panels: int, within_s: float = SOON_S) -> None:
        self.reader.gather(np.array(panels, np.int64), time.monotonic() + within_s)
        for section, (_, size) in enumerate(SECTIONS):
            found = self.reader.blocks[section][: len(panels) * size].reshape(len(panels), size)
            assert np.array_equal(found, [self.panel(section, number) for number in panels])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "w")
    yield made
    made.mover.close()
    made.file.close()


def test_panels_come_in_the_order_of_the_question(rig: Rig) -> None:
    rig.gather(0)
    rig.gather(299, 3, 298)
    rig.gather(*range(100, 300))  # several batches
    assert rig.reader.read_bytes > 200 * 1048 and rig.reader.retries == rig.reader.lost == 0
    assert rig.reader.memory_bytes == 200 * 1048


def test_a_read_that_fails_once_is_tried_again(rig: Rig) -> None:
    rig.io.left = 2  # the batch, and the first single read that finds out why
    rig.gather(5, 6)
    assert rig.reader.retries == 1
    rig.io.left = 10_000
    with pytest.raises(WeightsLost, match="weights embed: reading failed twice"):
        rig.gather(5, 6)
    rig.io.left = 0
    rig.gather(5, 6)
    assert rig.reader.lost == 1


def test_a_flipped_byte_is_found_where_it_is_needed(rig: Rig) -> None:
    offset, size = SECTIONS[1]
    flip(rig.path, offset + 7 * size)
    rig.gather(6, 8)
    with pytest.raises(WeightsLost, match="embed: the bytes on the disk are not those of the import"):
        rig.gather(6, 7)


def test_a_late_answer_writes_into_memory_that_nobody_reads(rig: Rig) -> None:
    with pytest.raises(WeightsLost, match="embed: not in time"):
        rig.gather(*range(200), within_s=-1.0)
    rig.gather(*range(50, 250))

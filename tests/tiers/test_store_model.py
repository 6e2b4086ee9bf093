"""The store against a dictionary, in random order."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.tiers.pages import SLOT_BYTES, holds, key, open_store, page, read
from tierd.tiers.errors import PageLost, StoreFull

pytestmark = pytest.mark.usefixtures("no_files_left")


class StoreMachine(RuleBasedStateMachine):
    """A store against a dictionary: key number -> version."""

    numbers = st.integers(0, 40)

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.directory = Path(
            subprocess.check_output(["mktemp", "-d", "-p", memory if memory.is_dir() else "/tmp"], text=True).strip()
        )
        self.store = open_store(self.directory)
        self.model: dict[int, int] = {}
        self.quarantined = 0

    @rule(batch=st.dictionaries(numbers, st.integers(0, 5), max_size=8))
    def write(self, batch: dict[int, int]) -> None:
        pages = [page(number, version) for number, version in batch.items()]
        if len(batch) > self.store.free_slots:
            with pytest.raises(StoreFull):
                self.store.write(pages)
        else:
            self.store.write(pages)
            self.model |= batch

    @rule(numbers=st.lists(numbers, max_size=10))
    def remove(self, numbers: list[int]) -> None:
        self.store.remove([key(number) for number in numbers])
        for number in numbers:
            self.model.pop(number, None)

    @rule(number=numbers)
    def read(self, number: int) -> None:
        if number in self.model:
            assert holds(self.store, number, self.model[number])
        else:
            assert isinstance(read(self.store, number), PageLost)

    @rule(number=numbers)
    def damage(self, number: int) -> None:
        row = self.store._index.lookup(key(number))
        if row is None:
            return
        name, slot = divmod(row.slot, 8)
        with open(self.directory / f"slab-{name:05d}.pages", "r+b") as file:
            file.seek(slot * SLOT_BYTES + 100 * number)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x10]))
        assert isinstance(read(self.store, number), PageLost)
        del self.model[number]
        self.quarantined += 1

    @rule()
    def gc(self) -> None:
        self.store.gc()

    @precondition(lambda self: len(self.model) > 20)
    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model.clear()

    @rule(capacity=st.sampled_from([32, 32, 40, 24]))
    def reopen(self, capacity: int) -> None:
        self.store.close()
        self.store = open_store(self.directory, capacity_bytes=capacity * SLOT_BYTES)
        kept = {found.key for found in self.store.pages()}
        lost = [number for number in self.model if key(number) not in kept]
        assert not lost or capacity < 40  # only a smaller capacity may cost pages
        for number in lost:
            del self.model[number]
        self.quarantined = 0

    @invariant()
    def in_order(self) -> None:
        assert self.store.check() == []
        assert {(found.key, found.hits) for found in self.store.pages()} == {(key(n), v) for n, v in self.model.items()}
        figures = self.store.statistics()
        assert figures.quarantined_slots == self.quarantined
        assert figures.used_slots + figures.free_slots + figures.quarantined_slots == figures.capacity_slots

    def teardown(self) -> None:
        for number, version in self.model.items():
            assert holds(self.store, number, version)
        self.store.close()
        shutil.rmtree(self.directory)


StoreMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreMachine = StoreMachine.TestCase

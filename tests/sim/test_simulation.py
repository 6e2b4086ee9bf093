"""Seeded runs of the whole engine under the scheduler, and proof that the simulator notices what goes wrong.

A seed that fails says how to run it again:

    TIERD_SIM_SEEDS=137 pytest tests/sim -k test_seed             (one seed)
    TIERD_SIM_SEEDS=1000-1999 pytest tests/sim -k test_seed       (a thousand others)
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.sim.mover import SimMover
from tests.sim.simulation import Simulation
from tierd.tiers import pager
from tierd.tiers.index import Row
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, Job
from tierd.tiers.records import Records
from tierd.tiers.store_io import Bytes, aligned_block

SEEDS = 25
MANY_SEEDS = 500
MUTANT_SEEDS = 150  # a mutant that none of them notices is one that the simulator can't see


def chosen() -> range:
    """The seeds asked for, else the first few."""
    text = os.environ.get("TIERD_SIM_SEEDS", f"0-{SEEDS - 1}")
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@pytest.mark.parametrize("seed", chosen())
def test_seed(seed: int) -> None:
    Simulation(seed).run()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + MANY_SEEDS))
def test_many_seeds(seed: int) -> None:
    Simulation(seed).run()


def test_a_seed_says_it_all() -> None:
    runs = [Simulation(3) for _ in range(2)]
    for run in runs:
        run.run()
    assert runs[0].log == runs[1].log
    assert runs[0].turns == runs[1].turns > 10
    assert [client.got for client in runs[0].clients] == [client.got for client in runs[1].clients]


def blind_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a slot holds is taken for the page."""

    def read(self: Records, row: Row, dest: Bytes) -> None:
        scratch = aligned_block(self._slabs.geometry.slot_bytes)
        self._slabs.read(row.slot, [scratch])
        header = self._slabs.geometry.header_bytes
        dest[:] = scratch[header : header + len(dest)]

    monkeypatch.setattr(Records, "read", read)
    monkeypatch.setattr(Records, "read_batch", lambda _self, rows, _dests: [False] * len(rows))  # `read` each, then


def one_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The salt is forgotten."""
    monkeypatch.setattr(pager, "salted_root", lambda root, _salt: root)


def forgotten_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease now and then keeps a private page."""
    release = pager.Pager.release

    def leak(self: pager.Pager, lease: pager.Lease, tokens: list[int]) -> None:
        if lease.private:
            del lease.private[-1]
        release(self, lease, tokens)

    monkeypatch.setattr(pager.Pager, "release", leak)


def lazy_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies between arenas are reported as done, and never were."""

    def lazy(_self: SimMover, dest: Bytes, _source: Bytes, link: Link, on_done: Callable[[Completion], None]) -> Job:
        return Job(int, link, dest.nbytes, on_done, dest)

    monkeypatch.setattr(SimMover, "copy_job", lazy)


@pytest.mark.parametrize("mutant", [blind_store, lazy_copies, one_tenant, forgotten_release])
def test_mutants_are_noticed(monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    mutant(monkeypatch)
    for seed in range(MUTANT_SEEDS):
        try:
            Simulation(seed).run()
        except (AssertionError, ValueError, IndexError, KeyError):
            return
    raise AssertionError(f"{MUTANT_SEEDS} seeds saw nothing of {mutant.__name__}")

"""Seeded runs of the whole engine under the scheduler, and proof that the simulator notices what goes wrong.

A seed that fails says how to run it again:

    TIERD_SIM_SEEDS=137 pytest tests/sim -k test_seed             (one seed)
    TIERD_SIM_SEEDS=1000-1999 pytest tests/sim -k test_seed       (a thousand others)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest

from tests.sim.mover import SimMover
from tests.sim.simulation import Simulation
from tierd.daemon.engine import sharing
from tierd.tiers import commit, pager, promote, residency, resize
from tierd.tiers.arena import SlotState
from tierd.tiers.index import Row
from tierd.tiers.keys import unpack_tokens
from tierd.tiers.links import Link
from tierd.tiers.mover import Completion, Job
from tierd.tiers.prefix import Node
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


def shared_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork copies the page before the one that is being written: hypotheses go on with another one's tokens."""
    copy = promote.Promoter.copy_private

    def wrong(self: promote.Promoter, lease: pager.Lease, source_slot: int, tokens: int) -> None:
        copy(self, lease, max(source_slot - 1, 0), tokens)

    monkeypatch.setattr(promote.Promoter, "copy_private", wrong)


def adopted_blindly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a prefill takes whatever page comes after the ones that it has."""
    adopt = commit.Committer.adopt

    def blind(
        self: commit.Committer, lease: pager.Lease, tokens: Sequence[int], use: Callable[[Node], None]
    ) -> int:
        found = adopt(self, lease, tokens, use)
        index, size = self._residency.index, lease.page_tokens
        for node in index.children(lease.nodes[-1].key if lease.nodes else lease.root):
            if node.readable and len(node.packed) == index.page_bytes and (len(lease.nodes) + 1) * size < len(tokens):
                theirs = [*tokens[: len(lease.nodes) * size], *unpack_tokens(node.packed), 0]
                return found + adopt(self, lease, theirs, use)
        return found

    monkeypatch.setattr(commit.Committer, "adopt", blind)


def careless_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is pinned goes like anything else."""
    monkeypatch.setattr(residency.Residency, "_is_safe_without", lambda *_: True)


def lost_in_a_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are being written stay in slots that are given away."""
    monkeypatch.setattr(resize.Resizer, "_copied", lambda self, _slot: self._pager.device.alloc(SlotState.PRIVATE))


FIRST_SEEDS = {careless_eviction: 1095}  # where a mutant is rarely met, not far before that: the others cost time


@pytest.mark.parametrize(
    "mutant",
    [
        blind_store, lazy_copies, one_tenant, forgotten_release, shared_forks, adopted_blindly, careless_eviction,
        lost_in_a_resize,
    ],
)  # fmt: skip
def test_mutants_are_noticed(monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    mutant(monkeypatch)
    first = FIRST_SEEDS.get(mutant, 0)
    for seed in range(first, first + MUTANT_SEEDS):
        try:
            Simulation(seed).run()
        except (AssertionError, ValueError, IndexError, KeyError):
            return
    raise AssertionError(f"{MUTANT_SEEDS} seeds saw nothing of {mutant.__name__}")


def rows_computed(seeds: range) -> int:
    """Of all runs together."""
    rows = 0
    for seed in seeds:
        run = Simulation(seed)
        run.run()
        rows += run.rows
    return rows


def test_without_shared_prefills_more_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single flight changes no token, so what notices that it is gone is the work."""
    seeds = range(4)
    together = rows_computed(seeds)
    monkeypatch.setattr(sharing, "following", lambda *_: {})
    assert rows_computed(seeds) > together

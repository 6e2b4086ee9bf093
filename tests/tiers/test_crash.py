"""The store under faults, power cuts and kills: never wrong bytes, never a failed start, nothing acknowledged lost."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.faults import AmnesicIO, FaultyIO, HookedIO, PowerCut
from tests.tiers.kill_child import NUMBERS
from tests.tiers.pages import key, open_store, page, read, record, verify
from tierd.tiers.errors import PageLost, TierError
from tierd.tiers.store import Store

pytestmark = pytest.mark.usefixtures("no_files_left")
REPOSITORY = Path(__file__).resolve().parents[2]


class Oracle:
    """What may be found after a crash: for each page the versions that are allowed, and whether it must be there."""

    def __init__(self) -> None:
        self.allowed: dict[int, set[int]] = {}
        self.present: set[int] = set()  # acknowledged, and not removed or lost since
        self.absent: set[int] = set()  # the removal was acknowledged

    def writing(self, numbers: list[int], version: int) -> None:
        for number in numbers:
            self.allowed.setdefault(number, set()).add(version)
            self.absent.discard(number)

    def written(self, numbers: list[int], version: int) -> None:
        for number in numbers:
            self.allowed[number] = {version}
            self.present.add(number)

    def removing(self, numbers: list[int]) -> None:
        self.present -= set(numbers)

    def removed(self, numbers: list[int]) -> None:
        self.absent |= set(numbers)
        for number in numbers:
            self.allowed.pop(number, None)

    def judge(self, store: Store, numbers: range) -> list[str]:
        """What is wrong with a store after a crash; then takes over what it holds as the truth."""
        findings = store.check()
        listed = {found.key for found in store.pages()}
        for number in numbers:
            found = read(store, number)
            if isinstance(found, PageLost):
                if number in self.present:
                    findings.append(f"page {number} was acknowledged and is lost: {found}")
                if key(number) in listed:
                    findings.append(f"page {number} is listed but lost: {found}")
                self.allowed.pop(number, None)
                continue
            right = [version for version in self.allowed.get(number, ()) if record(number, version).tobytes() == found]
            if not right:
                findings.append(f"page {number} has bytes that nobody wrote, or that were removed")
            if number in self.absent:
                findings.append(f"page {number} was removed and came back")
            self.allowed[number] = set(right)
            self.present.add(number)
        return findings


def workload(directory: Path, io: HookedIO, oracle: Oracle) -> None:
    """Two lives of a store, with everything a store does. A caller expects tier errors; anything else is a bug."""
    for life in (first_life, second_life):
        with contextlib.suppress(TierError), open_store(directory, io=io.as_io()) as store:
            life(store, oracle)


def first_life(store: Store, oracle: Oracle) -> None:
    write(store, oracle, [1, 2, 3], version=0)
    write(store, oracle, [1, 4], version=1)
    oracle.removing([2])
    with contextlib.suppress(TierError):
        store.remove([key(2)])
        oracle.removed([2])
    look(store, oracle)


def second_life(store: Store, oracle: Oracle) -> None:
    store.touch({key(1): (10, 1.0)})
    write(store, oracle, [3, 5], version=2)
    for action in (store.gc, store.check, lambda: verify(store, repair=True)):
        with contextlib.suppress(TierError):
            action()
    look(store, oracle)


def write(store: Store, oracle: Oracle, numbers: list[int], version: int) -> None:
    oracle.writing(numbers, version)
    with contextlib.suppress(TierError):
        store.write([page(number, version) for number in numbers])
        oracle.written(numbers, version)


def look(store: Store, oracle: Oracle) -> None:
    for number in range(6):
        found = read(store, number)
        if isinstance(found, PageLost):
            oracle.present.discard(number)  # a read that failed, now or in `verify`, gives the page up
        else:
            assert any(record(number, version).tobytes() == found for version in oracle.allowed.get(number, ()))


def count_calls(directory: Path) -> list[str]:
    io = HookedIO()
    workload(directory, io, Oracle())
    return io.names


KINDS = {
    "io error once": {"code": errno.EIO},
    "io error for ever": {"code": errno.EIO, "forever": True},
    "no space once": {"code": errno.ENOSPC},
    "no space for ever": {"code": errno.ENOSPC, "forever": True},
    "quota for ever": {"code": errno.EDQUOT, "forever": True},
    "interrupted once": {"code": errno.EINTR},
    "done but reported as failed": {"code": errno.EIO, "late": True},
}


def fail_calls(directory: Path, kind: str, first: int, step: int) -> None:
    names = count_calls(directory / "count")
    assert len(names) > 100
    for k in range(first, len(names), step):
        oracle = Oracle()
        io = FaultyIO(k, **KINDS[kind])  # type: ignore[arg-type]
        workload(directory / str(k), io, oracle)
        assert io.fired
        with open_store(directory / str(k)) as store:
            assert oracle.judge(store, range(8)) == [], f"call {k}: {names[k]}"
            store.write([page(7)])  # and it is as good as new


@pytest.mark.parametrize(("first", "kind"), list(enumerate(KINDS)))
def test_some_calls_fail_in_every_way(ram_path: Path, kind: str, first: int) -> None:
    fail_calls(ram_path, kind, first, step=len(KINDS))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_call_k_fails_in_every_way_for_every_k(ram_path: Path, kind: str) -> None:
    fail_calls(ram_path, kind, first=0, step=1)


def cut(directory: Path, io: AmnesicIO, oracle: Oracle) -> None:
    """Run until the power goes; then the process is gone, with what it had open."""
    stores: list[Store] = []
    try:
        for life in (first_life, second_life):
            stores.append(open_store(directory, io=io.as_io()))
            life(stores[-1], oracle)
            stores[-1].close()
    except PowerCut:
        pass
    io.cut = True
    for store in stores:
        store._parts.close()


def cut_power(directory: Path, mode: str, step: int, seed: int) -> None:
    for k in range(0, len(count_calls(directory / "count")), step):
        oracle = Oracle()
        io = AmnesicIO(k)
        cut(directory / str(k), io, oracle)
        io.lose(mode, seed=seed + k)
        with open_store(directory / str(k)) as store:
            assert oracle.judge(store, range(6)) == [], f"call {k}: {io.names[-1]}, seed {seed}"


@pytest.mark.parametrize(("mode", "step"), [("kept", 5), ("lost", 1), ("torn", 2)])
def test_power_cut(ram_path: Path, mode: str, step: int) -> None:
    """What was not synced is kept, lost whole, or torn at sectors; acknowledged pages outlive it."""
    cut_power(ram_path, mode, step, seed=0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(0, 20_000, 1000))
def test_power_cut_torn_in_many_ways(ram_path: Path, seed: int) -> None:
    cut_power(ram_path, "torn", 1, seed)


def test_the_oracle_notices_a_disk_that_lies(ram_path: Path) -> None:
    """If syncs do nothing, acknowledged pages are lost, and these tests see it; the bytes are right even then."""
    findings: list[str] = []
    for k in range(40, 100, 5):
        oracle = Oracle()
        io = AmnesicIO(k, forget_syncs=True)
        cut(ram_path / str(k), io, oracle)
        io.lose("lost")
        with open_store(ram_path / str(k)) as store:
            findings += oracle.judge(store, range(6))
    assert any("acknowledged and is lost" in line for line in findings)
    assert not any("nobody wrote" in line for line in findings)


POINTS = [
    *itertools.product(["pwritev"], ["before", "torn", "after"]),
    *itertools.product(
        ["fdatasync", "sql COMMIT", "sql BEGIN", "sql INSERT", "sql DELETE", "fallocate", "fsync"], ["before", "after"]
    ),
    *itertools.product(["open", "ftruncate", "unlink", "connect", "sql CREATE", "sql UPDATE", "sql VACUUM"], ["after"]),
]


@pytest.fixture
def killer(no_files_left: None) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.tiers.kill_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # it forks: it must have no other thread
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0


def ask(killer: subprocess.Popen[str], line: str) -> None:
    assert killer.stdin is not None
    killer.stdin.write(f"{line}\n")
    killer.stdin.flush()


def follow(killer: subprocess.Popen[str], oracle: Oracle, wait_s: float | None) -> int:
    """Read what the child says until it is dead, killing it after a while if it does not do so itself; counts lines."""
    assert killer.stdout is not None
    pending: tuple[str, list[int]] | None = None
    lines = 0
    for line in killer.stdout:
        word, *rest = line.split()
        lines += 1
        match word:
            case "pid":
                if wait_s is not None:
                    time.sleep(wait_s)
                    with contextlib.suppress(ProcessLookupError):  # on a busy machine it may have done all its steps
                        os.kill(int(rest[0]), signal.SIGKILL)
            case "end":
                return lines
            case "w":
                pending = (word, [int(number) for number in rest])
                oracle.writing(pending[1][:-1], pending[1][-1])
            case "r":
                pending = (word, [int(number) for number in rest])
                oracle.removing(pending[1])
            case "W":
                assert pending is not None
                oracle.written(pending[1][:-1], pending[1][-1])
            case "R":
                assert pending is not None
                oracle.removed(pending[1])
            case "open" | "done":
                pass
            case _:
                raise AssertionError(line)
    raise AssertionError("the child's parent died")


def kill_cycles(killer: subprocess.Popen[str], directory: Path, cycles: int, seed: int) -> None:
    rng = random.Random(seed)
    oracle = Oracle()
    lines = 0
    for cycle in range(cycles):
        if cycle % 2:  # at random
            ask(killer, f"{directory} {rng.randrange(1 << 30)} none 0 before")
            lines += follow(killer, oracle, wait_s=rng.random() * 0.06)
        else:  # at a named point; SQL names have a space, which the line has not
            name, when = POINTS[cycle // 2 % len(POINTS)]
            ask(killer, f"{directory} {rng.randrange(1 << 30)} {name.replace(' ', '_')} {rng.randrange(12)} {when}")
            lines += follow(killer, oracle, wait_s=None)
        with open_store(directory) as store:
            assert not any("set aside" in note or "no index" in note for note in store.notes) or cycle == 0, store.notes
            assert oracle.judge(store, NUMBERS) == [], f"cycle {cycle} of seed {seed}"
    assert lines > cycles * 3  # the children did something


def test_kill_while_everything_goes_on(killer: subprocess.Popen[str], tmp_path: Path) -> None:
    kill_cycles(killer, tmp_path / "kv", 30, seed=1)


@pytest.mark.long
def test_kill_300_times(killer: subprocess.Popen[str], ram_path: Path) -> None:
    kill_cycles(killer, ram_path / "kv", 300, seed=int(time.time()))


def test_kill_while_a_store_is_made(killer: subprocess.Popen[str], ram_path: Path) -> None:
    """Killed at each of the first calls of a store's life: the next opening always works."""
    for k, (name, when) in enumerate(
        itertools.product(["open", "connect", "sql_CREATE", "sql_INSERT", "sql_COMMIT", "fsync"], ["before", "after"])
    ):
        directory = ram_path / str(k)
        for left in range(3):
            oracle = Oracle()
            ask(killer, f"{directory} {k} {name} {left} {when}")
            follow(killer, oracle, wait_s=None)
            with open_store(directory) as store:
                assert store.check() == []

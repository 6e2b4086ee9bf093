from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tierd.tiers.budget import DAY_S, WriteBudget


class Wall:
    def __init__(self) -> None:
        self.now_s = 20_000.0 * DAY_S + 100

    def __call__(self) -> float:
        return self.now_s


def test_without_a_bound_everything_is_allowed_and_counted() -> None:
    budget = WriteBudget()
    budget.spend(10**15)
    assert budget.allows(4096) > 10**6
    assert budget.left_share == 1.0
    assert budget.spent_bytes == 10**15


def test_what_is_spent_is_not_allowed_again() -> None:
    budget = WriteBudget(1000)
    assert budget.allows(300) == 3
    budget.spend(600)
    assert (budget.allows(300), budget.left_share) == (1, 0.4)
    budget.spend(600)
    assert (budget.allows(300), budget.left_share) == (0, 0.0)
    budget.spend(-600)
    assert budget.allows(300) == 1


def test_midnight_starts_anew() -> None:
    wall = Wall()
    budget = WriteBudget(1000, None, wall)
    budget.spend(1000)
    wall.now_s += DAY_S - 200
    assert budget.allows(100) == 0
    wall.now_s += 200
    assert budget.allows(100) == 10


def test_a_clock_set_back_keeps_the_count() -> None:
    wall = Wall()
    budget = WriteBudget(1000, None, wall)
    budget.spend(1000)
    wall.now_s -= 3 * DAY_S
    assert budget.allows(100) == 0
    wall.now_s += DAY_S
    assert budget.allows(100) == 10


def test_a_restart_goes_on_with_the_count(tmp_path: Path) -> None:
    file, wall = tmp_path / "writes", Wall()
    before = WriteBudget(1000, file, wall)
    before.spend(700)
    before.share()
    assert WriteBudget(1000, file, wall).spent_bytes == 700
    wall.now_s += DAY_S
    assert WriteBudget(1000, file, wall).spent_bytes == 0


def test_a_restart_with_the_clock_set_back_goes_on_with_the_count(tmp_path: Path) -> None:
    file, wall = tmp_path / "writes", Wall()
    before = WriteBudget(1000, file, wall)
    before.spend(700)
    before.share()
    wall.now_s -= 5 * DAY_S
    assert WriteBudget(1000, file, wall).spent_bytes == 700


def test_engines_share_the_count(tmp_path: Path) -> None:
    file, wall = tmp_path / "writes", Wall()
    one, two = WriteBudget(1000, file, wall), WriteBudget(1000, file, wall)
    one.spend(300)
    two.spend(500)
    one.share()
    two.share()
    one.share()
    assert (one.spent_bytes, two.spent_bytes) == (800, 800)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_count_that_an_engine_holds_is_shared_later(tmp_path: Path) -> None:
    file, wall = tmp_path / "writes", Wall()
    budget = WriteBudget(1000, file, wall)
    budget.spend(300)
    with file.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        budget.share()
        assert budget.spent_bytes == 300
    budget.share()
    assert WriteBudget(1000, file, wall).spent_bytes == 300


@pytest.mark.parametrize("content", [b"", b"garbage", b"20000 -5", b"\xff\xfe 7", b"20000"])
def test_a_damaged_file_counts_as_an_empty_one(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "writes"
    file.write_bytes(content)
    budget = WriteBudget(1000, file, Wall())
    budget.spend(10)
    budget.share()
    assert WriteBudget(1000, file, Wall()).spent_bytes == 10


def test_without_its_directory_it_counts_on_alone(tmp_path: Path) -> None:
    budget = WriteBudget(1000, tmp_path / "gone" / "writes", Wall())
    budget.spend(900)
    budget.share()
    assert budget.allows(200) == 0


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("20000 5")
    (tmp_path / "writes").symlink_to(target)
    budget = WriteBudget(1000, tmp_path / "writes", Wall())
    budget.spend(9)
    budget.share()
    assert target.read_text() == "20000 5"

"""Load or recompute: the choice by measured rates, and how much is computed on a guess."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierd.daemon.engine.loading import (
    FASTER,
    GRACE_S,
    SLOWER,
    UNMEASURED_BYTES_PER_S,
    Choice,
    Progress,
    choose,
    is_guess,
    rows_meanwhile,
)
from tierd.daemon.engine.scheduler import SHARED_PREFILL_ROWS

MB = 1_000_000
BEGUN = Progress(absent_bytes=40 * MB, arrived_bytes=0, elapsed_s=0.0, link_bytes_per_s=400.0 * MB, compute_s=1.0)


def test_nothing_to_load_is_worth_waiting_for() -> None:
    assert choose(replace(BEGUN, absent_bytes=0, compute_s=0.0)) is Choice.WAIT


@pytest.mark.parametrize(
    ("load_s", "found"),
    [
        (1.0 / FASTER, Choice.WAIT), (1.01 / FASTER, Choice.BOTH), (SLOWER, Choice.BOTH), (SLOWER + 0.1, Choice.COMPUTE)
    ],
)  # fmt: skip
def test_the_measured_rate_decides(load_s: float, found: Choice) -> None:
    assert choose(replace(BEGUN, link_bytes_per_s=40 * MB / load_s)) is found


def test_a_disk_that_was_not_measured_is_taken_for_a_slow_one() -> None:
    unknown = replace(BEGUN, link_bytes_per_s=0.0)
    load_s = unknown.absent_bytes / UNMEASURED_BYTES_PER_S
    assert choose(replace(unknown, compute_s=load_s * FASTER)) is Choice.WAIT
    assert choose(replace(unknown, compute_s=load_s * FASTER * 0.99)) is Choice.BOTH


def test_a_load_that_shows_nothing_is_waited_for_a_moment() -> None:
    assert choose(replace(BEGUN, elapsed_s=GRACE_S)) is Choice.WAIT
    assert choose(replace(BEGUN, elapsed_s=GRACE_S * 1.1)) is Choice.BOTH


def test_what_has_come_counts_more_than_what_the_disk_did_before() -> None:
    late = replace(BEGUN, elapsed_s=0.3)
    assert choose(replace(late, arrived_bytes=1 * MB)) is Choice.COMPUTE
    assert choose(replace(late, arrived_bytes=100 * MB, link_bytes_per_s=1.0 * MB)) is Choice.WAIT


def test_it_is_a_guess_while_only_this_load_looks_slow() -> None:
    late = replace(BEGUN, elapsed_s=2 * GRACE_S)
    assert choose(late) is Choice.BOTH
    assert is_guess(late)
    assert not is_guess(replace(late, link_bytes_per_s=100.0 * MB))  # the disk is known to be slow


def test_on_a_guess_a_step_takes_no_longer_than_was_waited() -> None:
    assert rows_meanwhile(0.06, 0.001, 16) == 48
    assert rows_meanwhile(0.0, 0.001, 16) == 16  # a page at least, so that it goes on
    assert rows_meanwhile(60.0, 0.001, 16) == SHARED_PREFILL_ROWS


def test_without_a_guess_a_step_is_as_long_as_ever() -> None:
    assert rows_meanwhile(0.0, 0.0, 16) == SHARED_PREFILL_ROWS

"""start, stop, status against the fake front; `serve` and real processes stand in test_cli_spawn.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon import cli_common, cli_spawn
from tierd.daemon.door import Door


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


STATUS = {
    "pid": 4242, "state": "ready", "model": "alpha", "version": "0.1", "uptime_s": 300.0, "socket": "/s", "http": "",
    "engines": [{"model": "alpha", "state": "ready", "tiers": {
        "device": {"total_bytes": 2_000_000_000, "used_bytes": 1_000_000, "cached_bytes": 0, "free_bytes": 5},
        "host": None,
    }}],
}  # fmt: skip


def test_status(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["status"] = STATUS
        assert cli("status", "--json").json == STATUS
        lines = [line.split() for line in cli("status").out.splitlines()]
    assert ["state", "ready"] in lines and ["pid", "4242"] in lines and ["model", "alpha"] in lines
    assert ["http", "off"] in lines
    assert ["device", "2.0", "GB", "1.0", "MB", "0", "B", "5", "B"] in lines
    assert ["host", "-", "-", "-", "-"] in lines


def test_status_tells_the_tiers_of_each_model(cli: Cli) -> None:
    engines = [{"model": name, "state": "ready", "tiers": {"host": None}} for name in ("alpha", "beta")]
    with cli.front() as front:
        front.answers["status"] = {**STATUS, "engines": engines}
        said = cli("status").out
    assert said.count("TIER") == 2 and "\nalpha\nTIER" in said and "\nbeta\nTIER" in said


def test_status_shows_notices(cli: Cli) -> None:
    notices = ["the disk tier is off: no space"]
    engine = {"model": "alpha", "state": "ready", "notices": notices, "tiers": {"host": None}}
    with cli.front() as front:
        front.answers["status"] = {**STATUS, "engines": [engine]}
        said = cli("status").out
    assert "notice   the disk tier is off: no space\n" in said and "does not answer" not in said


def test_status_tells_what_was_written(cli: Cli) -> None:
    writes = {"today_bytes": 5_000_000, "daily_bytes": 200_000_000_000, "bytes_per_token": 46080.0}
    engine = {"model": "alpha", "state": "ready", "tiers": {"host": None}, "writes": writes}
    with cli.front() as front:
        front.answers["status"] = {**STATUS, "engines": [engine]}
        said = cli("status").out
    assert "written  5.0 MB of 200 GB today, 46.1 kB for a token kept (alpha)\n" in said


def test_status_tells_what_was_chosen_and_why(cli: Cli) -> None:
    engine = {"model": "alpha", "state": "ready", "tiers": {"host": None}, "chosen": {"why": ["pages get less memory"]}}
    with cli.front() as front:
        front.answers["status"] = {**STATUS, "engines": [engine]}
        assert "plan     pages get less memory (alpha)\n" in cli("status").out


def test_status_tells_where_weights_lie(cli: Cli) -> None:
    weights = {"device_bytes": 2 * 10**9, "nvme_bytes": 0}
    streamed = weights | {"nvme_bytes": 5 * 10**9, "bytes_per_s": 1.8e9, "peak_share": 0.96}
    experts = weights | {
        "host_bytes": 9 * 10**9, "experts_bytes": 4 * 10**9, "uses": 8000, "hits": 6000, "computed": 1200
    }
    with cli.front() as front:
        for given, text in (
            (weights, "2.0 GB in memory"),
            (streamed | {"bytes_per_s": 0.0}, "2.0 GB in memory, 5.0 GB on disk"),
            (streamed, "2.0 GB in memory, 5.0 GB on disk, read at 1.8 GB/s, 96% of its best"),
            (experts, "2.0 GB on the card, 9.0 GB in CPU memory, 4.0 GB of experts at a time, 75% of what comes and "
             "goes was there when it was needed, 1,200 were computed by the processors"),
        ):
            engine = {"model": "alpha", "state": "ready", "tiers": {"host": None}, "weights": given}
            front.answers["status"] = {**STATUS, "engines": [engine]}
            assert f"weights  {text} (alpha)\n" in cli("status").out


def test_status_tells_of_a_silent_engine(cli: Cli) -> None:
    with cli.front() as front:
        for state, silent in (("ready", True), ("starting", False)):
            front.answers["status"] = {**STATUS, "tiers": {}, "engines": [{"model": "alpha", "state": state}]}
            assert ("engine   alpha does not answer" in cli("status").out) == silent


@pytest.fixture
def stranded(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The pid of a process that holds the lock, without a socket."""
    monkeypatch.setattr(cli_common, "BIND_S", 0.1)
    door = Door(cli.socket)
    cli.socket.unlink()
    yield os.getpid()
    door.close()


@pytest.mark.parametrize("verb", ["status", "ps", "stop", "start"])
def test_a_daemon_without_its_socket(cli: Cli, stranded: int, verb: str) -> None:
    said = cli(verb)
    assert said.code == 69 and said.hinted
    assert f"a daemon (pid {stranded}) runs, but its socket is gone" in said.err and f"`kill {stranded}`" in said.err


def test_status_of_a_daemon_without_its_socket(cli: Cli, stranded: int) -> None:
    shown = cli("status", "--json").json
    assert (shown["state"], shown["pid"]) == ("unreachable", stranded)


@pytest.mark.parametrize(
    "text", ["", "x", "0", f"{2**40}", f"{os.getpid()}"], ids=["empty", "text", "zero", "too large", "mine"]
)
def test_a_lock_file_that_nobody_holds_is_nothing(cli: Cli, text: str) -> None:
    (cli.home / "s.lock").write_text(text)
    said = cli("ps")
    assert said.code == 69 and "no daemon runs" in said.err


def test_status_of_a_stopped_daemon(cli: Cli) -> None:
    said = cli("status", "--json")
    assert said.code == 69
    assert said.json == {"state": "stopped", "pid": None, "model": None, "socket": str(cli.socket)}


def test_stop_waits_until_it_is_gone(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["status"] = {"pid": 0}
        assert cli("stop", "--timeout", "3").out == "tierd stopped\n"
        assert front.requests[-1].args == {"timeout_s": 3.0}
    with cli.front() as front:
        front.answers["status"] = {"pid": 0}
        assert cli("stop", "--now").out == "tierd stopped\n"
        assert front.requests[-1].args == {"timeout_s": 0.0}


def test_a_stop_where_nothing_runs_is_fine(cli: Cli) -> None:
    said = cli("stop")
    assert (said.code, said.out, said.err) == (0, "no daemon runs\n", "")


@pytest.mark.parametrize(("live", "what"), [(2, "2 answers"), (1, "1 answer"), (0, "the daemon")])
def test_stop_tells_what_it_waits_for(cli: Cli, monkeypatch: pytest.MonkeyPatch, live: int, what: str) -> None:
    monkeypatch.setattr(cli_spawn, "QUIET_S", 0.0)
    answers = iter([True, True, False])
    monkeypatch.setattr(cli_spawn, "_answers", lambda socket: next(answers))
    with cli.front() as front:
        front.answers["status"] = {"pid": 0, "queue": {"live": live}}
        said = cli("stop", "--timeout", "3")
    at_once = "; `tierd stop --now` does not wait" if live else ""
    assert said.err == f"waiting for {what} to end (up to 3 s{at_once})\n" and said.out == "tierd stopped\n"


def test_start_of_a_running_daemon(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["load"] = {"model": "alpha"}
        said = cli("start")
        assert said.code == 0 and "runs already, pid 4242" in said.out
        assert "alpha is ready" in cli("start", "--model", "alpha").out
        said = cli("start", "--threads", "2")
    assert said.code == 1 and said.hinted and "--threads=2 would change nothing" in said.err


def test_wait_until_gone_has_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="did not end"):
        cli_spawn.wait_until_gone(tmp_path / "s", os.getpid(), 0.1)

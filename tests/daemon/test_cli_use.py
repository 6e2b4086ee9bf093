"""ps, load, unload."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon.errors import ModelNotFound, OutOfSpace


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


ENGINE = {
    "model": "alpha", "pid": 7, "state": "ready", "rss_bytes": 1_500_000_000, "idle_s": 3.0, "expires_in_s": 890.0,
    "running": 2, "waiting": 0,
}  # fmt: skip


def test_ps(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["ps"] = {"engines": [ENGINE]}
        table = cli("ps").out.splitlines()
        assert cli("ps", "--json").json == {"engines": [ENGINE], "exclusive": None}
    assert table[0].split() == [
        "MODEL", "STATE", "PID", "MEMORY", "RUNNING", "WAITING", "WRITTEN", "TODAY", "UNLOADS", "IN",
    ]  # fmt: skip
    assert table[1].split() == ["alpha", "ready", "7", "1.5", "GB", "2", "0", "-", "15m"]


def test_a_batch_that_has_the_machine_for_itself_is_shown(cli: Cli) -> None:
    told = {"model": "alpha", "streams": 64, "stage": "running", "done": 12, "total": 100, "left_s": 300.0}
    with cli.front() as front:
        front.answers["ps"] = {"engines": [ENGINE], "exclusive": told}
        front.answers["status"] = {"state": "ready", "exclusive": told}
        shown = "a batch is alone with alpha, 64 at once: 12 of 100 requests, 5m left"
        assert shown in cli("ps").err and f"batch    {shown}" in cli("status").out
        assert cli("ps", "--json").json["exclusive"] == told
        told |= {"streams": None, "stage": "waiting for running answers"}
        assert "a batch is alone with alpha: waiting for running answers" in cli("ps").err


def test_ps_tells_what_was_written(cli: Cli) -> None:
    writes = {"today_bytes": 1_200_000_000, "daily_bytes": 200_000_000_000}
    with cli.front() as front:
        front.answers["ps"] = {"engines": [{**ENGINE, "writes": writes}]}
        assert "1.2 GB of 200 GB" in cli("ps").out
        front.answers["ps"] = {"engines": [{**ENGINE, "writes": {**writes, "daily_bytes": 0}}]}
        assert "1.2 GB   " in cli("ps").out


def test_resize(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["resize"] = {"model": "alpha", "device_bytes": 6_000_000_000, "host_bytes": 0}
        said = cli("resize", "--device-mem", "6GB", "--host-mem", "0", "--timeout", "5")
        assert said.code == 0 and "alpha: 6.0 GB on the device, 0 B in CPU memory" in said.out
        assert front.requests[-1].args == {
            "model": None, "device_bytes": 6_000_000_000, "host_bytes": 0, "timeout_s": 5.0,
        }  # fmt: skip
        assert cli("resize", "alpha", "--host-mem", "1MiB", "--json").json["device_bytes"] == 6_000_000_000
        assert front.requests[-1].args == {"model": "alpha", "host_bytes": 1 << 20, "timeout_s": 30.0}


def test_resize_to_what_the_daemon_would_choose_and_how_much_of_the_weights_is_in_memory(cli: Cli) -> None:
    with cli.front() as front:
        sizes = {"model": "alpha", "device_bytes": 10**9, "host_bytes": 0, "weights_total_bytes": 3 * 10**9}
        front.answers["resize"] = sizes | {"weights_bytes": 2 * 10**9}
        said = cli("resize", "--device-mem", "auto", "--weights-mem", "2GB").out
        assert front.requests[-1].args["device_bytes"] == "auto"
        assert said.endswith("2.0 GB of 3.0 GB of weights, the rest is streamed\n")
        front.answers["resize"] = sizes | {"weights_bytes": 3 * 10**9}
        assert cli("resize", "--weights-mem", "auto").out.endswith("all 3.0 GB of weights\n")


def test_resize_that_is_refused(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["resize"] = OutOfSpace("3 pages are fewer than the 9 that running requests need")
        said = cli("resize", "--device-mem", "1MB")
    assert said.code == 1 and "fewer than the 9" in said.err


@pytest.mark.parametrize("words", [[], ["--device-mem", "much"], ["--host-mem", "-1"]])
def test_resize_needs_a_size(cli: Cli, words: list[str]) -> None:
    with cli.front() as front:
        assert cli("resize", *words).code == 2
        assert not front.requests


def test_names_from_outside_cannot_move_the_cursor(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["ps"] = {"engines": [{**ENGINE, "model": "a\x1b[2J\nb"}]}
        out = cli("ps").out
    assert "\x1b" not in out and len(out.splitlines()) == 2


def test_load_shows_progress(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["load"] = {"model": "alpha", "pid": 7}
        said = cli("load", "alpha")
        assert cli("load", "alpha", "--json").json == {"model": "alpha", "pid": 7}
    shown = ["weights 0% 0 of 10", "weights 50% 5 of 10", "weights 100% 10 of 10"]
    assert said.err.splitlines() == shown and said.out == "alpha is ready\n"


def test_load_of_an_unknown_model(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["load"] = ModelNotFound("no such model", hint="tierd list")
        said = cli("load", "alpha")
    assert said.code == 1
    assert said.err.splitlines()[-2:] == ["error: no such model", "hint: tierd list"]


def test_unload(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["unload"] = {"unloaded": ["alpha"]}
        assert "unloaded alpha" in cli("unload", "alpha").out
        assert cli("unload", "--all", "--json").json == {"unloaded": ["alpha"]}
        front.answers["unload"] = {"unloaded": []}
        assert "alpha was not loaded" in cli("unload", "alpha").out
        assert "nothing was loaded" in cli("unload", "--all").out
    one, every = {"model": "alpha"}, {"all": True}
    assert [request.args for request in front.requests] == [one, every, one, every]

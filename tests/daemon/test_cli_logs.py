"""logs: the end of a file, what is added to it, and how a line looks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon import cli_logs
from tierd.daemon.cli_logs import follow_lines, last_lines, readable


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 16])
def test_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(cli_logs, "BLOCK_BYTES", block_bytes)
    file = tmp_path / "log"
    file.write_text("".join(f"línea {number}\n" for number in range(30)))
    assert last_lines(file, 3) == ["línea 27", "línea 28", "línea 29"]
    assert last_lines(file, 100) == [f"línea {number}" for number in range(30)]
    assert last_lines(file, 0) == []
    file.write_text("")
    assert last_lines(file, 3) == []


def test_last_lines_go_back_into_rotated_files(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for name, numbers in (("log", [5]), ("log.1", [3, 4]), ("log.2", [1, 2])):
        (tmp_path / name).write_text("".join(f"{number}\n" for number in numbers))
    assert last_lines(file, 2) == ["4", "5"] and last_lines(file, 9) == ["1", "2", "3", "4", "5"]


def test_follow_loses_nothing_that_was_written_before_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log"
    file.touch()

    def write_and_rotate(seconds: float) -> None:
        replaced = cli_logs._replaced

        def late(path: Path, fd: int) -> bool:  # after the last read found nothing
            monkeypatch.setattr(cli_logs, "_replaced", replaced)
            file.write_text("one\n")
            file.rename(tmp_path / "log.1")
            file.write_text("two\n")
            return replaced(path, fd)

        monkeypatch.setattr(cli_logs, "_replaced", late)

    monkeypatch.setattr(time, "sleep", write_and_rotate)
    lines = follow_lines(file)
    assert [next(lines) for _ in range(2)] == ["one", "two"]
    lines.close()  # type: ignore[attr-defined]


def test_follow_goes_over_to_the_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log"
    file.write_text("old\n")

    def append(text: str) -> None:
        with file.open("a") as stream:
            stream.write(text)

    def rotate() -> None:
        file.rename(tmp_path / "log.1")
        file.write_text("two\n")

    steps = iter([lambda: append("one\nhal"), lambda: append("f\n"), rotate])

    def sleep(seconds: float) -> None:
        next(steps)()

    monkeypatch.setattr(time, "sleep", sleep)
    lines = follow_lines(file)
    assert [next(lines) for _ in range(3)] == ["one", "half", "two"]
    lines.close()  # type: ignore[attr-defined]


def test_readable() -> None:
    line = json.dumps({"time": "T", "level": "info", "logger": "tierd.x", "event": "up", "model": "m"})
    assert readable(line) == "T info     up model=m"
    assert readable(json.dumps({"event": "x", "exception": "Traceback\n  y"})).endswith("\nTraceback\n  y")
    assert readable("plain \x1b[2J") == "plain  [2J"
    assert readable("[1]") == "[1]"


def test_the_verb(cli: Cli) -> None:
    said = cli("logs")
    assert said.code == 1 and said.hinted
    state = cli.home / "state"
    state.mkdir()
    (state / "tierd.log").write_text('{"time": "T", "level": "info", "event": "a"}\n{"event": "b"}\n')
    assert [line.split()[-1] for line in cli("logs").out.splitlines()] == ["a", "b"]
    assert cli("logs", "-n", "1", "--json").out == '{"event": "b"}\n'

"""Where log lines go and how they look."""

from __future__ import annotations

import io
import json
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.daemon import log
from tierd.daemon.errors import PermissionDenied


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    yield
    log.tear_down()


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_json_lines_in_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "state" / "tierd.log"
    log.set_up("info", "auto", file, io.StringIO())
    logging.getLogger("tierd.x").info("model %s is up", "m", extra={"model": "m", "pages": 3, "level": "forged"})
    logging.getLogger("tierd.x").debug("a prompt")
    [line] = lines(file)
    assert line["event"] == "model m is up"
    assert (line["level"], line["logger"], line["model"], line["pages"]) == ("info", "tierd.x", "m", 3)
    assert str(line["time"]).endswith("Z")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_exception_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "tierd.log"
    logger = log.set_up("info", "json", file, io.StringIO())
    try:
        raise ValueError("x\ny")
    except ValueError:
        logger.exception("it broke")
    [line] = lines(file)
    assert "ValueError" in str(line["exception"])


def test_pretty_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    logger = log.set_up("info", "auto", tmp_path / "tierd.log", stream)
    logger.warning("the tier is off", extra={"tier": "nvme"})
    assert "warning" in stream.getvalue() and "the tier is off  tier=nvme" in stream.getvalue()
    assert "\x1b[33m" in stream.getvalue()
    assert not (tmp_path / "tierd.log").exists()


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    log.set_up("info", "pretty", None, stream).error("x")
    assert "\x1b" not in stream.getvalue()


def test_nothing_from_outside_forges_a_line() -> None:
    stream = io.StringIO()
    logger = log.set_up("info", "pretty", None, stream)
    logger.info("name %s", "a\nb\x1b[2J", extra={"x": "c\rd"})
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_json_without_a_file_goes_to_the_stream() -> None:
    stream = io.StringIO()
    log.set_up("info", "auto", None, stream).info("x")
    assert json.loads(stream.getvalue())["event"] == "x"


def test_a_second_set_up_replaces_the_first(tmp_path: Path) -> None:
    first, second = io.StringIO(), io.StringIO()
    log.set_up("info", "pretty", None, first)
    logger = log.set_up("error", "pretty", None, second)
    logger.info("quiet")
    logger.error("loud")
    assert first.getvalue() == "" and second.getvalue().count("\n") == 1


def test_rotation(tmp_path: Path) -> None:
    file = tmp_path / "tierd.log"
    logger = log.set_up("info", "json", file, io.StringIO(), max_bytes=500, kept_files=3)
    for number in range(100):
        logger.info("line %d", number)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["tierd.log", "tierd.log.1", "tierd.log.2", "tierd.log.3"]
    assert all(path.stat().st_size <= 500 for path in tmp_path.iterdir())
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "tierd.log").mkdir()
    with pytest.raises(PermissionDenied, match="cannot write the log"):
        log.set_up("info", "json", tmp_path / "tierd.log", io.StringIO())

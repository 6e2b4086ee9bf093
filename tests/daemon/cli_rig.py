"""The command line in this process, in directories of its own."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_front import FakeFront

from tierd.daemon.cli import main


class Said(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on the standard output."""
        return json.loads(self.out)

    @property
    def hinted(self) -> bool:
        """Whether this is one error line with one next step, and nothing else."""
        lines = self.err.splitlines()
        return len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("hint: ")


class Stdin(io.TextIOWrapper):
    """A standard input of these bytes, a terminal or not."""

    def __init__(self, data: bytes, terminal: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Cli:
    """`cli("ps", "--json")` runs one command line."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = tmp_path
        self.socket = tmp_path / "s"
        self._monkeypatch, self._capsys = monkeypatch, capsys
        for name in list(os.environ):
            if name.startswith("TIERD_") and not name.startswith("TIERD_TEST_"):
                monkeypatch.delenv(name)
        for name in ("MODELS_DIR", "CACHE_DIR", "STATE_DIR", "RUNTIME_DIR"):
            monkeypatch.setenv(f"TIERD_{name}", str(tmp_path / name.partition("_")[0].lower()))
        monkeypatch.setenv("TIERD_SOCKET", str(self.socket))
        monkeypatch.setenv("TIERD_LISTEN", "")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.setenv("COLUMNS", "100")

    def __call__(self, *words: str, stdin: bytes = b"", terminal: bool = False) -> Said:
        self._monkeypatch.setattr(sys, "stdin", Stdin(stdin, terminal))
        if terminal:
            self._monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        self._capsys.readouterr()
        code = main(list(words))
        return Said(code, *self._capsys.readouterr())

    def front(self) -> FakeFront:
        """A fake front at the socket."""
        return FakeFront(self.socket)

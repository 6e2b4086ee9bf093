"""The screen in a real terminal: it starts on any kind, and gives the terminal back however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

DEADLINE_S = 60.0
LEFT = b"\x1b[?1049l"  # the alternate screen was left
SHOWN = b"\x1b[?25h"  # the cursor is there again
RUN = """
import sys
from tierd.tui.cli import top
top(sys.argv[1:], standalone_mode=False)
"""


class Terminal:
    """A pseudo-terminal with a screen in it."""

    def __init__(self, recording: Path, size: tuple[int, int], **env: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        # COLUMNS and LINES would win over the size of the terminal; test processes beside each other have them.
        own = ("NO_COLOR", "COLORTERM", "TERM", "COLUMNS", "LINES")
        base = {name: value for name, value in os.environ.items() if name not in own}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, "--replay", str(recording)], stdin=slave, stdout=slave, stderr=slave,
            env=base | {"PYTHONUTF8": "1"} | env, start_new_session=True,
        )  # fmt: skip
        self.output = b""

    def read_until(self, wanted: bytes) -> None:
        until = time.monotonic() + DEADLINE_S
        while wanted not in self.output:
            assert time.monotonic() < until, self.output[-2000:]
            self._read(0.1)

    def _read(self, wait_s: float) -> None:
        if select.select([self._master], [], [], wait_s)[0]:
            with contextlib.suppress(OSError):
                self.output += os.read(self._master, 1 << 16)

    def write(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def ended(self) -> int:
        """The exit code. What is written after the screen is gone would be a complaint: there must be none."""
        until = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < until, "it does not end"
            self._read(0.05)
        self._read(0.1)
        assert b"Traceback" not in self.output
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    @property
    def restored(self) -> bool:
        return termios.tcgetattr(self._slave)[3] == self.before[3] and LEFT in self.output and SHOWN in self.output


@pytest.mark.parametrize(
    "how", ["q", pytest.param("ctrl-c", marks=pytest.mark.long), "kill", pytest.param("hangup", marks=pytest.mark.long)]
)
def test_the_terminal_is_given_back(recordings: dict[str, Path], how: str) -> None:
    with contextlib.closing(Terminal(recordings["busy"], (80, 24), TERM="xterm-256color")) as terminal:
        terminal.read_until(b"residency")
        match how:
            case "q":
                terminal.write(b"q")
            case "ctrl-c":
                terminal.write(b"\x03")
            case "kill":
                terminal.process.send_signal(signal.SIGTERM)
            case _:
                terminal.process.send_signal(signal.SIGHUP)
        assert terminal.ended() == 0
        assert terminal.restored


@pytest.mark.long
@pytest.mark.parametrize("size", [(80, 24), (60, 20), (200, 60), (10, 3)])
@pytest.mark.parametrize("env", [{"TERM": "linux"}, {"TERM": "xterm-256color"}, {"TERM": "xterm", "NO_COLOR": "1"},
                                 {"TERM": "screen-256color"}], ids=str)  # fmt: skip
def test_it_starts_on_any_terminal(recordings: dict[str, Path], env: dict[str, str], size: tuple[int, int]) -> None:
    with contextlib.closing(Terminal(recordings["full"], size, **env)) as terminal:
        terminal.read_until(b"too" if size == (10, 3) else b"residency")
        if env["TERM"] == "linux":
            assert "█".encode() not in terminal.output
        if "NO_COLOR" in env:
            assert b"\x1b[38;2;230" not in terminal.output
        terminal.write(b"q")
        assert terminal.ended() == 0

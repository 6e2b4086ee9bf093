"""The screen inside tmux: what a person sees there, and that the terminal is as it was when it ends."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tui.test_terminal import RUN

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")]
DEADLINE_S = 60.0
SIZES = [(80, 24), (60, 20), (200, 60)]


class Tmux:
    """A tmux server of its own with one pane, in which a shell runs the screen and then says how it ended."""

    def __init__(self, root: Path, recording: Path, size: tuple[int, int], term: str, **env: str) -> None:
        self._socket = root / "tmux"
        told = " ".join(f"{name}={shlex.quote(value)}" for name, value in {"PYTHONUTF8": "1", **env}.items())
        run = shlex.join([sys.executable, "-c", RUN, "--replay", str(recording)])
        script = f"unset NO_COLOR COLORTERM COLUMNS LINES; export {told} TERM={term}; {run}; echo ENDED $?; exec cat"
        base = {name: value for name, value in os.environ.items() if name not in ("TMUX", "COLUMNS", "LINES")}
        self._env = base | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        columns, lines = (str(count) for count in size)
        self.say("-f", "/dev/null", "new-session", "-d", "-x", columns, "-y", lines, "sh", "-c", script)
        self.say("set-option", "-g", "status", "off")
        self.say("resize-window", "-x", columns, "-y", lines)

    def say(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-S", str(self._socket), *words], env=self._env, check=True, capture_output=True, text=True,
            timeout=DEADLINE_S,
        )  # fmt: skip
        return done.stdout

    def screen(self) -> str:
        return self.say("capture-pane", "-p")

    def until(self, wanted: Callable[[str], bool]) -> str:
        end_s = time.monotonic() + DEADLINE_S
        while not wanted(found := self.screen()):
            assert time.monotonic() < end_s, found
            time.sleep(0.05)
        return found

    def kill_screen(self) -> None:
        """SIGTERM to the program in the pane, the shell's child."""
        shell = self.say("display-message", "-p", "#{pane_pid}").strip()
        [child] = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        os.kill(int(child), 15)

    @property
    def restored(self) -> bool:
        told = self.say("display-message", "-p", "#{alternate_on} #{cursor_flag} #{mouse_any_flag}")
        return told.split() == ["0", "1", "0"]

    def close(self) -> None:
        self.say("kill-server")


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Callable[..., Tmux]]:
    made: list[Tmux] = []

    def start(*args: object, **env: str) -> Tmux:
        made.append(Tmux(tmp_path, *args, **env))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("term", "env"), [("tmux-256color", {}), ("screen", {}), ("linux", {}), ("tmux-256color", {"NO_COLOR": "1"})],
    ids=["256", "16", "linux", "no-colour"],
)  # fmt: skip
def test_it_is_readable_and_nothing_is_clipped(
    tmux: Callable[..., Tmux], recordings: dict[str, Path], size: tuple[int, int], term: str, env: dict[str, str]
) -> None:
    pane = tmux(recordings["busy"], size, term, **env)
    shown = pane.until(lambda text: "residency" in text and "q quit" in " ".join(text.split()))
    lines = shown.rstrip("\n").split("\n")
    assert "Traceback" not in shown and "smollm2-135m" in lines[0]
    assert len(lines) == size[1] and max(len(line) for line in lines) == size[0]
    corners = "+" if term == "linux" else "╮"
    framed = [line.rstrip() for line in lines if line.rstrip().endswith((corners, "┓"))]
    assert framed and all(len(line) == size[0] for line in framed)
    assert shown.isascii() == (term == "linux")
    colours = pane.say("capture-pane", "-p", "-e")
    coloured = re.search(r"[34]8;[25];", colours) is not None
    assert coloured == (term == "tmux-256color" and not env)
    if env:
        assert re.search(r"\x1b\[[0-9;]*(?:[34][0-7]|9[0-7]|10[0-7])m", colours) is None
    pane.say("send-keys", "q")
    pane.until(lambda text: "ENDED 0" in text)
    assert pane.restored


def test_a_terminal_of_ten_by_three_says_what_it_needs(
    tmux: Callable[..., Tmux], recordings: dict[str, Path]
) -> None:
    pane = tmux(recordings["busy"], (10, 3), "tmux-256color")
    pane.until(lambda text: "terminal" in text)
    pane.say("resize-window", "-x", "80", "-y", "24")
    pane.until(lambda text: "residency" in text)
    pane.say("send-keys", "q")
    pane.until(lambda text: "ENDED 0" in text)


@pytest.mark.parametrize("how", ["ctrl-c", "kill"])
def test_the_terminal_is_given_back(tmux: Callable[..., Tmux], recordings: dict[str, Path], how: str) -> None:
    pane = tmux(recordings["busy"], (80, 24), "tmux-256color")
    pane.until(lambda text: "residency" in text)
    assert not pane.restored
    if how == "ctrl-c":
        pane.say("send-keys", "C-c")
    else:
        pane.kill_screen()
    shown = pane.until(lambda text: "ENDED" in text)
    assert pane.restored and "Traceback" not in shown

"""A load that shows what `tierd top` is for, on a real daemon: `make demo` shows it, `make screenshots` takes pictures.

Chats with one hot system prompt, a document longer than the device arena, eight chats at once, a restart that forgets
nothing. The arenas are small, so that pages are seen to move.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.daemon_home import Home
from tierd.daemon.errors import TierdError
from tierd.daemon.protocol import Message, Sampling, Submit
from tierd.tui.app import TopApp
from tierd.tui.feed import LiveFeed
from tierd.tui.palette import Look
from tierd.tui.snapshot import Phase, Snapshot
from tierd.tui.view import View
from tierd.tui.wire import SequenceRow

MODEL = "smollm2:135m"
SIZES = {"device_mem": "96MiB", "host_mem": "128MiB", "nvme_mem": "512MiB"}
SYSTEM = "You are a patient librarian. Answer in plain words, name your sources, and never guess. " * 12
TOPICS = ("tides", "page tables", "sourdough", "glaciers", "sundials", "violins", "lichens", "canal locks")
DOCUMENT = "".join(f"On day {day} the ship stood {day * 7 % 360} degrees off its course. " for day in range(260))
SHOT_DEADLINE_S = 120.0


class Load:
    """The scripted load. `run` blocks until it was told to stop or the script is over."""

    def __init__(self, home: Home, say: Callable[[str], None], *, forever: bool) -> None:
        self.home = home
        self.stopped = threading.Event()
        self._say = say
        self._forever = forever

    def run(self) -> None:
        """The whole script, once or for ever."""
        with contextlib.suppress(TierdError, OSError):  # the daemon is being stopped
            while not self.stopped.is_set():
                self.script()
                if not self._forever:
                    return

    def script(self) -> None:
        """One round."""
        self._say("chats that share one system prompt")
        for topic in TOPICS[:3]:
            self.chat(topic, 40)
        self._say("a document longer than the device arena")
        self.ask(DOCUMENT, 60)
        self._say("eight chats at once")
        threads = [threading.Thread(target=self.chat, args=(topic, 120)) for topic in TOPICS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.stopped.is_set():
            self._say("kill -9, and the document once more")
            self.home.kill()
            self.home.start()
            self.ask(DOCUMENT, 60)

    def chat(self, topic: str, tokens: int) -> None:
        """One turn under the hot system prompt."""
        self._generate((Message("system", SYSTEM), Message("user", f"Tell me about {topic}.")), tokens)

    def ask(self, text: str, tokens: int) -> None:
        """One long prompt."""
        self._generate((Message("user", f"Summarise this log: {text}"),), tokens)

    def _generate(self, messages: tuple[Message, ...], tokens: int) -> None:
        if not self.stopped.is_set():
            sampling = Sampling(seed=1, max_tokens=tokens, ignore_eos=True)
            with contextlib.suppress(TierdError):
                self.home.generate(Submit(MODEL, messages=messages, sampling=sampling))


@contextlib.contextmanager
def daemon() -> Iterator[Home]:
    """A daemon in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="tierd-demo-") as directory:
        models_dir = os.environ.get("TIERD_TEST_MODELS", REPOSITORY / ".cache" / "test-models")
        home = Home(Path(directory), Path(models_dir), **SIZES)
        try:
            home.start("--model", MODEL)
            yield home
        finally:
            home.close()


def show() -> None:
    """`tierd top` on the load, until it is left."""
    with daemon() as home:
        load = Load(home, lambda text: None, forever=True)
        thread = threading.Thread(target=load.run)
        thread.start()
        try:
            subprocess.run([sys.executable, "-m", "tierd.daemon.cli", "top", "--socket", str(home.socket)], check=False)
        finally:
            load.stopped.set()
            home.kill_everything()
            thread.join()


async def photograph(directory: Path) -> None:
    """Pictures of the screen while the load runs, as SVG."""
    with daemon() as home:
        feed = LiveFeed(home.socket, interval_s=0.25, clock=time.monotonic, wall=time.time)
        app = TopApp(feed, View(Look.DARK, False), clock=time.monotonic, time_of_day=time.gmtime)
        load = Load(home, print, forever=False)
        async with app.run_test(size=(160, 45)) as pilot:

            async def until(wanted: Callable[[Snapshot], bool]) -> None:
                async with asyncio.timeout(SHOT_DEADLINE_S):
                    while not wanted(app.snapshot):
                        await pilot.pause(0.05)

            def shoot(name: str) -> None:
                (directory / f"{name}.svg").write_text(app.export_screenshot(title="tierd top", simplify=True))
                print(f"{directory / name}.svg")

            await until(lambda s: s.standing.phase is Phase.LIVE)
            working = asyncio.create_task(asyncio.to_thread(load.run))
            try:
                await until(lambda s: len([row for row in s.sequences or () if row.phase == "decode"]) >= 6)
                await pilot.pause(0.6)
                shoot("top-busy")
                await pilot.press("5", "z")
                await pilot.pause(0.6)
                shoot("top-prefixes")
                await pilot.press("z", "3")
                await until(lambda s: s.standing.phase is Phase.DISCONNECTED)
                await until(
                    lambda s: s.standing.phase is Phase.LIVE and any(_is_coming(row) for row in s.sequences or ())
                )
                await pilot.pause(0.3)
                shoot("top-restored")
            finally:
                load.stopped.set()
                await working


def _is_coming(row: SequenceRow) -> bool:
    """Whether its pages come from disk, or have just come."""
    return row.phase in ("fetching", "prefill", "decode") and bool(row.cached_tokens or row.restore_total)


def main() -> None:
    """`--shots DIRECTORY` takes pictures, without it the screen is shown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shots", type=Path, metavar="DIRECTORY")
    chosen = parser.parse_args()
    if chosen.shots is not None:
        chosen.shots.mkdir(parents=True, exist_ok=True)
        asyncio.run(photograph(chosen.shots))
    else:
        show()


if __name__ == "__main__":
    main()

"""A daemon of its own for a test: real processes, real sockets, real files in a directory that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tierd.clients.blocking import Client
from tierd.daemon.protocol import Event, Message, Sampling, Submit

START_DEADLINE_S = 120.0  # the first start may compile kernels


class Home:
    """Directories, environment and command line of one daemon. `close` stops it whatever its state."""

    def __init__(self, root: Path, models_dir: Path, **settings: str) -> None:
        self.root = root
        self.environment = os.environ | {
            "TIERD_MODELS_DIR": str(models_dir),
            "TIERD_LISTEN": "",
            "XDG_CACHE_HOME": str(root / "cache"),
            "XDG_STATE_HOME": str(root / "state"),
            "XDG_CONFIG_HOME": str(root / "config"),
            "XDG_DATA_HOME": str(root / "data"),
            "XDG_RUNTIME_DIR": str(root / "run"),
            "COLUMNS": "100",
        }
        self.environment |= {f"TIERD_{name.upper()}": value for name, value in settings.items()}
        (root / "run").mkdir(mode=0o700, exist_ok=True)
        self.socket = root / "run" / "tierd" / "tierd.sock"

    def command(self, *words: str, check: bool = True, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs `tierd WORDS`; with `check`, a failure shows what it said."""
        done = subprocess.run(
            [sys.executable, "-m", "tierd.daemon.cli", *words], env=self.environment, input=text or "",
            capture_output=True, text=True, timeout=START_DEADLINE_S,
        )
        if check and done.returncode:
            raise AssertionError(f"tierd {' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def start(self, *words: str) -> None:
        self.command("start", *words)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.command("status", "--json").stdout)
        return answer

    def engine_pid(self) -> int:
        engines = json.loads(self.command("ps", "--json").stdout)
        listed = engines["engines"] if isinstance(engines, dict) else engines
        return int(listed[0]["pid"])

    def kill(self) -> None:
        """SIGKILL to the daemon; its engine notices the closed socket and ends by itself."""
        pid = self.status()["pid"]
        engines = self.engine_pids()
        os.kill(pid, signal.SIGKILL)
        self.wait_gone([pid, *engines])

    def kill_everything(self) -> None:
        """SIGKILL to daemon and engine in the same moment, so that nobody gets to tidy up."""
        pids = [self.status()["pid"], *self.engine_pids()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.wait_gone(pids)

    def engine_pids(self) -> list[int]:
        engines = json.loads(self.command("ps", "--json").stdout)
        listed = engines["engines"] if isinstance(engines, dict) else engines
        return [int(engine["pid"]) for engine in listed if engine.get("pid")]

    @staticmethod
    def wait_gone(pids: list[int], deadline_s: float = 30.0) -> None:
        until = time.monotonic() + deadline_s
        while any(_alive(pid) for pid in pids):
            if time.monotonic() > until:
                raise AssertionError(f"still alive: {[pid for pid in pids if _alive(pid)]}")
            time.sleep(0.02)

    def ask(self, prompt: str, **options: Any) -> tuple[str, dict[str, Any]]:
        """One chat turn through the socket; answers the text and the `done` data."""
        return self.chat([Message("user", prompt)], **options)

    def chat(self, messages: list[Message], model: str = "smollm2:135m", **options: Any) -> tuple[str, dict[str, Any]]:
        sampling = Sampling(**{"temperature": 0.0, "max_tokens": 24} | options)
        return self.generate(Submit(model=model, messages=tuple(messages), sampling=sampling))

    def generate(self, submit: Submit) -> tuple[str, dict[str, Any]]:
        with Client(self.socket) as client:
            return collect(list(client.generate(submit)))

    def close(self) -> None:
        self.command("stop", check=False)


def collect(events: list[Event]) -> tuple[str, dict[str, Any]]:
    """The text of a generation and the data of its terminal event."""
    assert events[-1].ev == "done", events[-1]
    return "".join(event.data["text"] for event in events if event.ev == "text"), events[-1].data


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"

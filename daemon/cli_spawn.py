"""Start a daemon in the background and wait for it; wait for one to end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tierd.clients.blocking import Client
from tierd.daemon import paths
from tierd.daemon.cli_common import note
from tierd.daemon.config import Settings
from tierd.daemon.errors import BadConfig, DaemonUnreachable, PermissionDenied, TierdError, TimedOut, TryLater

START_TIMEOUT_S = 15.0
END_TIMEOUT_S = 30.0
POLL_S = 0.02
QUIET_S = 1.0  # a person who waits longer is told for what


class Spawned(NamedTuple):
    """A connected client, and the pid of the daemon behind it: `is_ours` unless another start was faster."""

    client: Client
    pid: int
    is_ours: bool


def spawn(settings: Settings, flags: list[str]) -> Spawned:
    """Start `tierd serve` with these flags, apart from this terminal; returns when its socket answers.

    What the daemon prints before its log is open goes to `tierd.err` beside the
    log; when it dies early, that text is the error, under the exit code it chose.
    """
    if (fault := unwritable(settings.cache_dir)) is not None:
        note(f"warning: {fault} cannot be written to: neither pages nor compiled kernels are kept; see --cache-dir")
    words = paths.make_private_dir(paths.state_dir()) / "tierd.err"
    with open(os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as sink:
        child = subprocess.Popen(
            [sys.executable, "-m", "tierd.daemon.cli", "serve", *flags],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,  # a Ctrl-C in this terminal is not for the daemon
            env={**os.environ, "TIERD_API_KEY": settings.api_key},  # not as a flag, see `given_flags`
        )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            client = Client(settings.socket).connect()
            # Of two starts at once one child gives up; the socket then belongs to the other.
            pid = int(client.call("hello")["pid"])
            return Spawned(client, pid, pid == child.pid)
        except DaemonUnreachable:
            if child.poll() is not None:
                raise _early_death(child.returncode, words) from None
        time.sleep(POLL_S)
    child.terminate()
    raise TimedOut(f"the daemon did not answer within {START_TIMEOUT_S:g} s", hint=f"see {words} and `tierd logs`")


def unwritable(directory: Path) -> Path | None:
    """The directory, or the nearest one above it that is there, when nothing can be written there; else None."""
    directory = paths.nearest_existing(directory)
    return None if os.access(directory, os.W_OK | os.X_OK) else directory


def _early_death(returncode: int, words: Path) -> TierdError:
    said = words.read_text("utf-8", "replace").splitlines()
    message = next((line.removeprefix("error: ") for line in said if line.startswith("error: ")), None)
    hint = next((line.removeprefix("hint: ") for line in said if line.startswith("hint: ")), None)
    kinds: dict[int, type[TierdError]] = {75: TryLater, 77: PermissionDenied, 78: BadConfig}
    kind = kinds.get(returncode, TierdError)
    return kind(message or f"the daemon ended at its start with exit code {returncode}", hint=hint or f"see {words}")


def end(client: Client, pid: int, socket: Path) -> None:
    """Stop a daemon that was started for something it can't do: with its settings nobody would get any further."""
    with contextlib.suppress(DaemonUnreachable):  # it may be faster than its answer
        client.call("stop", timeout_s=0.0)
    wait_until_gone(socket, pid, END_TIMEOUT_S)
    note("the daemon is stopped again")


def wait_until_gone(
    socket: Path, pid: int, timeout_s: float, *, on_wait: Callable[[], None] | None = None
) -> None:
    """Return when the process is gone and its socket no longer answers. Raises TimedOut.

    `on_wait` is called once, when it takes longer than `QUIET_S`.
    """
    started_s = time.monotonic()
    while (waited_s := time.monotonic() - started_s) < timeout_s:
        if not _alive(pid) and not _answers(socket):
            return
        if on_wait is not None and waited_s >= QUIET_S:
            on_wait()
            on_wait = None
        time.sleep(POLL_S)
    raise TimedOut(f"the daemon (pid {pid}) did not end within {timeout_s:g} s", hint=f"`kill -9 {pid}` loses no page")


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    # A zombie is gone for our purpose: its files and sockets are closed, its parent just has not looked yet.
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(") ")[2][:1] != "Z"
    except OSError:
        return False


def _answers(socket: Path) -> bool:
    try:
        Client(socket).connect().close()
    except TierdError:
        return False
    return True

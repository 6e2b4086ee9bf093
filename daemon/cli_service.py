"""Verbs about the service: service install, service status, service uninstall. They drive systemd's user manager."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import platformdirs

from tierd.daemon import config
from tierd.daemon.cli_common import (
    given_flags,
    json_option,
    load_settings,
    lock_holder,
    note,
    print_json,
    settings_options,
)
from tierd.daemon.errors import AlreadyRunning, BadRequest, Conflict, NotFound, PermissionDenied, TimedOut
from tierd.daemon.service_unit import NAME, unit_text

SYSTEMCTL_TIMEOUT_S = 120.0  # beyond the start and the stop of the unit
# Where models, pages, settings, keys and the socket lie: the service has to find what this shell's commands find.
_PLACES = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME")
_SHOWN = ("ActiveState", "SubState", "UnitFileState", "MainPID", "NRestarts", "Result", "StatusText")
_LOGS_HINT = f"`journalctl --user -u {NAME}` and `tierd logs` show why"


@click.group()
def service() -> None:
    """Have systemd run the daemon: from login on, again after a crash."""


@service.command()
@settings_options()
@click.option("--no-start", is_flag=True, help="Start it with the next login, not now.")
@click.option("--print", "only_print", is_flag=True, help="Print the unit and change nothing.")
def install(flags: dict[str, Any], no_start: bool, only_print: bool) -> None:
    """Install a user service. It runs with these flags, and with the TIERD_* and XDG_* variables that are set now."""
    settings = load_settings(flags)
    if secrets := [doc for doc in config.setting_docs() if doc.secret and flags.get(doc.name) is not None]:
        # Left out, the service would refuse whoever has the key, or let in whoever has none.
        raise BadRequest(
            f"{secrets[0].flag} is not written into a unit, where others could read it",
            hint=f"put {secrets[0].name} into the config file, or use `tierd key add`",
        )
    # A service starts somewhere else: relative paths are made whole.
    whole = {name: str(found) if isinstance(found := getattr(settings, name), Path) else flags[name] for name in flags}
    given = given_flags({name: value for name, value in whole.items() if flags[name] is not None})
    text = unit_text([sys.executable, "-m", "tierd.daemon.cli", "serve", *given], _environment())
    if only_print:
        print(text, end="")
        return
    if (why := _missing()) is not None:
        print(text, end="")
        raise NotFound(f"{why}; nothing was installed", hint="its unit stands above; `tierd start` needs no systemd")
    pid = lock_holder(settings.socket)
    if pid is not None and not no_start and pid != _main_pid():
        raise AlreadyRunning(f"a daemon (pid {pid}) runs already", hint="`tierd stop` first")
    _tell_secrets(settings)
    path = _unit_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{NAME}.{os.getpid()}")
        fresh.write_text(text)
        os.replace(fresh, path)
    except OSError as exc:
        raise PermissionDenied(f"cannot write {path}: {exc.strerror}", hint="check its owner and mode") from exc
    _systemctl("daemon-reload")
    _systemctl("enable", NAME)
    if not no_start:
        _systemctl("restart", NAME)  # a running one takes the new unit
    print(f"{NAME} is installed at {path}" + ("" if no_start else " and runs"))
    note("`loginctl enable-linger` keeps it running when you log out")


@service.command()
@json_option
def status(as_json: bool) -> None:
    """Show what systemd says of the service."""
    _require()
    found = _show()
    if as_json:
        print_json({**found, "unit": str(_unit_path())})
        return
    for name, value in found.items():
        print(f"{name:<14} {value}")


@service.command()
def uninstall() -> None:
    """Stop the service, its pages written, and remove the unit."""
    _require()
    _systemctl("disable", "--now", NAME)
    try:
        _unit_path().unlink(missing_ok=True)
    except OSError as exc:
        raise PermissionDenied(f"cannot remove {_unit_path()}: {exc.strerror}", hint="check its owner") from exc
    _systemctl("daemon-reload")
    print(f"{NAME} is removed; models, pages and settings stay")


def _unit_path() -> Path:
    return Path(platformdirs.user_config_dir("systemd")) / "user" / NAME


def _environment() -> dict[str, str]:
    """The variables that the service gets: every setting, without secrets, and where things lie."""
    secret = {doc.env for doc in config.setting_docs() if doc.secret}
    return {
        name: value
        for name, value in os.environ.items()
        if name in _PLACES
        or (name.startswith("TIERD_") and name not in secret and not name.startswith("TIERD_TEST_"))
    }


def _tell_secrets(settings: config.Settings) -> None:
    if settings.api_key and os.environ.get("TIERD_API_KEY"):
        note("TIERD_API_KEY is not written into the unit; put api_key into the config file, or use `tierd key add`")


def _missing() -> str | None:
    """Why no service can be installed here; None when one can."""
    if shutil.which("systemctl") is None:
        return "this system has no systemd"
    if _run("show-environment").returncode != 0:
        return "systemd's user manager does not answer"
    return None


def _require() -> None:
    if (why := _missing()) is not None:
        raise NotFound(why, hint="`tierd status` shows a daemon that was started in another way")
    if not _unit_path().exists():
        raise NotFound("the service is not installed", hint="`tierd service install`")


def _show() -> dict[str, str]:
    """Properties of the unit, as systemd names them."""
    done = _run("show", NAME, f"--property={','.join(_SHOWN)}")
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return {name: found[name] for name in _SHOWN if name in found}


def _main_pid() -> int:
    text = _show().get("MainPID", "0")
    return int(text) if text.isdigit() else 0


def _systemctl(*words: str) -> None:
    """Run it; raises Conflict with what it said."""
    done = _run(*words)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise Conflict(f"systemctl --user {' '.join(words)}: {said}", hint=_LOGS_HINT)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["systemctl", "--user", "--no-pager", *words], capture_output=True, text=True, timeout=SYSTEMCTL_TIMEOUT_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        message = f"systemctl --user {words[0]} took longer than {SYSTEMCTL_TIMEOUT_S:g} s"
        raise TimedOut(message, hint=_LOGS_HINT) from None

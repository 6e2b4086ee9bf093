"""The verb `launch`: a coding client that talks to tierd. What it needs stands in `client_setup`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import Any

import click

from tierd.daemon.cli_common import (
    connect,
    connect_if_running,
    load_settings,
    note,
    settings_options,
)
from tierd.daemon.client_setup import CLIENTS, Setup, setup_of
from tierd.daemon.config import Settings, is_loopback, split_listen
from tierd.daemon.errors import BadRequest, Conflict, ModelNotFound, NotFound, TierdError
from tierd.daemon.keys import KeyRing

WANTED_CONTEXT = 32768  # below this coding clients run out of room within a few turns
ANY_KEY = "tierd"  # where none is needed: the clients insist on one


@click.command(context_settings={"ignore_unknown_options": True})
@settings_options("socket", "keys_file", "listen", "api_key", "default_model")
@click.argument("client", type=click.Choice(list(CLIENTS)))
@click.option("--model", help="The model it is to use; the default model without.")
@click.option("--key", help="An API key of `tierd key add`, where HTTP needs one; - reads it from the standard input.")
@click.option("--run", "mode", flag_value="run", help="Start the client in place of this command.")
@click.option("--print", "mode", flag_value="print", default="print", help="Show what to set and what to type.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    flags: dict[str, Any], client: str, model: str | None, key: str | None, mode: str, args: tuple[str, ...]
) -> None:
    """Point a coding client at tierd: claude, codex, aider or opencode. What follows -- is passed on to it."""
    settings = load_settings(flags)
    text = sys.stdin.readline().strip() if key == "-" else key
    api_key = text or settings.api_key or _no_key(settings, must_have=mode == "run")
    url, name, context = _look(settings, model or settings.default_model, must_run=mode == "run")
    setup = setup_of(client, url, name, api_key)
    if 0 < context < WANTED_CONTEXT:
        note(
            f"{name} has a context of {context} tokens; {client} is made for {WANTED_CONTEXT} and more: name a "
            "model that has them with --model (`tierd list` shows contexts, `tierd pull` fetches models)"
        )
    if mode == "run":
        _start(client, setup, args)
    _show(setup, args, secret=api_key if text or settings.api_key else "")


def _look(settings: Settings, model: str, *, must_run: bool) -> tuple[str, str, int]:
    """Where HTTP listens, the model's whole name, its context in tokens (0: not known, no daemon runs)."""
    found = connect(settings) if must_run else connect_if_running(settings)
    if found is None:
        return _configured_url(settings), model, 0
    with found:
        url = found.call("status").get("http")
        if not url:
            raise Conflict("the daemon does not serve HTTP", hint="start it with --listen 127.0.0.1:8421")
        try:
            shown = found.call("show", model=model)
        except ModelNotFound:
            raise
        except TierdError:
            if must_run:
                raise
            return _reachable(str(url)), model, 0
    return _reachable(str(url)), str(shown["name"]), int(shown.get("context", 0))


def _configured_url(settings: Settings) -> str:
    if not settings.listen:
        raise Conflict("HTTP is turned off", hint="set --listen, or remove listen from the config file")
    return _reachable(f"http://{settings.listen}")


def _reachable(url: str) -> str:
    """The address to ask at, of one to listen on: every address of the machine is no address to ask at."""
    host, port = split_listen(url.removeprefix("http://"))
    if not is_loopback(host) and host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _no_key(settings: Settings, *, must_have: bool) -> str:
    if not KeyRing(settings.keys_file).wants_one():
        return ANY_KEY
    if must_have:
        raise BadRequest("HTTP needs an API key here", hint="add --key; `tierd key add NAME` makes one", param="key")
    return "YOUR_KEY"


def _start(client: str, setup: Setup, args: tuple[str, ...]) -> None:
    """Become the client. Raises NotFound when it is not installed."""
    program = shutil.which(setup.command[0])
    if program is None:
        raise NotFound(f"{client} is not installed", hint=f"`{CLIENTS[client]}` installs it")
    sys.stdout.flush()
    os.execve(program, [*setup.command, *args], {**os.environ, **setup.environment})


def _show(setup: Setup, args: tuple[str, ...], secret: str) -> None:
    for name, value in setup.environment.items():
        shown = value.replace(secret, "YOUR_KEY") if secret else value  # this may be pasted anywhere
        print(f"export {name}={shlex.quote(shown)}")
    print(shlex.join([*setup.command, *args]))

"""Other keys for the actions of the screen: `top.toml` beside `config.toml`.

    [keys]
    "app.quit" = "ctrl+q"
    "act.pin" = "P"

The names are those that `tierd top --keys` lists, the keys are Textual's, several with commas between.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from textual.binding import Binding

from tierd.daemon.errors import BadConfig, suggest

_DIALOGS = frozenset({"ask", "confirm", "help"})  # screens of their own: their keys mean nothing elsewhere
_APART = frozenset({frozenset({"list", "map"}), frozenset({"prefixes", "map"})})  # one of them has the focus


def load(path: Path, known: Mapping[str, Binding]) -> dict[str, str]:
    """Keys by name of their action; empty when there is no such file. Raises BadConfig that names what is wrong.

    `known`: every action with the keys that it has by itself. Of two that can be meant at once none may have a key of
    the other.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise BadConfig(f"{path} can't be read: {exc.strerror}") from None
    except ValueError as exc:  # neither TOML nor UTF-8
        raise BadConfig(f"{path} is not valid TOML: {exc}") from None
    if strange := sorted(data.keys() - {"keys"}):
        raise BadConfig(f"{path}: unknown table {strange[0]!r}", hint="there is [keys]")
    keys = data.get("keys", {})
    if not isinstance(keys, dict):
        raise BadConfig(f"{path}: keys is not a table")
    names = list(known)
    for name, key in keys.items():
        if name not in names:
            raise BadConfig(
                f"{path}: there is no action {name!r}", hint=suggest(name, names) or "`tierd top --keys` lists them"
            )
        if not isinstance(key, str) or not all(part.strip() for part in key.split(",")):
            raise BadConfig(f"{path}: {name}: a key is a text such as \"ctrl+q\"")
    mine = {name: ",".join(part.strip() for part in key.split(",")) for name, key in keys.items()}
    if (found := clash(mine, known)) is not None:
        key, one, other = found
        raise BadConfig(
            f"{path}: {one} and {other} have the same key {key!r}", hint=f"give one of them another; {other} has it"
            f"{'' if other in mine else ' by itself'}",
        )  # fmt: skip
    return mine


def clash(keymap: Mapping[str, str], known: Mapping[str, Binding]) -> tuple[str, str, str] | None:
    """A key, an action that the user gave it to, and another one that has it; None when each key means one thing."""
    owners: dict[str, list[str]] = {}
    for name in (*keymap, *(name for name in known if name not in keymap)):  # so that the user's come first
        for key in key_of(known[name], keymap).split(","):
            others = owners.setdefault(key.strip(), [])
            for other in others:
                if other != name and _together(other, name):
                    return key.strip(), other, name
            others.append(name)
    return None


def _together(one: str, other: str) -> bool:
    """Whether a key can mean both: they are actions of one place, or of two that hear keys at once."""
    places = frozenset({one.partition(".")[0], other.partition(".")[0]})
    return len(places) == 1 or not (places & _DIALOGS or places in _APART)


def key_of(binding: Binding, keymap: Mapping[str, str]) -> str:
    """The keys of an action as the user has them."""
    return keymap.get(binding.id or "", binding.key)

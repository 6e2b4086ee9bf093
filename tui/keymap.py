"""Other keys for the actions of the screen: `top.toml` beside `config.toml`.

    [keys]
    "app.quit" = "ctrl+q"
    "act.pin" = "P"

The names are those that `tierd top --keys` lists, the keys are Textual's, several with commas between.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from textual.binding import Binding

from tierd.daemon.errors import BadConfig, suggest


def load(path: Path, known: Iterable[str]) -> dict[str, str]:
    """Keys by name of their action; empty when there is no such file. Raises BadConfig that names what is wrong."""
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
    twice = [name for name in keys if any(other != name and keys[other] == keys[name] for other in keys)]
    if twice:
        raise BadConfig(f"{path}: {' and '.join(twice[:2])} have the same key {keys[twice[0]]!r}")
    return dict(keys)


def key_of(binding: Binding, keymap: Mapping[str, str]) -> str:
    """The keys of an action as the user has them."""
    return keymap.get(binding.id or "", binding.key)

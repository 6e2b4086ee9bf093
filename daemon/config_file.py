"""The config file: TOML, its tables flattened to keys with dots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tierd.daemon.errors import BadConfig


def read_file(file: Path, *, must_exist: bool) -> dict[str, object]:
    """Keys and values, those of tables as `table.key`; nothing where there is no file. Raises BadConfig."""
    if not must_exist and not file.exists():
        return {}
    import tomllib  # 10 ms that only a user with a config file pays

    try:
        with file.open("rb") as stream:
            return dict(_dotted(tomllib.load(stream)))
    except FileNotFoundError:
        raise BadConfig(f"no config file at {file}", hint="check TIERD_CONFIG") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise BadConfig(f"{file} is not valid TOML: {exc}", hint="mend that line, or move the file away") from None
    except OSError as exc:
        raise BadConfig(f"cannot read {file}: {exc.strerror}", hint="check its owner and mode") from None


def _dotted(table: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Keys of a file and of the tables in it: `strip_attribution` of `[compat]` is `compat.strip_attribution`."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value

"""Where tierd keeps its things, and that they are ours.

| what | default | variable |
| --- | --- | --- |
| config file | `~/.config/tierd/config.toml` | `TIERD_CONFIG` |
| API keys (their digests) | `~/.config/tierd/keys.json` | `TIERD_KEYS_FILE` |
| models | `~/.local/share/tierd/models` | `TIERD_MODELS_DIR` |
| page store, compiled kernels, downloads | `~/.cache/tierd` | `TIERD_CACHE_DIR` |
| logs, history | `~/.local/state/tierd` | `TIERD_STATE_DIR` |
| files and answers of `/v1/batches` | `~/.local/state/tierd/batches` | `TIERD_BATCHES_DIR` |
| socket, lock | `$XDG_RUNTIME_DIR/tierd` | `TIERD_RUNTIME_DIR`, `TIERD_SOCKET` |

The XDG variables are honoured. Anything below the cache may be deleted at any time: that is a miss, never an error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from tierd.daemon.errors import BadConfig, PermissionDenied

APP = "tierd"
SOCKET_PATH_BYTES = 107  # sun_path of Linux holds 108 bytes with the closing zero


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there: where it will be made, and whose disk it will take."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def config_file(env: Mapping[str, str] = os.environ) -> Path:
    """The user's config file, whether or not it exists."""
    return _chosen(env, "TIERD_CONFIG") or Path(platformdirs.user_config_dir(APP)) / "config.toml"


def keys_file(env: Mapping[str, str] = os.environ) -> Path:
    """The API keys of the HTTP door: beside the config file."""
    return _chosen(env, "TIERD_KEYS_FILE") or config_file(env).with_name("keys.json")


def models_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where prepared models lie."""
    return _chosen(env, "TIERD_MODELS_DIR") or Path(platformdirs.user_data_dir(APP)) / "models"


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """The root of everything that can be made again: `kv/`, `kernels/`, `downloads/`."""
    return _chosen(env, "TIERD_CACHE_DIR") or Path(platformdirs.user_cache_dir(APP))


def state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Logs and the history of the chat prompt."""
    return _chosen(env, "TIERD_STATE_DIR") or Path(platformdirs.user_state_dir(APP))


def batches_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where the files that HTTP clients upload lie, and the answers of their batches."""
    return _chosen(env, "TIERD_BATCHES_DIR") or state_dir(env) / "batches"


def runtime_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Where socket and lock lie.

    Without a usable XDG_RUNTIME_DIR (ssh without a session, containers) this is a directory of our own below the state
    directory, never a bare /tmp: names there belong to whoever comes first.
    """
    if chosen := _chosen(env, "TIERD_RUNTIME_DIR"):
        return chosen
    base = env.get("XDG_RUNTIME_DIR")
    if base and os.path.isabs(base) and _is_ours(Path(base)):
        return Path(base) / APP
    return state_dir(env) / "run"


def socket_path(env: Mapping[str, str] = os.environ) -> Path:
    """Where the daemon listens unless a setting says otherwise."""
    return _chosen(env, "TIERD_SOCKET") or runtime_dir(env) / "tierd.sock"


def log_file(env: Mapping[str, str] = os.environ) -> Path:
    """The newest log file; rotated ones have `.1`, `.2` ... after the name."""
    return state_dir(env) / "tierd.log"


def make_private_dir(path: Path) -> Path:
    """Create a directory with mode 0700, or check that the one there is a directory of ours and closed to others.

    Parents are made with the usual mode. A directory of ours that is open to others is closed. Raises
    PermissionDenied when it belongs to someone else, is no directory, or cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise PermissionDenied(f"{path} is not a directory of this user", hint="choose another one, or remove it")
        if stat.S_IMODE(info.st_mode) & 0o077:
            path.chmod(0o700)
    except OSError as exc:
        hint = "check its owner and mode"
        raise PermissionDenied(f"cannot use the directory {path}: {exc.strerror}", hint=hint) from exc
    return path


def check_socket_path(path: Path) -> Path:
    """Return the path if the kernel can bind it; raises BadConfig when it is too long."""
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES:
        raise BadConfig(
            f"the socket path has {length} bytes, the system allows {SOCKET_PATH_BYTES}: {path}",
            hint="set a shorter one with --socket or TIERD_SOCKET",
            param="socket",
        )
    return path


def _chosen(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(name)
    return Path(value).expanduser().absolute() if value else None


def _is_ours(path: Path) -> bool:
    try:
        info = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()

"""Where things lie, and whose they are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tierd.daemon import paths
from tierd.daemon.errors import BadConfig, PermissionDenied


def test_xdg_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    assert paths.config_file({}) == tmp_path / "config" / "tierd" / "config.toml"
    assert paths.models_dir({}) == tmp_path / "data" / "tierd" / "models"
    assert paths.cache_dir({}) == tmp_path / "cache" / "tierd"
    assert paths.state_dir({}) == tmp_path / "state" / "tierd"
    assert paths.log_file({}) == tmp_path / "state" / "tierd" / "tierd.log"


def test_variables_win(tmp_path: Path) -> None:
    places = {
        "TIERD_CONFIG": paths.config_file, "TIERD_MODELS_DIR": paths.models_dir, "TIERD_CACHE_DIR": paths.cache_dir,
        "TIERD_STATE_DIR": paths.state_dir, "TIERD_RUNTIME_DIR": paths.runtime_dir, "TIERD_SOCKET": paths.socket_path,
    }  # fmt: skip
    for name, place in places.items():
        assert place({name: str(tmp_path / name)}) == tmp_path / name
        assert place({name: ""}) == place({})


def test_runtime_dir_of_the_session(tmp_path: Path) -> None:
    assert paths.runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "tierd"
    assert paths.socket_path({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "tierd" / "tierd.sock"


@pytest.mark.parametrize("base", ["", "relative", "/does/not/exist"])
def test_runtime_dir_without_a_session(tmp_path: Path, base: str) -> None:
    env = {"XDG_RUNTIME_DIR": base, "TIERD_STATE_DIR": str(tmp_path)}
    assert paths.runtime_dir(env) == tmp_path / "run"


def test_somebody_elses_runtime_dir_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "TIERD_STATE_DIR": str(tmp_path / "state")}
    assert paths.runtime_dir(env) == tmp_path / "state" / "run"


def test_private_dir_is_made_closed(tmp_path: Path) -> None:
    path = paths.make_private_dir(tmp_path / "a" / "b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert paths.make_private_dir(path) == path


def test_private_dir_that_is_open_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o755)
    paths.make_private_dir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_private_dir_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionDenied, match="not a directory of this user"):
        paths.make_private_dir(tmp_path / "theirs")


def test_a_link_or_a_file_is_no_private_dir(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(PermissionDenied, match="not a directory"):
            paths.make_private_dir(tmp_path / name)
    with pytest.raises(PermissionDenied, match="cannot use"):
        paths.make_private_dir(tmp_path / "file" / "below")


def test_socket_path_length() -> None:
    longest = Path("/" + "x" * 106)
    assert paths.check_socket_path(longest) == longest
    with pytest.raises(BadConfig, match="108 bytes, the system allows 107"):
        paths.check_socket_path(Path("/" + "x" * 107))
    with pytest.raises(BadConfig):
        paths.check_socket_path(Path("/" + "ü" * 60))

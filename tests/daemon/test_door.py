"""The socket file, its lock, and who stands before it."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from tierd.daemon.door import Door, peer_uid
from tierd.daemon.errors import AlreadyRunning, BadConfig, PermissionDenied


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "t.sock"


def test_modes_and_removal(path, no_files_left):
    door = Door(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        served, _ = door.socket.accept()
        assert peer_uid(served) == os.getuid()
        served.close()
    door.close()
    assert not path.exists()


def test_a_second_one_is_told_whose_it_is(path, no_files_left):
    door = Door(path)
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"):
        Door(path)
    door.close()
    Door(path).close()


def test_a_stale_socket_is_replaced(path):
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    Door(path).close()


def test_somebody_who_listens_without_the_lock_is_left_alone(path, no_files_left):
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        with pytest.raises(AlreadyRunning, match="something else"):
            Door(path)
    assert path.exists()


def test_closing_leaves_a_successors_socket(path):
    door = Door(path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(path))
        door.close()
        assert path.exists()


def test_a_path_that_is_too_long(tmp_path):
    with pytest.raises(BadConfig):
        Door(tmp_path / ("x" * 120) / "t.sock")


def test_a_directory_that_is_none(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(PermissionDenied):
        Door(tmp_path / "run" / "t.sock")


def test_a_directory_in_the_way(path, no_files_left):
    path.mkdir(parents=True)
    with pytest.raises((PermissionDenied, OSError)):
        Door(path)


@pytest.mark.parametrize("cleaned", ["socket", "files", "directory"])
def test_a_socket_that_was_removed_comes_back_under_a_lock(path, no_files_left, cleaned):
    door = Door(path)
    assert not door.restore()
    path.unlink()
    if cleaned != "socket":
        path.with_name("t.sock.lock").unlink()
    if cleaned == "directory":
        path.parent.rmdir()
    assert door.restore() and not door.restore()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        door.socket.accept()[0].close()
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"):
        Door(path)
    door.close()
    assert not path.exists()


def test_a_successor_that_took_a_cleaned_place_is_left_alone(path, no_files_left):
    door = Door(path)
    path.unlink()
    path.with_name("t.sock.lock").unlink()
    successor = Door(path)
    assert not door.restore()
    path.unlink()
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"):
        door.restore()
    door.close()
    assert successor.restore()
    successor.close()

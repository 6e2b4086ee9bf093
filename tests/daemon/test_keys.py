"""API keys: what is kept of them, and how a running daemon sees them change."""

from __future__ import annotations

import ast
import inspect
import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from tierd.daemon import keys
from tierd.daemon.api import gate
from tierd.daemon.errors import BadRequest, Conflict, NotFound, PermissionDenied
from tierd.daemon.keys import KeyRing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


def test_a_key_is_kept_as_a_digest_in_a_private_file(path: Path) -> None:
    made, text = keys.add(path, "laptop", quota_pages=10, max_requests=2)
    assert text.startswith(f"tierd_{made.id}_") and len(text) > 50
    assert text.rpartition("_")[2] not in path.read_text() and made.sha256 in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.read(path) == (made,) and (made.quota_pages, made.max_requests) == (10, 2)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["keys.json", "keys.json.lock"]


def test_no_two_keys_are_alike(path: Path) -> None:
    made = [keys.add(path, f"k{number}") for number in range(20)]
    assert len({key.id for key, _ in made}) == len({text for _, text in made}) == 20
    ring = KeyRing(path)
    assert all(ring.find(text) == key for key, text in made)


@pytest.mark.parametrize("name", ["", " ", "a b", "../x", "a" * 65, "-a", "ä", "a\n", "a/b", "\0"])
def test_bad_names(path: Path, name: str) -> None:
    with pytest.raises(BadRequest):
        keys.add(path, name)
    assert not path.exists()


def test_names_are_unique_and_there_is_an_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.add(path, "a")
    with pytest.raises(Conflict, match="named a"):
        keys.add(path, "a")
    monkeypatch.setattr(keys, "MAX_KEYS", 1)
    with pytest.raises(Conflict, match="1 keys"):
        keys.add(path, "b")


def test_remove_by_name_and_id(path: Path) -> None:
    one, two = keys.add(path, "one")[0], keys.add(path, "two")[0]
    assert keys.remove(path, "one") == one and keys.remove(path, two.id) == two
    assert keys.read(path) == ()
    with pytest.raises(NotFound):
        keys.remove(path, "one")


def test_a_ring_sees_keys_come_and_go(path: Path) -> None:
    ring = KeyRing(path)
    assert not ring.wants_one()
    made, text = keys.add(path, "a")
    assert ring.wants_one() and ring.find(text) == made and ring.by_id(made.id) == made
    keys.remove(path, "a")
    assert ring.find(text) is None and ring.by_id(made.id) is None and not ring.wants_one()


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t + "x", str.upper, lambda t: "", str.swapcase,
                                    lambda t: t.replace("tierd", "x"), lambda t: f"tierd__{t}", lambda t: "tierd_0_0",
                                    lambda t: t + "\udc80", lambda t: "_" * 5000])  # fmt: skip
def test_what_is_not_the_key_opens_nothing(path: Path, change) -> None:
    _, text = keys.add(path, "a")
    assert KeyRing(path).find(change(text)) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 1, "keys": 5}', b'{"x": 1}', b"\xff" * 9,
                                     b" " * (keys.MAX_FILE_BYTES + 1)])  # fmt: skip
def test_a_broken_file_opens_nothing(path: Path, content: bytes) -> None:
    made, text = keys.add(path, "a")
    ring = KeyRing(path)
    assert ring.find(text) == made
    path.write_bytes(content)
    assert ring.find(text) is None and ring.wants_one()
    with pytest.raises(PermissionDenied, match="no file of keys"):
        keys.read(path)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_file_that_is_open_to_others_opens_nothing(path: Path, mode: int) -> None:
    _, text = keys.add(path, "a")
    ring = KeyRing(path)
    path.chmod(mode)
    assert ring.find(text) is None and ring.wants_one()
    with pytest.raises(PermissionDenied, match="open to others"):
        keys.read(path)


def test_a_failure_that_passes_shuts_the_door_no_longer_than_it_lasts(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, text = keys.add(path, "laptop")
    ring, limits = KeyRing(path), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # no descriptor is left
    try:
        found, wants_one = [ring.find(text) for _ in range(3)], ring.wants_one()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == [None] * 3 and wants_one and len(caplog.records) == 1
    assert ring.find(text) == made and ring.wants_one()


def test_a_link_in_its_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    keys.add(path, "a")
    real = tmp_path / "elsewhere"
    path.rename(real)
    path.symlink_to(real)
    with pytest.raises(PermissionDenied):
        keys.read(path)


def _add(path: Path, number: int) -> None:
    for extra in range(5):
        keys.add(path, f"k{number}-{extra}")


def test_changes_at_once_lose_nothing(path: Path) -> None:
    # Threads do for processes: a lock on a file belongs to the descriptor, and each change opens its own.
    workers = [threading.Thread(target=_add, args=(path, number)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(keys.read(path)) == 15


def test_keys_are_compared_in_constant_time() -> None:
    for module in (keys, gate):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                assert not names & {"sha256", "digest", "text", "_key_hash", "_hash"}, ast.unparse(node)
    assert "hmac.compare_digest" in inspect.getsource(keys) and "hmac.compare_digest" in inspect.getsource(gate)


def test_looking_costs_no_descriptor(path: Path) -> None:
    _, text = keys.add(path, "a")
    ring, before = KeyRing(path), len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        os.utime(path)
        assert ring.find(text)
    assert len(os.listdir("/proc/self/fd")) == before

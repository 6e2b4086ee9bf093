"""The cap over all page stores."""

from __future__ import annotations

import fcntl
import os

import pytest

from tierd.daemon import kv_quota
from tierd.daemon.kv_quota import Owner

MIB = 1 << 20
A, B, C = "a" * 32, "b" * 32, "c" * 32
OWNER = Owner("alpha", "fp32")


def store(root, name, size_bytes, used_s):
    path = root / name
    path.mkdir(parents=True)
    (path / "lock").touch()
    with open(path / "slab.0", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    for entry in path.iterdir():
        os.utime(entry, (used_s, used_s))
    return path


@pytest.fixture
def root(tmp_path):
    store(tmp_path, A, 4 * MIB, 300)
    store(tmp_path, B, 2 * MIB, 100)
    store(tmp_path, C, 1 * MIB, 200)
    (tmp_path / "not-a-store").mkdir()
    (tmp_path / ("d" * 32)).symlink_to(tmp_path / A)
    return tmp_path


def test_listing_is_by_last_use_and_leaves_strangers_out(root):
    found = kv_quota.namespaces(root)
    assert [n.name for n in found] == [B, C, A]
    assert found[2].bytes >= 4 * MIB and not found[2].open
    assert kv_quota.namespaces(root / "nowhere") == []


def test_a_share_is_the_cap_without_what_others_hold(root):
    kv_quota.note_owner(root, A, OWNER)
    share = kv_quota.share(root, OWNER, 100 * MIB, MIB)
    assert 96 * MIB <= share <= 97 * MIB
    assert {n.name for n in kv_quota.namespaces(root)} == {A, B, C}


def test_the_longest_unused_go_first_when_too_little_is_left(root):
    kv_quota.note_owner(root, A, OWNER)
    share = kv_quota.share(root, OWNER, 5 * MIB, 3 * MIB)
    assert {n.name for n in kv_quota.namespaces(root)} == {A, C}
    assert 3 * MIB < share <= 4 * MIB


def test_open_stores_stay_and_the_floor_is_given(root):
    with open(root / B / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert kv_quota.is_open(root / B)
        assert not kv_quota.remove(root, B)
        assert kv_quota.share(root, OWNER, 2 * MIB, 2 * MIB) == 2 * MIB
        assert [n.name for n in kv_quota.namespaces(root)] == [B]
    assert not kv_quota.is_open(root / B)


def test_another_format_of_the_model_is_somebody_else(root):
    kv_quota.note_owner(root, A, OWNER)
    assert kv_quota.share(root, Owner("alpha", "fp16"), 100 * MIB, MIB) < 94 * MIB


def test_a_new_store_of_the_same_owner_replaces_the_old_one(root):
    kv_quota.note_owner(root, A, OWNER)
    kv_quota.note_owner(root, C, OWNER)
    assert {n.name: n.model for n in kv_quota.namespaces(root)} == {A: "", B: "", C: "alpha"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 5}', b"\xff"])
def test_a_lost_or_broken_owners_file_is_nobody(root, content):
    (root / kv_quota.OWNERS_NAME).write_bytes(content)
    assert all(not n.model for n in kv_quota.namespaces(root))
    kv_quota.note_owner(root, A, OWNER)
    assert [n.model for n in kv_quota.namespaces(root)] == ["", "", "alpha"]


@pytest.mark.parametrize("name", ["..", "../x", "", "x", "not-a-store", "d" * 32])
def test_only_stores_are_removed(root, name):
    kv_quota.remove(root, name)
    assert (root / A / "slab.0").exists() and (root / "not-a-store").exists()


def test_remove_removes(root):
    assert kv_quota.remove(root, A) and not (root / A).exists()
    assert not kv_quota.remove(root, A)

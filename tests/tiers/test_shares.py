"""What a tenant may keep in the cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.tiers.fakes import PAGE_TOKENS, Rig
from tests.tiers.stand_ins import MemoryStore
from tierd.tiers import roots_file, shares
from tierd.tiers.keys import salted_root
from tierd.tiers.shares import MAX_ROOTS

A = list(range(1, 13))  # three full pages
B = list(range(101, 113))
C = list(range(201, 213))
TENANT = b"key:1"


class TenantRig(Rig):
    """A rig whose requests come from one tenant with a bound, unless a test says otherwise."""

    quota_pages = 4

    def serve(self, tokens, salt=TENANT):
        plain = self.pager.match
        quota_pages = self.quota_pages if salt.startswith(TENANT) else 0
        self.pager.match = lambda t, s=b"": plain(t, s, tenant=TENANT if quota_pages else s, quota_pages=quota_pages)
        try:
            return super().serve(tokens, salt)
        finally:
            del self.pager.match

    def known(self, salt=TENANT) -> int:
        """Pages below a root."""
        stack, count = [salted_root(self.pager.root, salt)], 0
        while stack:
            for child in self.pager.index.children(stack.pop()):
                count += 1
                stack.append(child.key)
        return count


def test_no_more_is_kept_than_the_bound() -> None:
    rig = TenantRig(device=16, host=0)
    for first in range(0, 2000, 100):
        rig.serve(list(range(first, first + 12)))
        assert rig.known() <= 4
    rig.settle()
    assert rig.pager.statistics().quota_pages == 20 * 3 - 4
    rig.check()
    rig.close()


def test_what_was_used_last_stays_and_a_sequence_loses_its_end_first() -> None:
    rig = TenantRig(device=16, host=0)
    rig.serve(A)
    rig.serve(B)  # six pages: two of A go, from its end
    assert rig.serve([*A, 99]) == PAGE_TOKENS
    rig.close()


def test_a_bound_is_one_tenants_alone() -> None:
    rig = TenantRig(device=32, host=0)
    rig.serve(A, b"")
    rig.serve(B, b"other")
    for first in range(1000, 2000, 100):
        rig.serve(list(range(first, first + 12)))
    assert rig.serve([*A, 99], b"") == 12 and rig.serve([*B, 99], b"other") == 12
    rig.close()


def test_a_request_may_have_more_while_it_runs() -> None:
    rig = TenantRig(device=16, host=0)
    lease = rig.pager.match(A, TENANT, tenant=TENANT, quota_pages=1)
    rig.pager.fetch(lease, 1e9)
    rig.grow(lease, A, 0, TENANT)
    assert rig.known() == 3
    rig.expect(lease, A, TENANT)
    rig.pager.release(lease, A)
    assert rig.known() == 1
    rig.close()


def test_pages_of_a_lease_and_pinned_ones_stay() -> None:
    rig = TenantRig(device=16, host=0)
    rig.serve(A)
    lease = rig.pager.match([*A, 1], TENANT, tenant=TENANT, quota_pages=1)
    rig.serve(B)
    assert lease.num_tokens == 12 and rig.known() >= 3
    rig.pager.release(lease, A)
    kept = rig.pager.index.nodes[rig.pager.chain([*A, 1], TENANT)[0]]
    kept.kept = True
    rig.quota_pages = 1
    rig.serve(C)
    assert kept.alive and rig.known() == 1
    rig.close()


def test_pages_on_their_way_to_the_store_go_when_they_have_arrived() -> None:
    store = MemoryStore()
    rig = TenantRig(device=16, host=0, store=store)
    rig.quota_pages = 2
    for first in range(0, 500, 100):
        rig.serve(list(range(first, first + 12)))
        rig.poll()
    rig.settle()
    assert rig.known() == 2 and len(store.rows) == 2
    rig.check()
    rig.close()


def test_a_finished_copy_costs_no_walk_over_pages_that_stay() -> None:
    rig = TenantRig(device=64, host=0, store=MemoryStore())
    rig.quota_pages = 100
    for first in range(0, 2000, 100):
        rig.serve(list(range(first, first + 12)))
    rig.settle()
    for node in rig.pager.index.nodes.values():
        node.kept = True
    asked: list[object] = []
    is_idle = rig.pager.residency.is_idle
    rig.quota_pages = 4
    rig.serve(C)
    rig.pager.residency.is_idle = lambda node: asked.append(node) or is_idle(node)
    for number in range(50):  # another tenant's copies finish
        rig.serve(list(range(5000 + 20 * number, 5012 + 20 * number)), b"other")
        asked.clear()
        rig.settle()
        rig.pager.shares.settle()
        assert len(asked) < 60
    assert sum(node.kept for node in rig.pager.index.nodes.values()) == 60 and rig.known() == 60
    rig.check()
    rig.close()


def test_pages_from_before_a_restart_count_again() -> None:
    store = MemoryStore()
    rig = TenantRig(device=16, host=0, store=store)
    rig.serve(A)
    rig.settle()
    rig.close()
    rig = TenantRig(device=16, host=0, store=store)
    assert rig.known() == 3
    rig.serve(B)
    rig.settle()
    assert rig.known() == 4
    rig.close()


def test_salts_of_a_tenant_share_one_bound() -> None:
    rig = TenantRig(device=32, host=0)
    salts = [TENANT + bytes([number]) for number in range(6)]
    for salt in salts:
        rig.serve(A, salt)
    assert sum(rig.known(salt) for salt in salts) == 4
    rig.close()


def test_without_a_bound_nothing_is_counted_any_more() -> None:
    rig = TenantRig(device=32, host=0)
    rig.serve(A)
    rig.quota_pages = 0
    rig.serve(B)
    assert all(node.share is None for node in rig.pager.index.nodes.values())
    rig.serve(C)
    assert rig.known() == 9
    rig.close()


def test_roots_that_are_remembered_have_a_bound() -> None:
    rig = TenantRig(device=16, host=0)
    for number in range(MAX_ROOTS + 10):
        share = rig.pager.shares.of(TENANT, 4, salted_root(rig.pager.root, str(number).encode()))
    assert share is not None and len(share.roots) == MAX_ROOTS
    rig.close()


def test_random_requests_of_three_tenants() -> None:
    rng, rig = random.Random(5), TenantRig(device=24, host=8, store=MemoryStore())
    for _ in range(300):
        salt = rng.choice([TENANT, b"", b"other"])
        first = rng.randrange(12) * 100
        rig.serve(list(range(first, first + rng.randrange(2, 24))), salt)
        if rng.random() < 0.2:
            rig.settle()
            rig.check()
            assert rig.known() <= 4
    rig.close()


def test_pages_below_salts_that_never_come_back_count_after_a_restart(tmp_path: Path) -> None:
    store = MemoryStore(100)
    rig = TenantRig(device=16, host=0, store=store)
    rig.pager.shares.remember(tmp_path / "tenants")
    rig.serve(A, TENANT + b"\0once")
    rig.serve(B, b"another tenant")
    rig.pager.flush(rig.now_s + 1)
    rig.close()
    rig = TenantRig(device=16, host=0, store=store)
    rig.pager.shares.remember(tmp_path / "tenants")
    rig.serve(C, TENANT + b"\0now")
    rig.settle()
    assert rig.known(TENANT + b"\0once") + rig.known(TENANT + b"\0now") <= rig.quota_pages
    assert rig.known(TENANT + b"\0now") == 3 and rig.known(b"another tenant") == 3
    rig.check()
    rig.close()


def test_roots_without_pages_leave_the_file(tmp_path: Path) -> None:
    file, store = tmp_path / "tenants", MemoryStore(100)
    rig = TenantRig(device=16, host=0, store=store)
    rig.pager.shares.remember(file)
    for number in range(5):
        rig.serve([*A, number], TENANT + b"\0%d" % number)
    rig.pager.flush(rig.now_s + 1)
    assert len(file.read_text().splitlines()) == 5
    rig.close()
    rig = TenantRig(device=16, host=0, store=store)
    rig.pager.shares.remember(file)
    assert 0 < len(file.read_text().splitlines()) < 5
    rig.close()


def salted(rig: TenantRig, number: int):
    return salted_root(rig.pager.root, TENANT + b"\0%d" % number)


def restarted(rig: TenantRig, file: Path) -> TenantRig:
    """Another process over the same store."""
    rig.pager.flush(rig.now_s + 1)
    rig.close()
    again = TenantRig(device=64, host=0, store=rig.pager.store)
    again.quota_pages = 100
    again.pager.shares.remember(file)
    return again


def test_a_restart_loses_no_root_with_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_OWNED", 10)
    file, rig = tmp_path / "tenants", TenantRig(device=64, host=0, store=MemoryStore(100))
    rig.quota_pages = 100
    rig.pager.shares.remember(file)
    for number in range(9):
        rig.serve(A, TENANT + b"\0%d" % number)
    for _ in range(3):
        rig = restarted(rig, file)
        assert list(rig.pager.shares._owners) == [salted(rig, number) for number in range(9)]
    rig.close()


def test_the_roots_used_last_stay_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_OWNED", 10)
    file, rig = tmp_path / "tenants", TenantRig(device=64, host=0, store=MemoryStore(100))
    rig.quota_pages = 100
    rig.pager.shares.remember(file)
    for number in (*range(10), 0, 10):  # the first is used once more
        rig.serve(A, TENANT + b"\0%d" % number)
    assert list(rig.pager.shares._owners) == [salted(rig, number) for number in (6, 7, 8, 9, 0, 10)]
    rig = restarted(rig, file)
    assert list(rig.pager.shares._owners) == [salted(rig, number) for number in (6, 7, 8, 9, 0, 10)]
    rig.close()


def test_the_root_of_a_running_request_stays_before_it_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "MAX_OWNED", 4)
    file, rig = tmp_path / "tenants", TenantRig(device=64, host=0, store=MemoryStore(100))
    rig.quota_pages = 100
    rig.pager.shares.remember(file)
    lease = rig.pager.match(A, TENANT + b"\0first", tenant=TENANT, quota_pages=100)
    for number in range(20):
        rig.serve(A if number % 2 else A[:2], TENANT + b"\0%d" % number)
    assert lease.root in rig.pager.shares._owners and lease.root in roots_file.read(file, 99)
    assert len(rig.pager.shares._owners) <= 4
    rig.pager.release(lease, [])
    rig.close()

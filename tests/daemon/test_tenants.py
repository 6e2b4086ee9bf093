"""What a tenant may have at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from front_harness import Front, until

from tierd.daemon import keys, tenants
from tierd.daemon.errors import QuotaExceeded
from tierd.daemon.keys import KeyRing
from tierd.daemon.protocol import Sampling, Submit
from tierd.daemon.tenants import Allowance, Tenants


def test_the_owner_and_other_users_have_no_bound(tmp_path: Path) -> None:
    known = Tenants(KeyRing(tmp_path / "keys"))
    for name in (tenants.OWNER, "uid:0", "key:gone"):
        assert known.admit(name, 10**6) == Allowance(0, 0)


def test_a_keys_bounds_hold_at_once_when_they_change(tmp_path: Path) -> None:
    known = Tenants(KeyRing(tmp_path / "keys"))
    made, _ = keys.add(tmp_path / "keys", "a", quota_pages=7, max_requests=2)
    name = tenants.of_key(made)
    assert known.admit(name, 1) == Allowance(7, 2)
    with pytest.raises(QuotaExceeded) as caught:
        known.admit(name, 2)
    assert caught.value.status == 429 and caught.value.hint
    keys.remove(tmp_path / "keys", "a")
    assert known.admit(name, 2) == Allowance()


async def test_a_tenant_who_has_enough_is_refused_and_others_are_not(front: Front) -> None:
    made, _ = keys.add(front.settings.keys_file, "a", quota_pages=7, max_requests=2)
    tenant, service = tenants.of_key(made), front.service

    def submit(name: str, word: str = "!hang"):
        return service.submit(Submit("alpha", prompt=word, sampling=Sampling(max_tokens=2)), name)

    running = []
    for _ in range(2):
        stream = submit(tenant)
        assert stream.live.submit.tenant == tenant and stream.live.submit.quota_pages == 7
        running.append(service.run(stream, "http"))
        await anext(running[-1])
    with pytest.raises(QuotaExceeded):
        submit(tenant)
    assert submit(tenants.OWNER).live.submit.quota_pages == 0
    await running.pop().aclose()
    submit(tenant)  # there is room again
    await running.pop().aclose()
    await until(lambda: service.live == 0)

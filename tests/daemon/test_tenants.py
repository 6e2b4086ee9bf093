"""What a tenant may have at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from front_harness import Front, until

from tierd.daemon import keys, tenants
from tierd.daemon.errors import QuotaExceeded
from tierd.daemon.keys import KeyRing
from tierd.daemon.protocol import Message, Sampling, Submit
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
    of_owner = submit(tenants.OWNER)
    assert of_owner.live.submit.quota_pages == 0
    service.release(of_owner)
    await running.pop().aclose()
    service.release(submit(tenant))  # there is room again
    await running.pop().aclose()
    await until(lambda: service.live == 0)


async def test_who_asks_for_many_at_once_gets_no_more_than_it_may(front: Front) -> None:
    made, _ = keys.add(front.settings.keys_file, "a", max_requests=1)
    tenant, service = tenants.of_key(made), front.service
    submit = Submit("alpha", prompt="x", sampling=Sampling(max_tokens=1))
    admitted, refused = [], 0
    for _ in range(50):  # as 50 connections do: none of them runs before all are here
        try:
            admitted.append(service.submit(submit, tenant))
        except QuotaExceeded:
            refused += 1
    assert (len(admitted), refused) == (1, 49)
    events = service.run(admitted[0], "http")
    assert [event.ev async for event in events][-1] == "done"
    service.release(service.submit(submit, tenant))
    assert service.live == 0


async def test_a_key_of_one_request_may_count_or_load_once_at_a_time(front: Front) -> None:
    made, _ = keys.add(front.settings.keys_file, "a", max_requests=1)
    tenant, service = tenants.of_key(made), front.service
    stream = service.submit(Submit("alpha", prompt="x"), tenant)
    counted = Submit("alpha", messages=(Message("user", "x"),))
    calls = service.count(counted, tenant), service.load("alpha", tenant), service.embed("alpha", ["x"], tenant, "t")
    for call in calls:
        with pytest.raises(QuotaExceeded):
            await call
    service.release(stream)
    assert (await service.load("alpha", tenant))["model"] == "alpha" and await service.count(counted, tenant)

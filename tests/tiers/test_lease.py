from __future__ import annotations

from tierd.tiers.keys import pack_tokens, root_key
from tierd.tiers.lease import Lease, LeaseState
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import Node


def test_hits_are_counted_by_where_pages_were_found() -> None:
    lease = Lease(root_key("test"), 16)
    lease.origins = [Tier.DEVICE, Tier.HOST, Tier.NVME, Tier.NVME]
    lease.tail_tokens, lease.tail_origin = 5, Tier.HOST
    lease.recount()
    assert lease.num_tokens == 69
    assert (lease.hit_device, lease.hit_host, lease.hit_nvme) == (16, 21, 32)
    assert not lease.ready
    assert "69 tokens" in repr(lease)


def test_slots_are_known_pages_then_private_ones() -> None:
    lease = Lease(root_key("test"), 16)
    node = Node(PageKey(b"k"), lease.root, pack_tokens(range(16)))
    node.device = 7
    lease.nodes, lease.private = [node], [3, 1]
    lease.arrive()
    assert lease.slots == [7, 3, 1]
    assert lease.state is LeaseState.READY

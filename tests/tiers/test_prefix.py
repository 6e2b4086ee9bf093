from __future__ import annotations

import pytest

from tierd.tiers import prefix
from tierd.tiers.keys import pack_tokens, page_key, root_key
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import MAX_SIBLINGS_SCANNED, Leaving, Node, PrefixIndex

ROOT = root_key("test")


def add(index: PrefixIndex, tokens: list[int], parent: PageKey = ROOT, device: int = 0) -> Node:
    node = Node(page_key(parent, pack_tokens(tokens)), parent, pack_tokens(tokens))
    node.device = device
    index.add(node)
    return node


def chain(index: PrefixIndex, *pages: list[int]) -> list[Node]:
    found: list[Node] = []
    for tokens in pages:
        found.append(add(index, tokens, found[-1].key if found else ROOT))
    return found


def test_the_longest_run_then_the_closest_page() -> None:
    index = PrefixIndex(4)
    nodes = chain(index, [1, 2, 3, 4], [5, 6, 7, 8], [9, 10])
    assert index.match(ROOT, pack_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])) == (nodes[:2], nodes[2], 2)
    assert index.match(ROOT, pack_tokens([1, 2, 3, 4, 5, 6])) == (nodes[:1], nodes[1], 2)
    assert index.match(ROOT, pack_tokens([1, 2, 3, 4, 7, 6])) == (nodes[:1], None, 0)
    assert index.match(ROOT, pack_tokens([1, 2, 3])) == ([], nodes[0], 3)
    assert index.match(ROOT, b"") == ([], None, 0)
    assert index.match(root_key("other"), pack_tokens([1, 2, 3, 4])) == ([], None, 0)


def test_of_equally_close_pages_the_nearest_copy_counts() -> None:
    index = PrefixIndex(4)
    near = add(index, [1, 2, 3, 4])
    far = add(index, [1, 2, 3, 5], device=-1)
    far.host = 0
    assert index.match(ROOT, pack_tokens([1, 2, 3, 6]))[1:] == (near, 3)
    assert index.match(ROOT, pack_tokens([1, 2, 3, 5]))[0] == [far]


def test_a_page_without_a_copy_is_not_found() -> None:
    index = PrefixIndex(4)
    (node,) = chain(index, [1, 2, 3, 4])
    node.device = -1
    assert index.match(ROOT, pack_tokens([1, 2, 3, 4, 5])) == ([], None, 0)


def test_a_collision_of_keys_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "page_key", lambda _parent, _packed: PageKey(b"same"))
    index = PrefixIndex(4)
    node = Node(PageKey(b"same"), ROOT, pack_tokens([1, 2, 3, 4]))
    node.device = 0
    index.add(node)
    assert index.match(ROOT, pack_tokens([1, 2, 3, 4]))[0] == [node]
    assert index.match(ROOT, pack_tokens([4, 3, 2, 1]))[0] == []
    # The same tokens under another parent are another page, too.
    assert index.match(root_key("other"), pack_tokens([1, 2, 3, 4]))[0] == []


def test_a_lost_page_hides_its_descendants_until_it_is_known_again() -> None:
    index = PrefixIndex(4)
    first, second, third = chain(index, [1, 2, 3, 4], [5, 6, 7, 8], [9])
    first.device = -1
    index.remove(first)
    wanted = pack_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert index.match(ROOT, wanted) == ([], None, 0)
    assert index.unreachable() == [second, third]
    again = add(index, [1, 2, 3, 4])
    assert again.kids == [1, 0, 0]
    assert index.match(ROOT, wanted) == ([again, second], third, 1)
    assert not index.gaps


def test_gaps_end_with_their_last_child() -> None:
    index = PrefixIndex(4)
    first, second = chain(index, [1, 2, 3, 4], [5])
    first.device = second.device = -1
    index.remove(first)
    assert index.gaps == {first.key}
    index.remove(second)
    assert not index.gaps
    assert len(index) == 0
    assert list(index.children(ROOT)) == []


def test_siblings_come_and_go() -> None:
    index = PrefixIndex(4)
    nodes = [add(index, [number]) for number in range(5)]
    assert list(index.children(ROOT)) == nodes
    assert list(index.newest_children(ROOT)) == nodes[::-1]
    for node in nodes:
        node.device = -1
        index.remove(node)
    assert list(index.newest_children(ROOT)) == []


def test_only_the_newest_of_many_siblings_are_looked_at() -> None:
    index = PrefixIndex(4)
    for number in range(MAX_SIBLINGS_SCANNED + 1):
        add(index, [number, 1])
    assert index.match(ROOT, pack_tokens([1, 1, 7]))[2] == 2
    assert index.match(ROOT, pack_tokens([0, 1, 7]))[2] == 0
    assert len(list(index.newest_children(ROOT))) == MAX_SIBLINGS_SCANNED


def test_dominated_partials() -> None:
    index = PrefixIndex(4)
    short, other, longer = add(index, [1]), add(index, [2]), add(index, [1, 2, 3, 4])
    assert index.dominated_by(longer) == [short]
    assert index.is_dominated(ROOT, short.packed)
    assert not index.is_dominated(ROOT, other.packed)
    assert not index.is_dominated(ROOT, longer.packed)


def test_depths_do_not_depend_on_the_order_of_arrival() -> None:
    index = PrefixIndex(1)
    keys = [ROOT]
    for token in range(4):
        keys.append(page_key(keys[-1], pack_tokens([token])))
    for token in (3, 1, 0, 2):
        node = Node(keys[token + 1], keys[token], pack_tokens([token]))
        node.durable = True
        index.add(node)
    index.settle_depths()
    assert [index.nodes[key].depth for key in keys[1:]] == [0, 1, 2, 3]


def test_misuse_is_our_bug() -> None:
    index = PrefixIndex(4)
    node = add(index, [1])
    with pytest.raises(AssertionError, match="known already"):
        index.add(node)
    with pytest.raises(AssertionError, match="can't be forgotten"):
        index.remove(node)


def test_copies_by_tier() -> None:
    node = Node(PageKey(b"k"), ROOT, pack_tokens([1, 2]))
    nearest = []
    assert not node.has_copy
    node.durable = True
    nearest.append(node.nearest)
    node.host = 3
    nearest.append(node.nearest)
    node.device = 0
    nearest.append(node.nearest)
    assert nearest == [Tier.NVME, Tier.HOST, Tier.DEVICE]
    assert [node.is_in(tier) for tier in Tier] == [True, True, True]
    assert node.tiers() == list(Tier)
    node.leaving = Leaving.COPY
    assert node.tiers() == [Tier.HOST, Tier.NVME]
    assert "2 tokens" in repr(node)

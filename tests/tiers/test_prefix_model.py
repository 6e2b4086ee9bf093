"""The prefix index against a plain model: a set of token sequences, each the path to one page.

Pages come and go in any order, also before their parents and from under their children; copies appear and vanish in any
tier. The model knows paths and copies, and finds matches by comparing tokens.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.tiers.profiles import big, small
from tierd.tiers.keys import pack_tokens, page_key, root_key, salted_root
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import Node, PrefixIndex

SIZE = 3  # tokens of a page
SALTS = [b"", b"tenant"]
ROOT = root_key("test")
TOKENS = st.integers(1, 2)

Path = tuple[bytes, tuple[int, ...]]  # salt, and every token up to the end of the page


class PrefixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(SIZE)
        self.nodes: dict[Path, Node] = {}  # known pages
        self.order: list[Path] = []  # as they came

    def _key(self, path: Path) -> PageKey:
        """The key of a page, or of the root for no tokens."""
        salt, tokens = path
        key = salted_root(ROOT, salt)
        for start in range(0, len(tokens), SIZE):
            key = page_key(key, pack_tokens(tokens[start : start + SIZE]))
        return key

    @staticmethod
    def _parent(path: Path) -> Path:
        salt, tokens = path
        return salt, tokens[: (len(tokens) - 1) // SIZE * SIZE]

    def _children(self, path: Path) -> list[Path]:
        return [other for other in self.order if self._parent(other) == path and other != path]

    @rule(
        salt=st.sampled_from(SALTS),
        tokens=st.lists(TOKENS, min_size=1, max_size=3 * SIZE),
        tier=st.sampled_from(Tier),
    )
    def add(self, salt: bytes, tokens: list[int], tier: Tier) -> None:
        """A page becomes known, perhaps without the pages before it, with a copy in a tier."""
        path = (salt, tuple(tokens))
        if path in self.nodes:
            with pytest.raises(AssertionError):
                self.index.add(self.nodes[path])
            return
        parent = self._parent(path)
        node = Node(self._key(path), self._key(parent), pack_tokens(tokens[len(parent[1]) :]))
        self._set(node, tier, here=True)
        self.index.add(node)
        self.nodes[path] = node
        self.order.append(path)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), tier=st.sampled_from(Tier), here=st.booleans())
    def move(self, data: st.DataObject, tier: Tier, here: bool) -> None:
        """A copy appears or vanishes, with what `Residency` books at the parent."""
        path = data.draw(st.sampled_from(self.order))
        node = self.nodes[path]
        if node.is_in(tier) == here:
            return
        self._set(node, tier, here)
        parent = self.index.get(node.parent)
        if parent is not None:
            parent.kids[tier] += 1 if here else -1

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(self.order))
        node = self.nodes[path]
        if node.has_copy:
            with pytest.raises(AssertionError):
                self.index.remove(node)
            return
        self.index.remove(node)
        assert not node.alive
        del self.nodes[path]
        self.order.remove(path)

    @rule(salt=st.sampled_from(SALTS), tokens=st.lists(TOKENS, max_size=4 * SIZE))
    def match(self, salt: bytes, tokens: list[int]) -> None:
        found, source, shared = self.index.match(salted_root(ROOT, salt), pack_tokens(tokens))
        count = 0
        while self._has(salt, tokens[: (count + 1) * SIZE], (count + 1) * SIZE):
            count += 1
        assert found == [self.nodes[salt, tuple(tokens[: place * SIZE])] for place in range(1, count + 1)]
        rest = tokens[count * SIZE : (count + 1) * SIZE]
        here = [path for path in self._children((salt, tuple(tokens[: count * SIZE]))) if self.nodes[path].has_copy]
        best = max((self._common(path[1][count * SIZE :], rest) for path in here), default=0)
        assert shared == best
        if best:
            close = [path for path in here if self._common(path[1][count * SIZE :], rest) == best]
            assert source in [self.nodes[path] for path in close]
            assert source.nearest == min(self.nodes[path].nearest for path in close)
        else:
            assert source is None

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def dominance(self, data: st.DataObject) -> None:
        """Which siblings say the same and more, and the other way round."""
        path = data.draw(st.sampled_from(self.order))
        siblings = [other for other in self._children(self._parent(path)) if other != path]
        longer = [o for o in siblings if o[1][: len(path[1])] == path[1] and self.nodes[o].has_copy]
        shorter = [o for o in siblings if path[1][: len(o[1])] == o[1]]
        node = self.nodes[path]
        assert self.index.is_dominated(node.parent, node.packed) == bool(longer)
        dominated = {id(other) for other in self.index.dominated_by(node)}
        assert dominated == {id(self.nodes[other]) for other in shorter}

    @invariant()
    def books(self) -> None:
        index = self.index
        assert len(index) == len(self.nodes)
        for path, node in self.nodes.items():
            assert index.get(node.key) is node and node.alive
            children = [self.nodes[other] for other in self._children(path)]
            assert list(index.children(node.key)) == children
            assert node.kids == [sum(child.is_in(tier) for child in children) for tier in Tier]
        # Unreachable: below a page that is not known. A page whose parent never was known is no gap before one was.
        for node in index.unreachable():
            path = next(path for path, other in self.nodes.items() if other is node)
            ancestors = [(path[0], path[1][:end]) for end in range(SIZE, len(path[1]), SIZE)]
            assert any(ancestor not in self.nodes for ancestor in ancestors)
        index.settle_depths()
        for path, node in self.nodes.items():
            depth, parent = 0, self._parent(path)
            while parent in self.nodes:
                depth, parent = depth + 1, self._parent(parent)
            assert node.depth == depth

    def _has(self, salt: bytes, tokens: list[int], length: int) -> bool:
        node = self.nodes.get((salt, tuple(tokens)))
        return len(tokens) == length and node is not None and node.has_copy

    @staticmethod
    def _common(left: tuple[int, ...], right: list[int]) -> int:
        count = 0
        while count < min(len(left), len(right)) and left[count] == right[count]:
            count += 1
        return count

    @staticmethod
    def _set(node: Node, tier: Tier, here: bool) -> None:
        if tier is Tier.NVME:
            node.durable = here
        elif tier is Tier.HOST:
            node.host = 0 if here else -1
        else:
            node.device = 0 if here else -1


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = small(30, 40)


@pytest.mark.long
def test_prefix_machine_at_length() -> None:
    run_state_machine_as_test(PrefixMachine, settings=big(200, 120))

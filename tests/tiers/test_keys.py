from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.tiers.keys import common_tokens, pack_tokens, page_key, root_key, salted_root, unpack_tokens

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)

CODE = """
from tierd.tiers.keys import *
root = salted_root(root_key("model/layout"), b"tenant")
print(page_key(page_key(root, pack_tokens(range(16))), pack_tokens([5])).hex())
"""


def test_keys_are_the_same_in_every_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", CODE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1", "4242", "random")
    }
    # Written down, so that a change that makes every stored page a miss does not go unseen.
    assert found == {"da533ba3efd5bf0a1b6e0c8f68de9fe2"}


def test_roots_and_salts_differ() -> None:
    root = root_key("a")
    roots = {root, root_key("b"), salted_root(root, b"x"), salted_root(root, b"y"), salted_root(root, b"x" * 100_000)}
    assert len(roots) == 5
    assert salted_root(root, b"") == root
    # A salt that looks like packed tokens is no page.
    assert salted_root(root, pack_tokens([1, 2])) != page_key(root, pack_tokens([1, 2]))


@given(TOKENS, TOKENS)
def test_a_key_stands_for_its_tokens(left: list[int], right: list[int]) -> None:
    root = root_key("a")
    assert (page_key(root, pack_tokens(left)) == page_key(root, pack_tokens(right))) == (left == right)
    assert unpack_tokens(pack_tokens(left)) == tuple(left)


@given(TOKENS, TOKENS, TOKENS)
def test_common_tokens(head: list[int], left: list[int], right: list[int]) -> None:
    shared = common_tokens(pack_tokens(head + left), pack_tokens(head + right))
    a, b = head + left, head + right
    assert a[:shared] == b[:shared]
    assert shared == min(len(a), len(b)) or a[shared] != b[shared]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_impossible_tokens_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match="32-bit"):
        pack_tokens([1, token])

"""What is told of one known prefix: a run of pages, and all of the way that leads to its end."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tierd.tiers.keys import unpack_tokens
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.prefix import Node

PREVIEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """One run of pages, up to a branch or an end. Tokens, pages and tiers are those of the whole way from the start.

    Attributes:
        id: hex; what `pin`, `unpin` and `drop` take, also shortened.
        parent: id of the run before it, "" for the first.
        tokens: from the start of the sequence to the end of this run.
        own_tokens: of this run.
        pages: on the whole way.
        device, host, nvme: pages of the whole way with a copy there.
        hits: of the last page: how often it was used since it was computed.
        idle_s: since its last use.
        pinned: the user, or a request, wants all of the way kept.
        wished: it is a request that does, and nobody by hand: it ends by itself.
        in_use: a running request has its last page.
        head: the first tokens of this run, at most `PREVIEW_TOKENS`.
    """

    id: str
    parent: str
    tokens: int
    own_tokens: int
    pages: int
    device: int
    host: int
    nvme: int
    hits: int
    idle_s: float
    pinned: bool
    wished: bool
    in_use: bool
    head: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Pages without a branch. `parent`: place of the run before it in the list, -1 for the first of a sequence."""

    nodes: list[Node]
    parent: int


@dataclass(slots=True)
class Way:
    """What lies between the start and a run."""

    parent: str = ""
    tokens: int = 0
    pages: int = 0
    device: int = 0
    host: int = 0
    nvme: int = 0


def told(run: list[Node], way: Way, now_s: float, by_hand: Collection[PageKey]) -> PrefixInfo:
    """A run after the way that leads to it. `by_hand`: pages that a pin by hand keeps."""
    last = run[-1]
    head: list[int] = []
    for node in run:
        if len(head) >= PREVIEW_TOKENS:
            break
        head += unpack_tokens(node.packed)
    own_tokens = sum(node.num_tokens for node in run)
    counts = [sum(node.is_in(tier) for node in run) for tier in Tier]
    return PrefixInfo(
        id=last.key.hex(),
        parent=way.parent,
        tokens=way.tokens + own_tokens,
        own_tokens=own_tokens,
        pages=way.pages + len(run),
        device=way.device + counts[Tier.DEVICE],
        host=way.host + counts[Tier.HOST],
        nvme=way.nvme + counts[Tier.NVME],
        hits=last.hits,
        idle_s=round(max(0.0, now_s - last.last_use_s), 1),
        pinned=last.kept,
        wished=last.kept and last.key not in by_hand,
        in_use=last.pins > 0,
        head=tuple(head[:PREVIEW_TOKENS]),
    )

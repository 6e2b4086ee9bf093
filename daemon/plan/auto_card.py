"""Sizes of an engine on a card: pages and weights share its memory, the computer's has what the card does not take."""

from __future__ import annotations

from typing import NamedTuple

from tierd.daemon.card_memory import CardMemory
from tierd.daemon.config import Settings
from tierd.daemon.machine import Machine, Sizes
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.plan.cards import RESERVED_BYTES
from tierd.daemon.plan.workspace import exact_bytes, page_layout
from tierd.daemon.settled import resolve_sizes
from tierd.daemon.units import human_bytes

LEAST_ARENA_BYTES = 64 << 20  # as `machine.auto_sizes`
CARD_COPY_FORMAT = "bf16"  # of exact copies beside packed pages: what a card computes with
_GRAPH_ROWS = 64  # of the largest captured step: kernels.gpu.graphs
_SPLIT_TOKENS = 512  # of decode: each gives sums of its own
_FLOAT_BYTES, _HALF_BYTES = 4, 2


class CardSizes(NamedTuple):
    """Sizes, what the engine takes of the card beside them, and a sentence for each that is not simply what was asked.

    `usable_bytes`: of the card, for pages, weights and workspace together.
    """

    sizes: Sizes
    workspace_bytes: int
    usable_bytes: int
    why: tuple[str, ...]


def usable_bytes(card: CardMemory) -> int:
    """What can be planned with: the rest is the driver's, for kernels, and for products of torch's."""
    return card.free_bytes - min(RESERVED_BYTES, card.free_bytes // 8)


def workspace_bytes(spec: ModelSpec, context: int, max_batch: int, max_streams: int) -> int:
    """Of the card, beside pages and weights: positions, a pass's activations and sums, logits. An upper bound."""
    attended = spec.heads * spec.head_dim
    fused = attended + 2 * spec.kv_heads * spec.head_dim
    widths = 4 * spec.hidden + 2 * fused + 2 * attended + 3 * spec.intermediate
    rows = max(max_batch, max_streams) + _GRAPH_ROWS
    parts = _GRAPH_ROWS * spec.heads * -(-context // _SPLIT_TOKENS) * (spec.head_dim + 2)
    logits = (_GRAPH_ROWS + 2 * max_streams) * spec.vocab
    tables = 2 * context * (spec.head_dim // 2)
    return 2 * rows * widths * _HALF_BYTES + (parts + logits + tables) * _FLOAT_BYTES


def choose_card_sizes(
    settings: Settings, machine: Machine, spec: ModelSpec, card_weights_bytes: int, context: int, kv_format: str
) -> CardSizes:
    """The sizes of an engine on `machine.card`. What was asked for is taken as it is; only `auto` ones adapt.

    - All weights go to the card, and pages get what they leave, where that is enough for an arena.
    - Otherwise pages get one sequence of the whole context, up to a quarter of the card, and weights the rest.

    `card_weights_bytes`: of all weights, as they are on the card.
    """
    card = machine.card
    assert card is not None
    layout = page_layout(spec, kv_format)
    tokens, why = settings.ctx or context, list[str]()
    workspace = workspace_bytes(spec, tokens, settings.max_batch, settings.max_streams)
    ladder = settings.kv_exact_first, settings.kv_exact_last
    workspace += exact_bytes(spec, kv_format, ladder, settings.max_batch, settings.max_streams, CARD_COPY_FORMAT)
    room = max(usable_bytes(card) - workspace, 0)
    wanted = card_weights_bytes if settings.weights_mem is None else min(settings.weights_mem, card_weights_bytes)
    pages_bytes = -(-tokens // layout.page_tokens) * layout.record_bytes
    device = settings.device_mem
    if device is None:
        device = room - wanted
        if device < LEAST_ARENA_BYTES:
            device = max(min(pages_bytes, room // 4), LEAST_ARENA_BYTES)
            why.append(f"pages get {human_bytes(device)} of the card, since not all weights fit beside them")
    weights = max(room - device, 0) if settings.weights_mem is None else settings.weights_mem
    below = resolve_sizes(settings, machine)
    usable = min(machine.available_ram, machine.total_ram)
    host_weights = settings.host_weights_mem
    if host_weights is None:
        host_weights = max(usable - usable // 10 - below.host_bytes, 0)
    if weights < card_weights_bytes:
        why.append(
            f"the weights do not fit: they take {human_bytes(card_weights_bytes)}, and the card has "
            f"{human_bytes(weights)} for them; some layers are copied to it in every step"
        )
    sizes = below._replace(device_bytes=device, weights_bytes=weights, host_weights_bytes=host_weights)
    return CardSizes(sizes, workspace, usable_bytes(card), tuple(why))

"""Sizes of an engine on a card: pages and weights share its memory, the computer's has what the card does not take."""

from __future__ import annotations

from typing import NamedTuple

from tierd.daemon.card_memory import CardMemory
from tierd.daemon.config import Settings
from tierd.daemon.machine import Machine, Sizes
from tierd.daemon.models.spec import ExpertsSpec, ModelSpec
from tierd.daemon.plan.cards import RESERVED_BYTES
from tierd.daemon.plan.workspace import exact_bytes, page_layout
from tierd.daemon.settled import resolve_sizes
from tierd.daemon.units import human_bytes

LEAST_ARENA_BYTES = 64 << 20  # as `machine.auto_sizes`
CARD_COPY_FORMAT = "bf16"  # of exact copies beside packed pages: what a card computes with
_GRAPH_ROWS = 64  # of the largest captured step: kernels.gpu.graphs
_SPLIT_TOKENS = 512  # of decode: each gives sums of its own
_FLOAT_BYTES, _HALF_BYTES = 4, 2
# Of kernels.gpu, which can't be imported here: outputs of a panel, panels that a product for few rows is cut up for,
# and the addresses of an expert.
_PANEL_ROWS, _GROUPED_PROGRAMS, _EXPERT_LINE_BYTES = 32, 512, 48


class CardSizes(NamedTuple):
    """Sizes, what the engine takes of the card beside them, and a sentence for each that is not simply what was asked.

    `usable_bytes`: of the card, for pages, weights and workspace together. `later_device_bytes`: for pages, if other
    programs held nothing of the card.
    """

    sizes: Sizes
    workspace_bytes: int
    usable_bytes: int
    why: tuple[str, ...]
    later_device_bytes: int


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
    buffers = 2 * rows * widths * _HALF_BYTES + (parts + logits + tables) * _FLOAT_BYTES
    return buffers + (0 if spec.experts is None else mixture_bytes(spec, spec.experts, rows))


def mixture_bytes(spec: ModelSpec, experts: ExpertsSpec, rows: int) -> int:
    """Of a mixture (`kernels.gpu.moe`) of so many rows: what the router says, what experts make of each row that goes
    through them; and the addresses of all experts. An upper bound."""
    width, hidden = experts.intermediate, spec.hidden

    def parts(outputs: int) -> int:
        return max(_GROUPED_PROGRAMS // (-(-outputs // _PANEL_ROWS) * experts.used), 1)

    def of_slots(rows: int, both: int, results: int) -> int:
        return rows * experts.used * (2 * width * both + width * _HALF_BYTES + hidden * results)

    few = of_slots(min(rows, _GRAPH_ROWS), parts(2 * width) * _FLOAT_BYTES, parts(hidden) * _FLOAT_BYTES)
    many = of_slots(rows, _HALF_BYTES, _FLOAT_BYTES)
    numbers = rows * (experts.count + 8 * experts.used) + 4 * experts.count
    return max(few, many) + rows * hidden * _HALF_BYTES + numbers * _FLOAT_BYTES + experts.total * _EXPERT_LINE_BYTES


def choose_card_sizes(
    settings: Settings, machine: Machine, spec: ModelSpec, card_weights_bytes: int, context: int, kv_format: str
) -> CardSizes:
    """The sizes of an engine on `machine.card`. What was asked for is taken as it is, and `auto` ones adapt; but what
    other programs hold of the card now nobody gets, asked for or not.

    - All weights go to the card, and pages get what they leave, where that is enough for an arena.
    - Otherwise pages get one sequence of the whole context, up to a quarter of the card, and weights the rest.
    - Where more was asked for than others leave, and no more than the whole card has, pages get less first.
    - `yield_device_mem` stays free, as far as others hold any.

    `card_weights_bytes`: of all weights, as they are on the card.
    """
    card = machine.card
    assert card is not None
    layout = page_layout(spec, kv_format)
    tokens, why = settings.ctx or context, list[str]()
    workspace = workspace_bytes(spec, tokens, settings.max_batch, settings.max_streams)
    ladder = settings.kv_exact_first, settings.kv_exact_last
    workspace += exact_bytes(spec, kv_format, ladder, settings.max_batch, settings.max_streams, CARD_COPY_FORMAT)
    others = max(card.total_bytes - card.free_bytes, 0)
    room = max(usable_bytes(card) - workspace - min(settings.yield_device_mem, others), 0)
    alone = max(usable_bytes(card._replace(free_bytes=card.total_bytes)) - workspace, room)
    pages_bytes = -(-tokens // layout.page_tokens) * layout.record_bytes
    wanted = card_weights_bytes if settings.weights_mem is None else min(settings.weights_mem, card_weights_bytes)
    device, weights = _divide(settings, wanted, pages_bytes, room)
    later, wished = _divide(settings, wanted, pages_bytes, alone)
    kept = min(wished, wanted)
    if settings.device_mem is None and room - wanted < LEAST_ARENA_BYTES:
        why.append(f"pages get {human_bytes(device)} of the card, since not all weights fit beside them")
    if later + kept <= alone and device + kept > room:  # else it is too much for the whole card, and refused with that
        device = min(device, max(room - kept, min(pages_bytes, room // 4), LEAST_ARENA_BYTES))
        weights = max(room - device, 0) if settings.weights_mem is None else min(weights, max(room - device, 0))
    for name, now, asked in (("pages", device, settings.device_mem), ("weights", weights, settings.weights_mem)):
        if asked is not None and now < asked:
            held = f"other programs hold {human_bytes(others)} of it"
            why.append(f"{name} get {human_bytes(now)} of the card instead of {human_bytes(asked)}: {held}")
    below = resolve_sizes(settings, machine)
    usable = min(machine.available_ram, machine.total_ram)
    host_weights = settings.host_weights_mem
    if host_weights is None:
        host_weights = max(usable - usable // 10 - below.host_bytes, 0)
    if weights < card_weights_bytes:
        what = "layers" if spec.experts is None else "experts, or layers,"
        why.append(
            f"the weights do not fit: they take {human_bytes(card_weights_bytes)}, and the card has "
            f"{human_bytes(weights)} for them; some {what} are copied to it in every step"
        )
    sizes = below._replace(device_bytes=device, weights_bytes=weights, host_weights_bytes=host_weights)
    return CardSizes(sizes, workspace, usable_bytes(card), tuple(why), max(device, later))


def _divide(settings: Settings, wanted_bytes: int, pages_bytes: int, room: int) -> tuple[int, int]:
    """Pages and weights in so much of a card, as they were asked for. `wanted_bytes`: weights that are to lie there."""
    device = settings.device_mem
    if device is None:
        device = room - wanted_bytes
        if device < LEAST_ARENA_BYTES:
            device = max(min(pages_bytes, room // 4), LEAST_ARENA_BYTES)
    return device, max(room - device, 0) if settings.weights_mem is None else settings.weights_mem

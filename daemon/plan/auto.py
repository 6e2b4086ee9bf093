"""What `auto` sizes mean for one model: `machine.auto_sizes` knows the machine, this also what the model needs."""

from __future__ import annotations

from typing import NamedTuple

from tierd.daemon.config import Settings
from tierd.daemon.machine import Machine, Sizes, auto_weights
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.plan.auto_card import choose_card_sizes
from tierd.daemon.plan.workspace import engine_bytes, page_layout
from tierd.daemon.settled import resolve_sizes, settle

LEAST_ARENA_BYTES = 64 << 20  # as `machine.auto_sizes`


class Chosen(NamedTuple):
    """Sizes, and a sentence for each that is not simply what the machine or the user said.

    `card_workspace_bytes`, `card_usable_bytes`: of a card's memory, beside pages and weights, and for all of them; 0
    without one. `later_device_bytes`: for pages on the card if other programs held nothing of it.
    """

    sizes: Sizes
    why: tuple[str, ...]
    card_workspace_bytes: int = 0
    card_usable_bytes: int = 0
    later_device_bytes: int = 0


def choose_sizes(
    settings: Settings, machine: Machine, spec: ModelSpec, weights_bytes: int, context: int, threads: int,
    card_weights_bytes: int | None = None,
) -> Chosen:  # fmt: skip
    """The sizes of an engine. What was asked for is taken as it is; only `auto` ones adapt to the model.

    - The arenas grow until one sequence of the whole context fits into memory, where weights and workspace leave room.
    - They shrink, host before device, when the model's weights fit into memory but not beside them: a page that is
      missing is computed once more, a layer that is missing is read in every step.

    `context`: of the model, where the settings name none. `card_weights_bytes`: where a card would not take
    `weights_bytes` for the weights. On a card see `choose_card_sizes`. Raises BadConfig for page formats that the model
    does not take.
    """
    settings, machine = settle(settings, machine)
    if machine.card is not None:
        on_card = weights_bytes if card_weights_bytes is None else card_weights_bytes
        card = choose_card_sizes(settings, machine, spec, on_card, context, settings.kv_format)
        return Chosen(card.sizes, card.why, card.workspace_bytes, card.usable_bytes, card.later_device_bytes)
    sizes = resolve_sizes(settings, machine)
    layout = page_layout(spec, settings.kv_format)
    tokens = settings.ctx or context
    pages_bytes = -(-tokens // layout.page_tokens) * layout.record_bytes
    workspace = engine_bytes(
        spec, kv_format=settings.kv_format, store_format=settings.store_format,
        device_bytes=sizes.device_bytes, host_bytes=sizes.host_bytes,
        nvme_bytes=sizes.nvme_bytes, context=tokens, max_batch=settings.max_batch, max_streams=settings.max_streams,
        threads=threads, ladder=(settings.kv_exact_first, settings.kv_exact_last),
    ).workspace  # fmt: skip
    usable = min(machine.available_ram, machine.total_ram)
    wanted_weights = weights_bytes if settings.weights_mem is None else min(settings.weights_mem, weights_bytes)
    room = usable - usable // 10 - workspace - wanted_weights
    why: list[str] = []
    device, host = sizes.device_bytes, sizes.host_bytes
    if room >= LEAST_ARENA_BYTES:
        if settings.host_mem is None and device + host > room:
            host = max(room - device, 0)
            host = host if host >= LEAST_ARENA_BYTES else 0
        if settings.device_mem is None and device + host > room:
            device = max(room - host, min(device, LEAST_ARENA_BYTES))
    if device + host < sizes.device_bytes + sizes.host_bytes:
        why.append("pages get less memory than usual, so that all weights stay in it")
    if settings.device_mem is None and device + host < pages_bytes and pages_bytes <= room:
        device = pages_bytes - host
        why.append(f"pages get more memory than usual: one sequence of {tokens:,} tokens fits into it")
    sizes = sizes._replace(device_bytes=device, host_bytes=host)
    if settings.weights_mem is None:
        sizes = sizes._replace(weights_bytes=auto_weights(usable, device, host))
        if sizes.weights_bytes < weights_bytes:
            why.append("the weights do not fit into memory: some layers are read from the disk in every step")
    return Chosen(sizes, tuple(why))

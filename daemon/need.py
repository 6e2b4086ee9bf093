"""What an engine needs: the sizes that suit a machine and a model, and what it takes beside its arenas."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from tierd.daemon.config import Settings
from tierd.daemon.errors import BadConfig
from tierd.daemon.machine import Machine, Sizes
from tierd.daemon.models.catalog import Manifest, load_manifest
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.placement_card import record_card_bytes, refused_by_card
from tierd.daemon.plan.auto import Chosen, choose_sizes
from tierd.daemon.plan.choose_format import fitting_format
from tierd.daemon.plan.draft import Draft, choose_card_draft, choose_draft
from tierd.daemon.plan.workspace import engine_bytes
from tierd.daemon.room import Arenas, Held
from tierd.daemon.settled import resolve_sizes
from tierd.daemon.units import human_bytes

log = logging.getLogger("tierd.prepare")


class Need(NamedTuple):
    """The sizes of an engine that is alone, and what it takes beside its arenas."""

    sizes: Sizes
    weights_bytes: int  # all of them
    workspace_bytes: int
    draft: Draft = Draft()
    format: str = ""  # of the weights
    why: tuple[str, ...] = ()
    card_bytes: int = 0  # of a card's memory, for all of it; 0: it is the computer's
    later_device_bytes: int = 0  # for pages on a card, once other programs have left it

    def held(self, sizes: Sizes) -> Held:
        """What an engine with these sizes may use."""
        weights = min(sizes.weights_bytes, self.weights_bytes)
        return Held(Arenas(sizes.device_bytes, sizes.host_bytes), weights, self.workspace_bytes, self.card_bytes > 0)


def machine_for(machine: Machine, directory: Path) -> Machine:
    """The machine as it computes a model: without its card, if that does not take it."""
    try:
        refused = "" if machine.card is None else refused_by_card(load_manifest(directory).spec)
    except ModelFileError:
        return machine  # the engine says what is wrong with it
    if not refused:
        return machine
    log.info("%s is computed by the processors, not by the card: %s", directory.name, refused)
    return machine._replace(card=None)


def find_need(settings: Settings, directory: Path, machine: Machine, threads: int) -> Need:
    """The sizes that suit a model and a machine, which is settled. Raises BadConfig, and as `wanted`."""
    try:
        manifest = load_manifest(directory)
    except ModelFileError:
        return Need(resolve_sizes(settings, machine), 0, 0)  # the engine says what is wrong with it
    if machine.card is None and settings.host_weights_mem is not None:
        raise BadConfig(
            "host_weights_mem is for weights that a card has no room for, and no card computes here",
            hint="leave it out; weights_mem bounds the weights in memory", param="host_weights_mem",
        )  # fmt: skip
    if machine.card is not None:
        return _on_card(settings, directory, manifest, machine, threads)
    draft = choose_draft(settings, directory, manifest.bytes, machine, threads)
    beside = draft.beside(machine)
    sizes, why = choose_sizes(settings, beside, manifest.spec, manifest.bytes, manifest.context, threads)[:2]
    if manifest.bytes > sizes.weights_bytes and (
        found := fitting_format(manifest.spec, manifest.bytes, settings, beside)
    ):
        again = f"`tierd pull {manifest.source} --weights {found.format}`"
        why = (*why, f"as {found.format} they would take {human_bytes(found.bytes)} and fit: {again}")
    for reason in why:
        log.info("%s: %s", manifest.name, reason)
    workspace = engine_bytes(
        manifest.spec, kv_format=settings.kv_format, store_format=settings.store_format,
        device_bytes=sizes.device_bytes, host_bytes=sizes.host_bytes,
        nvme_bytes=sizes.nvme_bytes, context=settings.ctx or manifest.context, max_batch=settings.max_batch,
        max_streams=settings.max_streams, threads=threads, ladder=(settings.kv_exact_first, settings.kv_exact_last),
    ).workspace  # fmt: skip
    return Need(sizes, manifest.bytes, workspace + draft.ram_bytes, draft, manifest.format, why)


def _on_card(settings: Settings, directory: Path, manifest: Manifest, machine: Machine, threads: int) -> Need:
    """The same on a card."""
    on_card = sum(record_card_bytes(record) for record in manifest.records)

    def choose(machine: Machine) -> Chosen:
        return choose_sizes(settings, machine, manifest.spec, manifest.bytes, manifest.context, threads, on_card)

    draft = choose_card_draft(settings, directory, manifest, machine, threads, choose)
    beside = draft.beside(machine)
    found = choose(beside)
    assert machine.card is not None and beside.card is not None
    reserved = beside.card.free_bytes - found.card_usable_bytes  # each engine has a context of the driver's
    why = (*found.why, draft.why) if draft.why else found.why
    for reason in why:
        log.info("%s: %s", manifest.name, reason)
    return Need(
        found.sizes, on_card, found.card_workspace_bytes + draft.card_bytes + reserved, draft, manifest.format, why,
        machine.card.free_bytes, found.later_device_bytes,
    )  # fmt: skip

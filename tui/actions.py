"""What can be done to the daemon from the screen. Each is asked about first, none exists under `--readonly`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierd.daemon.config_values import size_or_auto
from tierd.daemon.errors import BadRequest
from tierd.tui.format import amount, clip, plain, size
from tierd.tui.glyphs import TIER_NAMES
from tierd.tui.snapshot import Snapshot
from tierd.tui.wire import PrefixRow, SequenceRow


@dataclass(frozen=True, slots=True)
class Request:
    """An operation, ready to be sent once somebody says yes."""

    op: str
    args: Mapping[str, Any]
    question: str
    done: str


PREFIX_ACTIONS = {
    "pin": ("Pin", "its last copy is not evicted until it is unpinned"),
    "unpin": ("Unpin", "it may be evicted again, and what goes on from it"),
    "drop": ("Drop", "it is forgotten in every tier, and all that goes on from it"),
    "persist": ("Persist", "it is written to disk before everything else; this waits until it is durable"),
    "evict": ("Evict", "it leaves memory, with all that goes on from it, and stays on disk"),
}


def on_prefix(action: str, row: PrefixRow, snapshot: Snapshot) -> Request:
    """One of `PREFIX_ACTIONS` for a prefix, with all that it is made of."""
    verb, effect = PREFIX_ACTIONS[action]
    what = f"“{clip(plain(row.text), 40)}”" if row.text else row.key.hex()[:12]
    held = size(row.device_bytes + row.host_bytes + row.nvme_bytes)
    args = {"model": _model(snapshot), "action": action, "id": row.key.hex()}
    return Request("prefix", args, f"{verb} {what}, {amount(row.tokens)} tokens, {held}? {effect}.", f"{action}: done")


def cancel(row: SequenceRow, snapshot: Snapshot) -> Request:
    """End a request, whoever sent it."""
    args = {"model": _model(snapshot), "request": row.id}
    question = f"Cancel request {row.id}? Its client is told."
    return Request("cancel_request", args, question, f"request {row.id} is cancelled")


def unload(snapshot: Snapshot) -> Request:
    """End the engine."""
    model = _model(snapshot)
    return Request("unload", {"model": model}, f"Unload {model}? Its pages stay on disk.", f"{model} is unloaded")


def verify(snapshot: Snapshot) -> Request:
    """Read every page on disk."""
    model = _model(snapshot)
    question = f"Verify every page of {model} on disk? The model does not answer meanwhile."
    return Request("cache", {"action": "verify", "model": model}, question, "verified")


def resize(tier: str, wanted: str, snapshot: Snapshot) -> Request:
    """Another size for the device or the host arena. Raises BadRequest for a text that is no size."""
    try:
        wanted_bytes = size_or_auto(wanted)
    except ValueError as exc:
        raise BadRequest(f"a size must be {exc}", param=tier) from None
    if wanted_bytes is None:
        raise BadRequest("give a size such as 512MiB", param=tier)
    args = {"model": _model(snapshot), f"{tier}_bytes": wanted_bytes}
    name = TIER_NAMES[tier]
    return Request("resize", args, f"Resize {name} to {size(wanted_bytes)}?", f"{name} has another size now")


def _model(snapshot: Snapshot) -> str:
    return snapshot.engine.model if snapshot.engine else ""

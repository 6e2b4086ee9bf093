"""What happened to pages, as rows for `tierd top`: entries of the journal in words, and where the page lies now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, assert_never

from tierd.daemon.units import counted
from tierd.tiers.journal import Entry, What
from tierd.tiers.page import Tier
from tierd.tiers.pager import Pager

_NAMES = {Tier.DEVICE: "device", Tier.HOST: "RAM", Tier.NVME: "disk"}  # short: a log is narrow

Place = Callable[[Tier, Any], int]  # slot of a page in a tier, negative for none


def rows(pager: Pager, after: int, slot_of: Place) -> list[dict[str, Any]]:
    """The entries after a number. `at_s` is on the scale of the pager's clock."""
    return list(_rows(pager, pager.residency.journal.since(after), slot_of))


def _rows(pager: Pager, entries: Iterable[Entry], slot_of: Place) -> Iterable[dict[str, Any]]:
    for entry in entries:
        row: dict[str, Any] = {"number": entry.number, "kind": entry.what.value, "at_s": entry.at_s}
        row["text"] = text(entry)
        if entry.key is not None:
            row["key"] = entry.key
            node = pager.index.get(entry.key)
            # Where it lies now: a screen jumps there. Of a page that is gone, where it lay.
            tier, slot = (node.nearest, -1) if node is not None and node.has_copy else (entry.tier, entry.slot)
            if node is not None and tier is not None and slot < 0:
                slot = slot_of(tier, node)
            if tier is not None and slot >= 0:
                row |= {"tier": tier.name.lower(), "slot": slot}
        yield row


def text(entry: Entry) -> str:
    """What an entry says to a person."""
    pages = counted(entry.count, "page")
    where = _NAMES[entry.tier] if entry.tier is not None else "memory"
    match entry.what:
        case What.EVICT:
            return f"{pages} left {where}"
        case What.SPILL:
            return f"{pages} of live requests left {where}"
        case What.DEMOTE:
            return f"{pages} copied to RAM"
        case What.RESTORE:
            return f"{pages} came from disk to {where}"
        case What.PERSIST:
            return f"{pages} made durable"
        case What.PREEMPT:
            return f"made room for others: {counted(entry.count, 'request')}"
        case What.FAILURE:
            return f"{counted(entry.count, 'request')} failed"
        case What.DAMAGE | What.PREFIX | What.RESIZE | What.ENGINE:
            return entry.text
        case _:
            assert_never(entry.what)

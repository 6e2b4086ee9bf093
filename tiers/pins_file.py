"""The file in a store's directory that says which prefixes are pinned: keys of their last pages, and until when."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from tierd.tiers import small_file
from tierd.tiers.keys import KEY_BYTES
from tierd.tiers.page import PageKey

FILE_NAME = "pinned.json"  # in the directory of a store


def read(file: Path | None) -> tuple[set[PageKey], dict[PageKey, float]]:
    """The keys in a file, those by hand and those with an end; none when it is not there or damaged."""
    if file is None:
        return set(), {}
    try:
        found = json.loads(file.read_bytes())
        if isinstance(found, list):  # as it was before pins could end
            found = {"pinned": found, "until_s": {}}
        return set(map(_key, found["pinned"])), {_key(text): float(end) for text, end in found["until_s"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return set(), {}


def write(file: Path | None, pinned: Collection[PageKey], until_s: Mapping[PageKey, float]) -> None:
    """Puts a new file in the place of the old one. Without one, or where it can't be written, pins end with the
    process."""
    if file is not None:
        ends = {key.hex(): until for key, until in until_s.items()}
        small_file.replace(file, json.dumps({"pinned": sorted(key.hex() for key in pinned), "until_s": ends}))


def _key(text: str) -> PageKey:
    key = bytes.fromhex(text)
    if len(key) != KEY_BYTES:
        raise ValueError("not a key")
    return PageKey(key)

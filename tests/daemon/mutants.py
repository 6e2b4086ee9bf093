"""Bodies that were sound once: JSON with a part replaced, dropped, doubled or renamed, and bytes that are torn."""

from __future__ import annotations

import random
from typing import Any

VALUES: list[Any] = [
    None, True, 0, -1, 1e308, 10**30, "", "x" * 300, "\ud800", "\0", [], {}, [[]], {"type": "text"}, "auto", ["x"],
    {"type": "image", "source": {"url": "http://x"}}, {"a": {"b": [1]}},
]  # fmt: skip


def mutated(value: Any, draw: random.Random) -> Any:
    """The same with one part replaced, dropped, doubled or put under another name."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        changed = dict(value)
        match draw.randrange(6):
            case 0:
                del changed[key]
            case 1:
                changed[draw.choice(["x", f"{key}s", "role", "type", "content"])] = changed[key]
            case _:
                changed[key] = mutated(changed[key], draw)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.8:
        place, changed_list = draw.randrange(len(value)), list(value)
        changed_list[place : place + 1] = draw.choice([[], [value[place]] * 2, [mutated(value[place], draw)]])
        return changed_list
    return draw.choice(VALUES)


def torn(body: bytes, draw: random.Random) -> bytes:
    """The bytes with a few of them changed or cut off."""
    data = bytearray(body)
    for _ in range(draw.randrange(1, 4)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data)

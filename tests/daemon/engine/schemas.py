"""Makes JSON schemas of many shapes, each from a number, with instances that end soon."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "age", "city", "tags", "id", "note", "\u00e9t\u00e9", "a b", "x-1")
_WORDS = ("red", "green", "Paris", "42", "a \"b\"", "\u65e5\u672c", "on")
_PATTERNS = ("^[a-z]{1,6}$", "^\\d{3}-\\d{4}$", "^(yes|no)$", "^[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5})?$")


def schema(number: int) -> dict[str, Any]:
    """The schema with this number: an object, as clients send them."""
    dice = random.Random(number)
    found = _object(dice, 2)
    if dice.random() < 0.2:
        found["$defs"] = {"part": _any(dice, 1)}
        found["properties"]["part"] = {"$ref": "#/$defs/part"}
    return found


def _any(dice: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _integer, _number, _choice, lambda _: {"type": "boolean"}, lambda _: {"type": "null"}]
    if depth:
        deep = [lambda dice: _object(dice, depth - 1), lambda dice: _array(dice, depth - 1),
                lambda dice: {"anyOf": [_any(dice, depth - 1), _any(dice, depth - 1)]}]  # fmt: skip
        makers = [*makers, *deep, *deep]
    return dice.choice(makers)(dice)


def _object(dice: random.Random, depth: int) -> dict[str, Any]:
    names = dice.sample(_NAMES, dice.randint(1, 3))
    found: dict[str, Any] = {
        "type": "object", "properties": {name: _any(dice, depth) for name in names},
        "required": [name for name in names if dice.random() < 0.7], "additionalProperties": False,
    }  # fmt: skip
    if dice.random() < 0.3:
        found |= {"title": "Thing", "description": "of some kind"}
    return found


def _array(dice: random.Random, depth: int) -> dict[str, Any]:
    least = dice.randint(0, 2)
    return {"type": "array", "items": _any(dice, depth), "minItems": least, "maxItems": least + dice.randint(0, 2)}


def _string(dice: random.Random) -> dict[str, Any]:
    match dice.randint(0, 3):
        case 0:
            return {"type": "string", "pattern": dice.choice(_PATTERNS)}
        case 1:
            return {"type": "string", "format": dice.choice(("date", "time", "uuid", "ipv4"))}
        case _:
            least = dice.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 12)}


def _integer(dice: random.Random) -> dict[str, Any]:
    low = dice.randint(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 1000)}


def _number(dice: random.Random) -> dict[str, Any]:
    return {"type": "number", "minimum": -10, "exclusiveMaximum": dice.randint(0, 100)}


def _choice(dice: random.Random) -> dict[str, Any]:
    if dice.random() < 0.3:
        return {"const": dice.choice((*_WORDS, 1, True, None))}
    return {"enum": dice.sample((*_WORDS, 7, False, None), dice.randint(1, 4))}

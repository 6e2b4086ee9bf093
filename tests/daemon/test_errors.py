"""The tree, the table and the wire form of errors."""

from __future__ import annotations

import inspect
import re

import pytest

from tierd.daemon import errors
from tierd.daemon.errors import TABLE, TierdError, from_wire, sentence, should_retry, suggest, to_wire

CLASSES = [
    value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, TierdError)
]  # fmt: skip
EXIT_CODES = {1, 2, 69, 75, 77, 78, 130}


def drawn_tree() -> dict[str, str]:
    """Class -> parent as the docstring draws them."""
    parents: dict[str, str] = {}
    path = ["TierdError"]
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ((?:│   |    )*)[├└]── (\w+)", line):
            depth = len(found[1]) // 4 + 1
            del path[depth:]
            parents[found[2]] = path[-1]
            path.append(found[2])
    return parents


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {cls.__name__: cls.__bases__[0].__name__ for cls in CLASSES if cls is not TierdError}
    assert drawn_tree() == real


def test_every_class_has_a_row_and_a_code_of_its_own() -> None:
    assert set(TABLE) == set(CLASSES)
    codes = [row.code for row in TABLE.values()]
    assert len(codes) == len(set(codes))
    assert {row.exit_code for row in TABLE.values()} == EXIT_CODES
    assert all(400 <= row.status < 600 for row in TABLE.values())


@pytest.mark.parametrize("cls", CLASSES)
def test_round_trip(cls: type[TierdError]) -> None:
    wire = to_wire(cls("what", hint="next", param="field"))
    assert wire == {"code": TABLE[cls].code, "message": "what", "hint": "next", "param": "field"}
    back = from_wire(wire)
    assert type(back) is cls
    assert (back.message, back.hint, back.param) == ("what", "next", "field")
    assert (back.status, back.exit_code) == TABLE[cls][1:]


def test_a_subclass_elsewhere_takes_the_row_of_its_parent() -> None:
    class Special(errors.EngineFailed):
        """Of another room."""

    assert to_wire(Special("x")) == {"code": "engine_failed", "message": "x"}


def test_an_unknown_exception_tells_nothing_of_itself() -> None:
    secret = "/home/anna/secret prompt 0x7f00"
    wire = to_wire(OSError(5, secret, secret))
    assert wire["code"] == "internal_error"
    assert "secret" not in str(wire) and "OSError" not in str(wire)


@pytest.mark.parametrize("data", [{}, {"code": "from_the_future", "message": 3}, {"code": [], "hint": 4, "param": {}}])
def test_any_map_becomes_an_error(data: dict[str, object]) -> None:
    error = from_wire(data)
    assert type(error) is TierdError
    assert error.message and error.hint is None and error.param is None


def test_suggest() -> None:
    assert suggest("device_men", ["device_mem", "host_mem"]) == "did you mean 'device_mem'?"
    assert suggest("zzz", ["device_mem"]) is None


@pytest.mark.parametrize("cls", CLASSES)
def test_one_line_and_whether_another_try_can_help(cls: type[TierdError]) -> None:
    assert sentence(cls("what", hint="do this")) == "what; do this"
    exc = cls("what", hint=None)
    assert sentence(exc) == "what"
    passes = exc.status in (429, 503) and not isinstance(exc, errors.DaemonUnreachable)
    assert should_retry(exc) == (passes or isinstance(exc, errors.EngineFailed))

"""JSON bodies: what is wrong with them is told by the name of the field."""

from __future__ import annotations

import msgspec
import pytest

from tierd.daemon.api import bodies
from tierd.daemon.errors import BadRequest, Unsupported


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    count: int = 0


class Outer(msgspec.Struct):
    name: str
    inner: list[Inner] = []


def test_a_body_as_a_struct():
    assert bodies.decode(b'{"name": "x", "inner": [{"count": 2}], "more": 1}', Outer) == Outer("x", [Inner(2)])


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{}", "name", "name is missing"), (b'{"name": 5}', "name", "name: Expected str"),
        (b'{"name": "x", "inner": [{"count": "y"}]}', "inner[0].count", "inner[0].count: Expected int"),
        (b"[]", None, "the body is not a JSON object"), (b"{", None, "not valid JSON"),
        (b"\xff", None, "not valid JSON"),
        (b'{"more": ' + b"[" * 100_000, None, "nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body, param, words):
    with pytest.raises(BadRequest) as caught:
        bodies.decode(body, Outer)
    assert caught.value.param == param and words in caught.value.message


def test_an_unknown_field_is_not_supported():
    with pytest.raises(Unsupported, match=r"unknown field 'inner\[0\].cuont'"):
        bodies.decode(b'{"name": "x", "inner": [{"cuont": 1}]}', Outer)


def test_an_object_inside_a_body():
    assert bodies.json_object(b' {"a": 1}', "schema") == {"a": 1}


@pytest.mark.parametrize("raw", [b"[]", b"5", b"null", b"{", b"\xff", b'{"a": "%b"}' % (b"x" * bodies.MAX_VALUE_BYTES)])
def test_what_is_no_object_of_a_sensible_size(raw):
    with pytest.raises(BadRequest) as caught:
        bodies.json_object(raw, "schema")
    assert caught.value.param == "schema"


def test_a_flag_is_no_number():
    for value, known in ((False, 0), (0, False), (True, 1), (1.0, True)):
        assert not bodies.is_one_of(value, [known])
    for value, known in ((0, 0), (1, 1.0), (True, True), ("a", "a"), ([], [])):
        assert bodies.is_one_of(value, ["x", known])

"""Bodies of embeddings and their answers, without a server."""

from __future__ import annotations

import base64
import json
from array import array

import pytest

from tierd.daemon.api import embeddings
from tierd.daemon.embedding import Vectors
from tierd.daemon.errors import BadRequest, Unsupported

FOUND = Vectors([array("f", [0.6, 0.8]), array("f", [1.0, 0.0])], 7, 0)


def body(**fields) -> bytes:
    return json.dumps({"model": "alpha"} | fields).encode()


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3))),
        ([], ()), ([[]], ((),)), (["a", [1]], ("a", (1,))),
    ],
)  # fmt: skip
def test_inputs_of_every_kind(given, inputs):
    assert embeddings.parse(body(input=given)).inputs == inputs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"), ({"input": 5}, "input"), ({"input": ["a", 5]}, "input"), ({"input": [1, "a"]}, "input"),
        ({"input": [True]}, None), ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": "2"}, "dimensions"), ({"input": "a", "colour": 1}, "colour"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(fields, param):
    with pytest.raises(BadRequest) as caught:
        embeddings.parse(body(**fields))
    assert caught.value.param in (param, "input[0]", "input[...]") or param is None


def test_what_asks_for_nothing_is_taken():
    call = embeddings.parse(body(input="a", user="me", encoding_format=None, dimensions=None, colour=None))
    assert call.inputs == ("a",) and not call.is_base64


def test_numbers_and_base64():
    plain = embeddings.answer(embeddings.parse(body(input=["a", "b"])), FOUND)
    assert [item.index for item in plain.data] == [0, 1] and plain.usage.total_tokens == 7
    packed = embeddings.answer(embeddings.parse(body(input=["a", "b"], encoding_format="base64")), FOUND)
    assert [array("f", base64.b64decode(item.embedding)).tolist() for item in packed.data] == [
        item.embedding for item in plain.data
    ]


def test_dimensions():
    call = embeddings.parse(body(input=["a", "b"], dimensions=1))
    assert [item.embedding for item in embeddings.answer(call, FOUND).data] == [[1.0], [1.0]]
    with pytest.raises(BadRequest, match="dimensions"):
        embeddings.answer(call._replace(dimensions=3), FOUND)


def test_ollama_has_two_paths():
    call = embeddings.parse_ollama(body(model="alpha:latest", input="a", truncate=True, keep_alive="5m", options={}))
    assert (call.model, call.ref, call.inputs, call.truncate, call.keep_alive) == (
        "alpha:latest", "alpha", ("a",), True, (300.0,)
    )  # fmt: skip
    found = embeddings.ollama_answer(call, FOUND, 0.5)
    assert found["embeddings"][1] == [1.0, 0.0] and found["total_duration"] == 500_000_000
    assert found["prompt_eval_count"] == 7 and found["model"] == "alpha:latest"
    older = embeddings.parse_older_ollama(body(prompt="a"))
    assert older.inputs == ("a",) and embeddings.older_ollama_answer(older, Vectors(FOUND.vectors[1:], 1, 0), 0.1) == {
        "embedding": [1.0, 0.0]
    }
    assert embeddings.parse_ollama(body(input="")).inputs == embeddings.parse_older_ollama(body()).inputs == ()
    with pytest.raises(Unsupported, match="prompt"):
        embeddings.parse_ollama(body(prompt="a"))

"""Depth and number of values of a JSON body, before it is decoded."""

from __future__ import annotations

import json
import random
import time

import pytest

from tierd.daemon.api.body_limits import MAX_DEPTH, MAX_VALUES, check
from tierd.daemon.errors import BadRequest


def nested(depth: int) -> bytes:
    return b'{"a":' * (depth - 1) + b"[]" + b"}" * (depth - 1)


def test_depth_at_its_limit_and_one_past_it() -> None:
    check(nested(MAX_DEPTH))
    with pytest.raises(BadRequest, match=f"more than {MAX_DEPTH} levels"):
        check(nested(MAX_DEPTH + 1))


def test_values_at_their_limit_and_one_past_it() -> None:
    check(b"[" + b"1," * (MAX_VALUES - 1) + b"1]")
    with pytest.raises(BadRequest, match=f"more than {MAX_VALUES} values"):
        check(b"[" + b"1," * MAX_VALUES + b"1]")


@pytest.mark.parametrize(
    "text", ["[" * 100, "]" * 100, "{{{{" * 50, '\\"[' * 100, "\\" * 99, '"' + "[" * 100, "a\\", 'x\\\\"[[', "," * 999]
)
def test_what_stands_in_strings_does_not_count(text: str) -> None:
    check(json.dumps({"content": text, text: [text]}).encode())
    check(json.dumps([text] * 60).encode())


def test_commas_in_text_are_no_values() -> None:
    check(json.dumps({"content": "," * (MAX_VALUES + 9)}).encode())


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


def test_random_documents() -> None:
    rng = random.Random(3)

    def make(left: int):
        kind = rng.randrange(5 if left else 2)
        if kind == 0:
            return "".join(rng.choices('ab"\\[]{},:\u00e9\n', k=rng.randrange(6)))
        if kind == 1:
            return rng.choice([None, True, 1, -2.5])
        if kind == 2:
            return {str(rng.random()): make(left - 1) for _ in range(rng.randrange(3))}
        return [make(left - 1) for _ in range(rng.randrange(1, 3))]

    refused = 0
    for _ in range(300):
        document = [make(rng.randrange(10))]
        for _ in range(rng.randrange(MAX_DEPTH - 5, MAX_DEPTH + 2)):
            document = [document]
        body = json.dumps(document, ensure_ascii=rng.random() < 0.5).encode()
        if depth_of(document) > MAX_DEPTH:
            refused += 1
            with pytest.raises(BadRequest):
                check(body)
        else:
            check(body)
    assert 50 < refused < 250


@pytest.mark.parametrize(
    "body", [b"", b'"', b"\\", b"}{", b"]" * 999, b'"\\', b"\xff\xfe", b"\0" * 99, b'{"a": "', b"[" * 64 + b'"']
)
def test_what_is_no_json_is_left_to_the_decoder(body: bytes) -> None:
    check(body)


MIB = 1 << 20
HOSTILE = {  # of about n bytes
    "open": lambda n: b"[" * n,
    "closed": lambda n: b"[" * (n // 2) + b"]" * (n // 2),
    "closers": lambda n: b"]" * n,
    "closers of objects": lambda n: b"}" * n,
    "one closer too many": lambda n: b"[]" + b"]" * n,
    "pairs": lambda n: b"[]" * (n // 2),
    "objects": lambda n: b"[{}]," * (n // 5),
    "numbers": lambda n: b"[" + b"1," * (n // 2) + b"1]",
    "commas": lambda n: b"," * n,
    "quotes": lambda n: b'"' * n,
    "quotes just allowed": lambda n: b'""' * min(1_000_000, n // 2) + b"a" * max(0, n - 2_000_000),
    "strings": lambda n: b'["",' * (n // 4),
    "backslashes": lambda n: b"\\" * n,
    "backslashes in a string": lambda n: b'"' + b"\\" * n,
    "backslashes just allowed": lambda n: b"\\" * min(8_000_000, n) + b"a" * max(0, n - 8_000_000),
    "escapes": lambda n: b'"' + b'\\"' * (n // 2) + b'"',
    "text": lambda n: b'"' + b"a, b [c] " * (n // 9) + b'"',
    "just allowed": lambda n: b'"a' * min(999_999, n // 4) + b"[" * 400_000 + b"\\n" * (n // 4),
    "values just allowed": lambda n: (b"[" + (b"[" * 63 + b"]" * 63 + b",") * 7_800).ljust(n),
}


def seconds_of(body: bytes) -> float:
    started_s = time.process_time()
    try:
        check(body)
    except BadRequest:
        pass
    return time.process_time() - started_s


@pytest.mark.parametrize("name", HOSTILE)
def test_the_largest_body_takes_some_10_ms_per_mib(name: str) -> None:
    # Of processor time, and once more if need be: machines that test do other things beside it.
    body = HOSTILE[name](32 * MIB)
    assert any(seconds_of(body) < 1.0 for _ in range(3))

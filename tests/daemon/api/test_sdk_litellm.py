"""The `litellm` package against a running daemon, by the provider `openai/`, which aider takes, too.

Behind `long`: its import alone takes many seconds of processor. `make test-long` installs it with the extra `sdk`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import numbers, whole_text
from sdk_daemon import Served, served

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).resolve().parents[1] / "run_litellm.py"
TEXT = whole_text("user:hi\n", 12)
CALLS = [[f"call_{n}", "look", {"where": "page"}] for n in range(2)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("litellm"), max_streams=4, max_queue=4)


@pytest.fixture(scope="module")
def told(daemon: Served) -> dict[str, Any]:
    """What it got, by check."""
    done = subprocess.run([sys.executable, SCRIPT, daemon.url], check=True, capture_output=True, text=True, timeout=110)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("plain", [TEXT, 2]), ("streamed", [TEXT, ["length"], 1]), ("tools", CALLS), ("tools_streamed", CALLS),
        ("tools_answered", "length"), ("schema", {"age": 7}), ("thinking", whole_text("user:!think=3\n", 3)),
        ("embedded", [[numbers("a b"), numbers("c")], 3]),
        ("response", whole_text("user:hi\n", 16)), ("asynchronous", [TEXT, TEXT]), ("tried_again", TEXT),
    ],
)  # fmt: skip
def test_what_it_gets(told, check, expected):
    assert told[check] == expected


@pytest.mark.parametrize(
    ("check", "error"),
    [("too_long", "ContextWindowExceededError"), ("no_model", "NotFoundError"), ("timeout", "Timeout"),
     ("busy", "ServiceUnavailableError"),
     ("broken_stream", "")],
)  # fmt: skip
def test_what_it_raises(told, check, error):
    assert isinstance(told[check], str) and error in told[check].partition(":")[0]


def test_nothing_runs_on(told, daemon):
    assert daemon.live() == 0

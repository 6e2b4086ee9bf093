"""prefix ls, pin, unpin, drop, persist, evict."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon.errors import NotFound


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


ONE = {
    "id": "ab" * 16, "parent": "", "tokens": 1000, "own_tokens": 1000, "pages": 63, "device": 10, "host": 3, "nvme": 63,
    "hits": 12, "idle_s": 61.0, "pinned": True, "wished": False, "in_use": True,
    "text": "You are\na helpful assistant " + "x" * 90,
}  # fmt: skip
TWO = {**ONE, "id": "cd" * 16, "parent": ONE["id"], "wished": True, "in_use": False, "text": "hello"}


def test_ls(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["prefix"] = {"model": "alpha", "prefixes": [ONE, TWO], "total": 9}
        said = cli("prefix", "ls")
        assert front.requests[-1].args == {"action": "ls", "model": None, "limit": 20}
        assert cli("prefix", "ls", "--json", "--limit", "3", "--model", "alpha").json["prefixes"] == [ONE, TWO]
        assert front.requests[-1].args == {"action": "ls", "model": "alpha", "limit": 3}
    head, one, two = said.out.splitlines()
    assert head.split() == ["ID", "TOKENS", "PAGES", "DEVICE", "HOST", "NVME", "HITS", "IDLE", "STATE", "TEXT"]
    assert one.startswith("abababababab  1000") and "pinned in use" in one and one.endswith("...")
    assert "kept for a while" in two and "pinned" not in two
    assert "You are a helpful" in one, "one line, whatever the text holds"
    assert two.endswith("... hello")
    assert said.err == "7 more; --limit shows them\n"


def test_ls_of_nothing(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["prefix"] = {"model": "alpha", "prefixes": [], "total": 0}
        said = cli("prefix", "ls")
    assert said.code == 0 and said.out == "" and "alpha knows no prefix" in said.err


@pytest.mark.parametrize(
    ("verb", "done"),
    [("pin", "kept"), ("unpin", "no longer kept"), ("drop", "forgotten"), ("persist", "written"),
     ("evict", "left memory")],
)  # fmt: skip
def test_verbs(cli: Cli, verb: str, done: str) -> None:
    with cli.front() as front:
        front.answers["prefix"] = {"model": "alpha", "pages": 4}
        yes = ("--yes",) if verb == "drop" else ()
        assert cli("prefix", verb, "abcdef", *yes).out == f"abcdef: 4 pages {done}\n"
        assert front.requests[-1].args == {"action": verb, "model": None, "id": "abcdef"}
        assert cli("prefix", verb, "abcdef", *yes, "--json").json == {"model": "alpha", "pages": 4}


def test_nothing_is_dropped_without_a_yes(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["prefix"] = {"model": "alpha", "pages": 4}
        assert cli("prefix", "drop", "abcdef").code == 2
        assert not front.requests


def test_an_id_that_nobody_knows(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["prefix"] = NotFound("no prefix abcd is known", hint="`tierd prefix ls` lists the ids")
        said = cli("prefix", "pin", "abcd")
    assert said.code == 1 and said.hinted


def test_a_verb_without_an_id(cli: Cli) -> None:
    assert cli("prefix", "pin").code == 2

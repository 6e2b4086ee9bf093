"""key add, ls, rm."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon import keys


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


def test_a_key_is_printed_alone_and_once(cli: Cli) -> None:
    said = cli("key", "add", "laptop", "--quota-pages", "9", "--max-requests", "3")
    assert said.code == 0 and said.out.startswith("tierd_") and said.out.count("\n") == 1
    assert said.out.strip() not in cli("key", "ls", "--json").out
    (listed,) = cli("key", "ls", "--json").json
    assert (listed["name"], listed["quota_pages"], listed["max_requests"]) == ("laptop", 9, 3)
    row = cli("key", "ls").out.splitlines()[1].split()
    assert row[0] == "laptop" and row[-2:] == ["9", "3"]


def test_json_and_where_the_file_lies(cli: Cli) -> None:
    made = cli("key", "add", "a", "--json").json
    (kept,) = keys.read(cli.home / "config" / "tierd" / "keys.json")
    assert keys.KeyRing(cli.home / "config" / "tierd" / "keys.json").find(made["key"]) == kept
    other = cli("key", "add", "a", "--keys-file", str(cli.home / "other"), "--json").json
    assert keys.read(cli.home / "other")[0].id == other["id"]


def test_removing_the_last_one_says_what_that_means(cli: Cli) -> None:
    cli("key", "add", "a")
    cli("key", "add", "b")
    assert "no key is left" not in cli("key", "rm", "a").err
    assert "no key is left" in cli("key", "rm", "b").err
    assert cli("key", "ls").out.splitlines()[1:] == []


@pytest.mark.parametrize("words", [("rm", "a"), ("add", "a b"), ("add", "a", "--quota-pages", "0"), ("add",), ("zz",)])
def test_mistakes_have_a_next_step(cli: Cli, words: tuple[str, ...]) -> None:
    said = cli("key", *words)
    assert said.code in (1, 2) and "error: " in said.err and said.out == ""


def test_a_key_opens_an_address_that_others_reach(cli: Cli) -> None:
    said = cli("config", "show", "--listen", "0.0.0.0:0")
    assert said.code == 78 and "tierd key add" in said.err
    cli("key", "add", "a")
    assert cli("config", "show", "--listen", "0.0.0.0:0").code == 0

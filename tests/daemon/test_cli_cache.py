"""cache ls, verify, gc, clear: with a daemon and without."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon import cli_cache
from tierd.daemon.kv_quota import LOCK_NAME
from tierd.tiers import pins_file
from tierd.tiers.keys import KEY_BYTES
from tierd.tiers.page import PageKey


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


def make_store(cli: Cli, name: str, size_bytes: int = 5000) -> Path:
    directory: Path = cli.home / "cache" / "kv" / name
    directory.mkdir(parents=True)
    (directory / LOCK_NAME).touch()
    (directory / "slab-0").write_bytes(b"x" * size_bytes)
    return directory


def test_ls_without_a_daemon(cli: Cli) -> None:
    assert "no pages are kept" in cli("cache", "ls").err
    make_store(cli, "ab" * 16)
    table = cli("cache", "ls").out.splitlines()
    assert len(table) == 2 and table[1].startswith("ab" * 16) and "closed" in table[1]
    [store] = cli("cache", "ls", "--json").json["namespaces"]
    assert store["name"] == "ab" * 16 and store["bytes"] >= 4096 and store["open"] is False


def test_clear_without_a_daemon_spares_what_is_open(cli: Cli) -> None:
    closed, held = make_store(cli, "aa" * 16), make_store(cli, "bb" * 16)
    assert cli("cache", "clear").code == 2, "nobody can be asked"
    with (held / LOCK_NAME).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cleared = cli("cache", "clear", "--yes", "--json").json
    assert cleared["freed_bytes"] > 0 and cleared["left"] == ["bb" * 16]
    assert not closed.exists() and held.exists()


def test_clear_says_how_many_pins_go_and_takes_them(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [PageKey(bytes([number]) * KEY_BYTES) for number in range(3)]
    for name, pinned in (("aa" * 16, keys[:2]), ("bb" * 16, keys[2:])):
        pins_file.write(make_store(cli, name) / pins_file.FILE_NAME, pinned, {keys[0]: 5.0})
    held, asked = cli.home / "cache" / "kv" / ("bb" * 16), []
    monkeypatch.setattr(cli_cache, "confirm", lambda question, *, yes: asked.append(question))
    with (held / LOCK_NAME).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = cli("cache", "clear").out
    assert asked[0].endswith("? 3 pinned prefixes go with them.")
    assert said.startswith("2 prefixes pinned no more\n")
    assert cli("cache", "clear", "--json").json["removed_pins"] == 1
    assert asked[1].endswith("? 1 pinned prefix goes with them.")
    assert cli("cache", "clear").out == "0 B of disk given back\n" and asked[2].endswith("?")


def test_clear_asks_the_daemon(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["cache"] = {"engines": {"alpha": {"removed_pages": 12}}, "closed": []}
        assert cli("cache", "clear", "--yes").out == "alpha: 12 pages deleted\n0 B of disk given back\n"
        assert front.requests[-1].args == {"action": "clear", "model": None, "yes": True}


def test_verify(cli: Cli) -> None:
    with cli.front() as front:
        front.answers["cache"] = {
            "engines": {"alpha": {"findings": [], "pages": 7}}, "closed": [{"name": "ff", "model": "beta"}]
        }
        said = cli("cache", "verify")
        assert said.code == 0 and said.out == "alpha: 7 pages read, all sound\n" and "--model beta" in said.err
        front.answers["cache"] = {"engines": {"alpha": {"findings": ["slot 3: checksum"]}}, "closed": []}
        said = cli("cache", "verify", "--model", "alpha")
        assert said.code == 1 and said.out == "alpha: 0 pages read, 1 finding\nalpha: slot 3: checksum\n"
        assert cli("cache", "verify", "--repair").code == 1, "something was wrong: the next one is clean"
        assert front.requests[-1].args == {"action": "verify", "model": None, "repair": True}
        said = cli("cache", "verify", "--json")
        assert said.code == 1
        assert said.json["engines"] == {"alpha": {"findings": ["slot 3: checksum"]}}
        front.answers["cache"] = {"engines": {}, "closed": []}
        assert "no model is loaded" in cli("cache", "verify").err


def test_gc(cli: Cli) -> None:
    with cli.front() as front:
        done = {"engines": {"alpha": {"removed_pages": 3, "freed_bytes": 2_000_000}}, "closed": []}
        front.answers["cache"] = done
        told = "alpha: 2.0 MB of disk given back, 3 pages removed that nothing could reach\n"
        assert cli("cache", "gc").out == told
        assert cli("cache", "gc", "--json").json == done

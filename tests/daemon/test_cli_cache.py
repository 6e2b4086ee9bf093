"""cache ls, verify, gc, clear: with a daemon and without."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon.kv_quota import LOCK_NAME


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

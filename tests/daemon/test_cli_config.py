"""config show, config path, version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon.card_memory import CardMemory
from tierd.daemon.config import setting_docs
from tierd.daemon.machine import Machine


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


def test_show_lists_every_setting(cli: Cli) -> None:
    lines = cli("config", "show").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [doc.key for doc in setting_docs()]


def test_sizes_are_readable(cli: Cli) -> None:
    values = dict(line.split(maxsplit=1) for line in cli("config", "show", "--device-mem", "6GB").out.splitlines())
    assert values["device_mem"] == "6.0 GB"
    assert re.fullmatch(r"auto \([\d.]+ [kMGT]?B\)", values["host_mem"])


def test_show_origin(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cli.home / "config" / "tierd" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("max_queue = 9\n")
    monkeypatch.setenv("TIERD_MAX_STREAMS", "3")
    shown = cli("config", "show", "--origin", "--json", "--threads", "2", "--device-mem", "1GB").json
    assert shown["max_queue"] == {"value": 9, "origin": f"file {file}"}
    assert shown["max_streams"] == {"value": 3, "origin": "env TIERD_MAX_STREAMS"}
    assert shown["threads"] == {"value": 2, "origin": "flag --threads"}
    assert shown["device_mem"] == {"value": 10**9, "origin": "flag --device-mem", "bytes": 10**9}
    assert shown["host_mem"]["value"] == "auto" and shown["host_mem"]["bytes"] >= 0
    assert shown["keep_alive"] == {"value": 900.0, "origin": "default"}
    assert f"file {file}" in cli("config", "show", "--origin").out


def test_a_secret_is_not_printed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERD_API_KEY", "hush")
    for words in (["config", "show"], ["config", "show", "--json", "--origin"]):
        out = cli(*words).out
        assert "hush" not in out and "(set)" in out


def test_never(cli: Cli) -> None:
    assert cli("config", "show", "--json", "--keep-alive", "never").json["keep_alive"]["value"] == "never"


def test_path(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("config", "path").out == f"{cli.home}/config/tierd/config.toml\n"
    monkeypatch.setenv("TIERD_CONFIG", "/x/y.toml")
    assert cli("config", "path").out == "/x/y.toml\n"


@pytest.mark.parametrize("text", ["max_queu = 3\n", "threads = [\n", 'threads = "many"\n'])
def test_a_fault_in_the_file_is_told_below_the_settings(cli: Cli, text: str) -> None:
    file = cli.home / "config" / "tierd" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    said = cli("config", "show")
    assert said.code == 78 and said.hinted and str(file) in said.err
    assert [line.split()[0] for line in said.out.splitlines()[1:]] == [doc.key for doc in setting_docs()]
    assert cli("config", "show", "--json").code == 78


def test_what_the_start_would_refuse_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERD_DEFAULT_MODEL", "../x")
    said = cli("config", "show")
    assert said.code == 78 and said.hinted and "TIERD_DEFAULT_MODEL must be the name of a model" in said.err
    monkeypatch.setenv("TIERD_DEFAULT_MODEL", "smollm2:135m")
    monkeypatch.setenv("TIERD_LISTEN", "0.0.0.0:8421")
    keys = cli.home / "keys"
    keys.touch(mode=0o600)
    for words in ([], ["--keys-file", str(keys)]):
        said = cli("config", "show", *words)
        assert said.code in (77, 78) and said.hinted, "a file of keys without a key opens nothing"
    assert "needs an API key" in cli("config", "show").err


def test_auto_says_what_it_means(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    said = cli("config", "show")
    assert re.search(r"^kv_format +auto \(fp32\)$", said.out, re.MULTILINE)
    assert re.search(r"^card +auto \(off\)$", said.out, re.MULTILINE)
    card = CardMemory("a card", 24 * 10**9, 20 * 10**9)
    machine = Machine(16 * 10**9, 12 * 10**9, 100 * 10**9, card)
    monkeypatch.setattr("tierd.daemon.cli_config.probe_machine", lambda _path: machine)
    said = cli("config", "show")
    assert re.search(r"^kv_format +auto \(bf16\)$", said.out, re.MULTILINE)
    assert re.search(r"^card +auto \(a card\)$", said.out, re.MULTILINE)
    assert re.search(r"^device_mem +auto$", said.out, re.MULTILINE)  # it depends on the model

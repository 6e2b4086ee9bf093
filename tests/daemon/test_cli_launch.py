"""launch: what is shown, and what is started."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from cli_rig import Cli

from tierd.daemon import keys
from tierd.daemon.errors import ModelNotFound

PROGRAM = '#!/bin/sh\nprintf "%s\\n" "$OPENAI_API_BASE" "$OPENAI_API_KEY" "$@"\n'


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    rig = Cli(tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("TIERD_LISTEN", "127.0.0.1:8421")
    return rig


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """What would have taken the place of this process."""
    calls: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(program: str, words: list[str], environment: dict[str, str]) -> None:
        calls.append((program, words, environment))
        raise SystemExit(0)

    monkeypatch.setattr("os.execve", execve)
    return calls


def front(cli: Cli, http: str = "http://127.0.0.1:9"):
    fake = cli.front()
    fake.answers["status"] = {"pid": 1, "state": "idle", "http": http}
    fake.answers["show"] = {"name": "smollm2-135m", "context": 2048}
    return fake


def test_without_a_daemon_the_settings_say_where_it_will_be(cli: Cli) -> None:
    said = cli("launch", "aider", "--model", "m", "--", "--yes", "a b")
    assert said.code == 0
    first, second = said.out.splitlines()[:2]
    assert first == "export OPENAI_API_BASE=http://127.0.0.1:8421/v1" and second == "export OPENAI_API_KEY=tierd"
    assert shlex.split(said.out.splitlines()[-1]) == ["aider", "--model", "openai/m", "--yes", "a b"]


@pytest.mark.parametrize(
    ("listen", "url"),
    [("0.0.0.0:5", "http://127.0.0.1:5"), ("[::1]:5", "http://[::1]:5"), ("localhost:5", "http://localhost:5")],
)
def test_an_address_to_ask_at(cli: Cli, listen: str, url: str) -> None:
    keys.add(cli.home / "config" / "tierd" / "keys.json", "a")
    assert shlex.split(cli("launch", "aider", "--listen", listen).out)[1] == f"OPENAI_API_BASE={url}/v1"


def test_a_running_daemon_says_where_it_listens_and_what_the_model_holds(cli: Cli) -> None:
    with front(cli):
        said = cli("launch", "claude", "--print")
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:9" in said.out and "smollm2-135m" in said.out
    assert "2048 tokens" in said.err and "name a model that has them with --model" in said.err


def test_a_model_that_is_not_there_is_told_in_place_of_a_setup(cli: Cli) -> None:
    with front(cli) as daemon:
        daemon.answers["show"] = ModelNotFound("model 'nope' isn't prepared")
        said = cli("launch", "claude", "--model", "nope", "--print")
    assert said.code == 1 and "isn't prepared" in said.err and not said.out


def test_run_takes_the_place_of_this_process(cli: Cli, started) -> None:
    (cli.home / "bin" / "aider").write_text(PROGRAM)
    (cli.home / "bin" / "aider").chmod(0o755)
    with front(cli), pytest.raises(SystemExit):
        cli("launch", "aider", "--run", "--", "--yes")
    ((program, words, environment),) = started
    assert program == str(cli.home / "bin" / "aider") and words == ["aider", "--model", "openai/smollm2-135m", "--yes"]
    assert environment["OPENAI_API_BASE"] == "http://127.0.0.1:9/v1" and environment["PATH"]


def test_run_needs_a_daemon_with_http(cli: Cli) -> None:
    said = cli("launch", "aider", "--run")
    assert said.code == 69 and said.hinted
    with front(cli, http=""):
        said = cli("launch", "aider", "--run")
    assert said.code == 1 and "HTTP" in said.err


def test_a_client_that_is_not_there_and_how_to_install_it(cli: Cli) -> None:
    with front(cli):
        said = cli("launch", "codex", "--run")
    assert said.code == 1 and "npm install -g @openai/codex" in said.err


def test_where_a_key_is_needed_it_must_be_given(cli: Cli, started) -> None:
    keys.add(cli.home / "config" / "tierd" / "keys.json", "a")
    assert "OPENAI_API_KEY=YOUR_KEY" in cli("launch", "aider").out
    (cli.home / "bin" / "aider").write_text(PROGRAM)
    (cli.home / "bin" / "aider").chmod(0o755)
    with front(cli):
        said = cli("launch", "aider", "--run")
        assert said.code == 2 and "tierd key add" in said.err
        with pytest.raises(SystemExit):
            cli("launch", "aider", "--run", "--key", "-", stdin=b"geheim\n")
    assert started[0][2]["OPENAI_API_KEY"] == "geheim"


def test_what_is_shown_holds_no_key(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERD_API_KEY", "geheim")
    for client in ("claude", "codex", "aider", "opencode"):
        said = cli("launch", client)
        assert said.code == 0 and "geheim" not in said.out and "YOUR_KEY" in said.out


def test_http_that_is_off(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERD_LISTEN", "")
    assert cli("launch", "aider").hinted

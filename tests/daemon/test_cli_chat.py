"""The conversation of `run`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_rig import Cli
from fake_front import FakeFront

from tierd.clients import Client
from tierd.daemon import cli_chat
from tierd.daemon.cli_chat import Conversation, converse, summary
from tierd.daemon.errors import BadRequest, Unsupported
from tierd.daemon.protocol import Event, Message, Submit

TEMPLATE = Submit(model="m", messages=(Message("system", "brief"),))
DONE = Event(1, "done", {"usage": {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 6},
                         "timings": {"decode_tokens_per_s": 54.12}})  # fmt: skip


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


def test_turns_grow() -> None:
    talk = Conversation(TEMPLATE)
    talk.answered("a", "b", DONE)
    assert talk.request("c").messages == (
        Message("system", "brief"), Message("user", "a"), Message("assistant", "b"), Message("user", "c"),
    )  # fmt: skip


def test_a_turn_without_an_answer_leaves_nothing() -> None:
    talk = Conversation(TEMPLATE)
    talk.answered("a", "", None)
    assert talk.turns == []


def test_commands() -> None:
    talk = Conversation(TEMPLATE)
    talk.answered("a", "b", DONE)
    assert "Ctrl-C" in str(talk.command("/help"))
    assert "54.1" in str(talk.command("/stats"))
    talk.command("/clear")
    assert talk.request("c").messages == (Message("system", "brief"), Message("user", "c"))
    talk.command("/system be long")
    assert talk.request("c").messages == (Message("system", "be long"), Message("user", "c"))
    talk.command("/system")
    assert talk.request("c").messages == (Message("user", "c"),)
    assert [talk.command(name) for name in ("/exit", "/quit", "/bye")] == [None] * 3


def test_set() -> None:
    talk = Conversation(TEMPLATE)
    assert str(talk.command("/set")).startswith("defaults: temperature, ")
    for words in ("temperature 0", "top_k 5", "ignore_eos true", "stop x y", "seed none"):
        talk.command(f"/set {words}")
    sampling = talk.request("c").sampling
    assert (sampling.temperature, sampling.top_k, sampling.ignore_eos) == (0, 5, True)
    assert (sampling.stop, sampling.seed) == (("x", "y"), None)
    assert "top_k 5" in str(talk.command("/set"))
    with pytest.raises(Unsupported):
        talk.command("/set temprature 1")
    with pytest.raises(BadRequest, match=r"^top_k: ") as caught:
        talk.command("/set top_k many")
    assert caught.value.hint == "/set lists the options"


def test_an_unknown_command_gets_a_suggestion() -> None:
    with pytest.raises(BadRequest) as caught:
        Conversation(TEMPLATE).command("/hlep")
    assert caught.value.hint == "did you mean 'help'?"
    talk = Conversation(TEMPLATE)
    assert talk.command("/stats") == "no answer yet"
    talk.answered("x", "half of an", None)
    assert "stopped" in str(talk.command("/stats"))


def test_summary() -> None:
    assert summary(DONE) == "3 tokens, 54.1 tokens/s, 6 of 9 prompt tokens cached"
    assert summary(Event(1, "aborted")) == "0 tokens, 0.0 tokens/s, 0 of 0 prompt tokens cached"


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """What the person types; an exception stands for a key."""
    typed: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read() -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(cli_chat, "_prompt", lambda: read)


def never() -> None:
    raise AssertionError("the daemon was there")


def test_a_conversation(cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines(monkeypatch, "echo one", "", KeyboardInterrupt, "/nope", "refuse", "echo two", "/stats")
    with cli.front() as front, Client(front.path) as client:
        converse(client, TEMPLATE, never)
    said = capsys.readouterr()
    assert "one" in said.out and "two" in said.out
    assert "5 of 7 prompt tokens cached" in said.out
    assert "error: no command /nope" in said.err and "error: 9000 tokens" in said.err
    said_before = [message.content for message in front.submits[-1].messages or ()]
    assert said_before == ["brief", "echo one", "one ", "echo two"]


def test_an_interrupt_stops_the_answer_and_keeps_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, count = sys.stdout.write, 0

    def interrupted(text: str) -> int:
        nonlocal count
        count += text == "tick "
        if count == 3:
            count += 1
            raise KeyboardInterrupt
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", interrupted)
    type_lines(monkeypatch, "slow", "echo on")
    with cli.front() as front, Client(front.path) as client:
        converse(client, TEMPLATE, never)
        assert front.wait_for_cancel() == [2], "the second request: the first one loaded the model"
    assert "(stopped)" in capsys.readouterr().out
    said_before = [message.content for message in front.submits[1].messages or ()]
    assert said_before == ["brief", "slow", "tick tick tick ", "echo on"]


def test_a_lost_daemon_does_not_end_the_conversation(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "drop", "echo back")
    with cli.front() as front, Client(front.path) as client:
        converse(client, TEMPLATE, never)
    said = capsys.readouterr()
    assert "ended without a word" in said.err and "ask again" in said.err and "back" in said.out
    assert len(said.err.splitlines()) == 6, "progress of loading, the greeting, one error with its hint"


def test_a_daemon_that_is_gone_is_started_again(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed between two questions: the next one is answered, in the same conversation."""
    fronts = [FakeFront(cli.socket), FakeFront(cli.socket)]

    def kill() -> str:
        fronts[0].__exit__(None, None, None)
        return "echo two"

    def restart() -> None:
        fronts[1].__enter__()
        print("started", file=sys.stderr)

    typed = iter([lambda: "echo one", kill, lambda: "/exit"])
    monkeypatch.setattr(cli_chat, "_prompt", lambda: lambda: next(typed)())
    fronts[0].__enter__()
    try:
        with Client(cli.socket) as client:
            converse(client, TEMPLATE, restart)
    finally:
        fronts[1].__exit__(None, None, None)
    said = capsys.readouterr()
    assert "two" in said.out and said.err.splitlines()[-1] == "started" and "error" not in said.err
    said_before = [message.content for message in fronts[1].submits[0].messages or ()]
    assert said_before == ["brief", "echo one", "one ", "echo two"]


def test_the_history_is_private(cli: Cli) -> None:
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        read = cli_chat._prompt()
        keys.send_text("first\x1b\rsecond\r")
        assert read() == "first\nsecond"
    history = cli.home / "state" / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "first" in history.read_text()

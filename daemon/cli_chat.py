"""The conversation of `tierd run` on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tierd.clients.blocking import Client
from tierd.daemon import paths
from tierd.daemon.cli_answer import Screen, generate, tell_cut
from tierd.daemon.cli_common import DIM, PLAIN, load_model, note, print_error
from tierd.daemon.cli_run import with_turns
from tierd.daemon.errors import BadRequest, DaemonUnreachable, TierdError, suggest
from tierd.daemon.protocol import Event, Message, Sampling, Submit, to_submit

HELP = """\
/help              this text
/clear             forget the conversation (the system message stays)
/system TEXT       set the system message; without TEXT remove it
/set NAME VALUE    set a sampling option: temperature, top_p, max_tokens, seed
/set               show all options
/stats             figures of the last answer, if it was not stopped
/exit              leave (also Ctrl-D)
Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer."""


class Conversation:
    """Turns so far and the options of the next one. Knows nothing of terminals."""

    def __init__(self, template: Submit) -> None:
        self.template = template
        self.turns: list[Message] = []
        self.last: Event | None = None

    def request(self, text: str) -> Submit:
        """The request for the next turn."""
        return with_turns(self.template, *self.turns, Message("user", text))

    def answered(self, text: str, answer: str, done: Event | None) -> None:
        """Keep a turn; of an answer that was stopped, what came of it."""
        self.last = done
        self.turns.append(Message("user", text))
        if answer:
            self.turns.append(Message("assistant", answer))
        else:
            self.turns.pop()

    def command(self, line: str) -> str | None:
        """Carry out `/name rest`; returns what to show, None to leave. Raises BadRequest."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        commands: dict[str, Callable[[str], str | None]] = {
            "help": lambda _: HELP,
            "clear": self._clear,
            "system": self._system,
            "set": self._set,
            "stats": self._stats,
            "exit": lambda _: None,
            "quit": lambda _: None,
            "bye": lambda _: None,
        }
        if name not in commands:
            raise BadRequest(f"no command /{name}", hint=suggest(name, list(commands)) or "/help lists them")
        return commands[name](rest)

    def _clear(self, rest: str) -> str:
        self.turns.clear()
        return "the conversation is forgotten"

    def _system(self, rest: str) -> str:
        messages = (Message("system", rest),) if rest else ()
        self.template = msgspec.structs.replace(self.template, messages=messages)
        return "the system message is set" if rest else "the system message is removed"

    def _set(self, rest: str) -> str:
        options = msgspec.to_builtins(self.template.sampling)
        if not rest:
            others = [name for name in Sampling.__struct_fields__ if name not in options]
            said = [*(f"{name} {value}" for name, value in options.items()), f"defaults: {', '.join(others)}"]
            return "\n".join(said)
        name, _, value = rest.partition(" ")
        if name == "stop":
            options["stop"] = tuple(value.split())
        else:
            options[name] = _number(value.strip())
        # The one place that knows names and types checks them, as for every other client.
        try:
            checked = to_submit({"model": self.template.model, "sampling": options})
        except TierdError as exc:
            raise type(exc)(exc.message.replace("sampling.", ""), hint=exc.hint or "/set lists the options") from None
        self.template = msgspec.structs.replace(self.template, sampling=checked.sampling)
        return f"{name} is {value.strip() or 'unset'}"

    def _stats(self, rest: str) -> str:
        if self.last is None:
            return "the last answer was stopped: it has no figures" if self.turns else "no answer yet"
        figures = {**self.last.data.get("usage", {}), **self.last.data.get("timings", {})}
        return "\n".join(f"{name:<22} {value:.1f}" if isinstance(value, float) else f"{name:<22} {value}"
                         for name, value in figures.items())  # fmt: skip


def _number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def summary(done: Event) -> str:
    """`42 tokens, 54.1 tokens/s, 120 of 130 prompt tokens cached`."""
    usage, timings = done.data.get("usage", {}), done.data.get("timings", {})
    speed = timings.get("decode_tokens_per_s") or 0.0
    return (
        f"{usage.get('completion_tokens', 0)} tokens, {speed:.1f} tokens/s, "
        f"{usage.get('cached_tokens', 0)} of {usage.get('prompt_tokens', 0)} prompt tokens cached"
    )


def answer(client: Client, conversation: Conversation, text: str) -> None:
    """Stream one answer to the terminal. Ctrl-C stops it and keeps what came.

    A daemon that goes away in the middle of it costs this answer, and is told. Raises DaemonUnreachable when nothing of
    the answer had come.
    """
    screen = Screen()
    pieces: list[str] = []
    done: Event | None = None
    submit = conversation.request(text)
    events = generate(client, submit)
    try:
        for event in events:
            if event.ev == "progress":
                screen.on_progress(event)
            elif event.ev == "text":
                pieces.append(str(event.data.get("text", "")))
                screen.text(pieces[-1])
            elif event.ev in ("done", "aborted"):
                done = event
    except KeyboardInterrupt:
        print(f"{DIM} (stopped){PLAIN}", end="")
    except DaemonUnreachable as exc:
        screen.end_line()
        if not pieces:
            raise
        hint = "the answer is lost; ask again: the conversation goes on"
        print_error(DaemonUnreachable(exc.message, hint=hint))
        return
    except TierdError:
        screen.end_line()
        raise
    finally:
        events.close()  # a stopped one is cancelled in the daemon here
        screen.finish()
    print()
    conversation.answered(text, "".join(pieces), done)
    if done is not None:
        screen.end()
        print(f"{DIM}{summary(done)}{PLAIN}")
        tell_cut(done, submit, "/set max_tokens")


def converse(client: Client, template: Submit, restart: Callable[[], None]) -> None:
    """Read, send, show, until Ctrl-D or /exit. `restart` sees to it that a daemon runs, and says so when it starts one.

    The conversation lives here: a daemon that is gone costs the answer that it was writing, and nothing else.
    """
    conversation = Conversation(template)
    read = _prompt()
    # Loaded before the first question, so that its answer does not wait for what could have been done meanwhile.
    load_model(client, template.model)
    note(f"{template.model}; /help lists the commands, Ctrl-D leaves")
    while True:
        try:
            line = read().strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if not line:
            continue
        try:
            if line.startswith("/"):
                said = conversation.command(line)
                if said is None:
                    return
                print(said)
            else:
                _answer_somehow(client, conversation, line, restart)
        except TierdError as exc:
            print_error(exc)


def _answer_somehow(client: Client, conversation: Conversation, text: str, restart: Callable[[], None]) -> None:
    """`answer`, from another daemon where none is there any more."""
    try:
        answer(client, conversation, text)
    except DaemonUnreachable:
        client.close()
        restart()
        answer(client, conversation, text)


def _prompt() -> Callable[[], str]:
    """A line editor with history in the state directory (0600: it holds what was typed)."""
    import os

    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    history = paths.make_private_dir(paths.state_dir()) / "history"
    os.close(os.open(history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[Any] = PromptSession(
        history=FileHistory(str(history)), multiline=True, key_bindings=keys, reserve_space_for_menu=0
    )
    return lambda: str(session.prompt(">>> ", prompt_continuation="... "))

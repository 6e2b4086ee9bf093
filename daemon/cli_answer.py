"""An answer on its way to the person: its text, what interrupts it, how it ends. For `run` and its conversation."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from tierd.clients.blocking import Client
from tierd.daemon.cli_common import DIM, PLAIN, Progress, dim_note, note
from tierd.daemon.errors import BadRequest
from tierd.daemon.protocol import PROMPT, Event, Submit
from tierd.daemon.units import counted

ANSWER_TOKENS = 1024  # without --max-tokens: small models may ramble up to the end of the context


def generate(client: Client, submit: Submit) -> Generator[Event, None, None]:
    """`client.generate`, with the limit `ANSWER_TOKENS` for a request that has none."""
    if submit.sampling.max_tokens is not None:
        yield from client.generate(submit)
        return
    sampling = msgspec.structs.replace(submit.sampling, max_tokens=ANSWER_TOKENS)
    try:
        yield from client.generate(msgspec.structs.replace(submit, sampling=sampling))
    except BadRequest as exc:
        if exc.param != "max_tokens":
            raise
        # The whole context is smaller than our limit, and bounds the answer by itself. Only the daemon knows it.
        yield from client.generate(submit)


class Screen:
    """Text on the standard output as it comes; progress and remarks on the standard error, on lines of their own."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._begun = False
        self._open_line = False  # the text ends inside a line
        self._restart_told = False
        self._prompt_shown = False  # a line that the answer takes the place of

    def on_progress(self, event: Event) -> None:
        """A bar before the first text. After it progress means one thing: another engine takes the answer over."""
        if event.data.get("stage") == PROMPT:
            self._on_prompt(event.data)
        elif not self._begun:
            self._progress.on_event(event)
        elif not self._restart_told:
            self._restart_told = True
            if self._open_line:
                note("")
                self._open_line = False
            dim_note("(the engine was restarted; going on)")

    def _on_prompt(self, data: Mapping[str, Any]) -> None:
        """How much of the prompt is computed: for a person who waits, and gone when the answer begins."""
        done, total = data.get("done"), data.get("total")
        if not sys.stderr.isatty() or not isinstance(done, int) or not isinstance(total, int):
            return
        self._progress.finish()
        self._prompt_shown = True
        note(f"\r\x1b[K{DIM}prompt {done:,} of {counted(total, 'token')}{PLAIN}", end="")

    def _erase_prompt(self) -> None:
        if self._prompt_shown:
            self._prompt_shown = False
            note("\r\x1b[K", end="")

    def text(self, text: str) -> None:
        """The next piece of the answer."""
        self.finish()
        if not text:
            return
        self._begun, self._restart_told = True, False
        sys.stdout.write(text)
        sys.stdout.flush()
        self._open_line = not text.endswith("\n")

    def finish(self) -> None:
        """End a bar, and take the line about the prompt away."""
        self._progress.finish()
        self._erase_prompt()

    def end(self) -> None:
        """The answer is whole. Without a word in it a remark tells so."""
        self.finish()
        if not self._begun:
            dim_note("(the model said nothing)")

    def end_line(self) -> None:
        """End the line of an answer that breaks off, so that an error begins on a new one."""
        self.finish()
        if self._open_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._open_line = False


def tell_cut(done: Event, submit: Submit, option: str) -> None:
    """Say that the answer was cut, and what allows more of it: `option`, or nothing when the context is full."""
    if done.data.get("finish") != "length":
        return
    count = done.data.get("usage", {}).get("completion_tokens", 0)
    if count < (submit.sampling.max_tokens or ANSWER_TOKENS):
        dim_note(f"(cut at {counted(count, 'token')}; the context is full)")
    elif submit.sampling.max_tokens is None:  # whoever named a number knows it
        dim_note(f"(cut at {counted(count, 'token')}; {option} allows more)")

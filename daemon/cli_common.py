"""What the verbs of the command line share: settings flags, the connection, tables, progress.

Imported by every verb, `tierd ps` has to end within 0.3 s: nothing heavy at the top.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from tierd.clients.blocking import Client
from tierd.daemon import config
from tierd.daemon.config_values import boolean
from tierd.daemon.errors import BadRequest, DaemonUnreachable, TierdError
from tierd.daemon.protocol import Event
from tierd.daemon.units import human_bytes, human_seconds

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
BIND_S = 1.0  # a daemon that starts has its lock for a moment before it has its socket
UTF8_HINT = "the shell passes bytes on as they are; is the terminal set to UTF-8?"
LOAD_SILENCE_S = 900.0  # between two signs of progress of a model that comes up

Verb = Callable[..., None]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def settings_options(*names: str, without: Sequence[str] = ()) -> Callable[[Verb], Verb]:
    """Give a verb the flags of these settings (none named: of all) and pass them to it as one map `flags`.

    The flags, their texts and their parsers come from `config.Settings`: a new setting is a flag everywhere at once.
    """
    docs = [doc for doc in config.setting_docs() if (not names or doc.name in names) and doc.name not in without]

    def decorate(verb: Verb) -> Verb:
        @functools.wraps(verb)
        def with_flags(**values: Any) -> None:
            flags = {doc.name: values.pop(doc.name) for doc in docs}
            verb(**values, flags=flags)

        decorated: Verb = with_flags
        for doc in reversed(docs):
            spelling = f"{doc.flag}/--no{doc.flag[1:]}" if doc.parse is boolean else doc.flag
            sentence = f"{doc.doc[0].upper()}{doc.doc[1:]}."
            decorated = click.option(spelling, doc.name, default=None, help=sentence)(decorated)
        return decorated

    return decorate


def load_settings(flags: Mapping[str, object]) -> config.Settings:
    """The settings of this call: flags, environment, config file, defaults. Raises BadConfig."""
    return config.load(flags).settings


def settings_anyway(flags: Mapping[str, object]) -> config.Settings:
    """The same for verbs that need little more than the socket: a fault in file or variables is a warning, told here.

    Raises BadConfig for a flag.
    """
    loaded, faults = config.load_anyway(flags)
    for fault in faults:
        note(f"warning: {shown(fault.message)}; ignored here, `tierd start` would refuse it")
    return loaded.settings


def connect(settings: config.Settings) -> Client:
    """A connected client. Raises DaemonUnreachable (exit code 69) with the next step."""
    deadline_s = time.monotonic() + BIND_S
    while True:
        try:
            return Client(settings.socket).connect()
        except DaemonUnreachable:
            pid = lock_holder(settings.socket)
            if pid is None:
                raise
            if time.monotonic() >= deadline_s:
                lost = f"does not answer at {settings.socket}" if settings.socket.exists() else "its socket is gone"
                message = f"a daemon (pid {pid}) runs, but {lost}"
                raise DaemonUnreachable(message, hint=f"`kill {pid}` ends it") from None
        time.sleep(0.02)


def lock_holder(socket: Path) -> int | None:
    """The process that holds the lock of a socket (see `door.Door`), None when nobody does.

    The lock itself is not tried: a daemon that starts at this moment would find it taken. Whoever has the file open
    holds the lock, `Door` closes it otherwise.
    """
    lock = socket.with_name(socket.name + ".lock")
    try:
        pid = int(lock.read_text("ascii"))
        held = lock.stat()
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.path.samestat(file.stat(), held):
                    return pid
            except OSError:
                continue  # closed since it was listed
    except (OSError, ValueError):
        pass  # no lock, no process, or one of another user
    return None


def connect_if_running(settings: config.Settings) -> Client | None:
    """A connected client, or None when no daemon runs."""
    try:
        return connect(settings)
    except DaemonUnreachable:
        if lock_holder(settings.socket) is not None:
            raise
        return None


def print_json(value: object) -> None:
    """One JSON document on the standard output."""
    print(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; what comes from outside cannot move the cursor."""
    table = [list(head)] + [[shown(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def shown(text: str) -> str:
    """Text from outside on one line, without control characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def not_text(words: Iterable[str]) -> str | None:
    """The first word that came as bytes which are not UTF-8 (Python keeps them as lone surrogates), or None."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            return word
    return None


def note(text: str, *, end: str = "\n") -> None:
    """A line for the person on the standard error, apart from what a program may read."""
    with contextlib.suppress(OSError):  # where even this cannot be written nobody is there to be told
        print(text, end=end, file=sys.stderr, flush=True)


def dim_note(text: str) -> None:
    """A remark beside an answer: a note that stands back on a terminal."""
    note(f"{DIM}{text}{PLAIN}" if sys.stderr.isatty() else text)


def print_error(exc: TierdError) -> None:
    """`error: ...`, and `hint: ...` when there is a next step."""
    note(f"error: {shown(exc.message)}")
    if exc.hint:
        note(f"hint: {shown(exc.hint)}")


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is lost. Without a terminal nobody can answer: that is a usage error that names --yes."""
    if yes:
        return
    if not can_ask():
        raise BadRequest(f"{question} Nobody can be asked here.", hint="add --yes")
    ask(question)


def can_ask() -> bool:
    """Whether a person is there to answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> None:
    """Return when the answer is yes; end the command otherwise."""
    note(f"{question} [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        leave(1)


def leave(exit_code: int) -> NoReturn:
    """End the command with this code."""
    raise click.exceptions.Exit(exit_code)


def written_today(writes: object) -> str:
    """`1.2 GB of 200 GB`: what a day's writes to the disk tier are, and may be; `-` when nothing is known."""
    if not isinstance(writes, dict) or "today_bytes" not in writes:
        return "-"
    bound = writes.get("daily_bytes")
    return human_bytes(writes["today_bytes"]) + (f" of {human_bytes(bound)}" if bound else "")


def weights_shown(weights: object) -> str:
    """`2.0 GB in memory, 5.1 GB on disk, read at 1.8 GB/s, 96% of its best`; `-` when nothing is known.

    With a card `2.0 GB on the card, 9.6 GB in CPU memory, 4.0 GB of experts at a time, 88% of what comes and
    goes was there when it was needed`."""
    if not isinstance(weights, dict) or "device_bytes" not in weights:
        return "-"
    text = f"{human_bytes(weights['device_bytes'])} in memory"
    if weights.get("host_bytes"):
        text = f"{human_bytes(weights['device_bytes'])} on the card, {human_bytes(weights['host_bytes'])} in CPU memory"
    if weights.get("nvme_bytes"):
        text += f", {human_bytes(weights['nvme_bytes'])} on disk"
        if weights.get("bytes_per_s"):
            share = f"{100 * weights['peak_share']:.0f}% of its best"
            text += f", read at {human_bytes(weights['bytes_per_s'])}/s, {share}"
    if weights.get("experts_bytes") and weights.get("uses"):
        there = f"{100 * weights['hits'] / weights['uses']:.0f}% of what comes and goes was there when it was needed"
        text += f", {human_bytes(weights['experts_bytes'])} of experts at a time, {there}"
        if weights.get("computed"):
            text += f", {weights['computed']:,} were computed by the processors"
    return text


def draft_shown(draft: object) -> str:
    """`smollm2-135m, 138 MB on the card, 64 of 80 guessed tokens were right`; `-` when nothing is known."""
    if not isinstance(draft, dict) or "model" not in draft:
        return "-"
    text = shown(f"{draft['model']}, {human_bytes(draft.get('memory_bytes'))} on the {draft.get('on', 'processors')}")
    if draft.get("off"):
        return f"{text}, off: {shown(str(draft['off']))}"
    if not draft.get("drafted_tokens"):
        return f"{text}, has not guessed yet"
    return f"{text}, {draft.get('right_drafts', 0):,} of {draft['drafted_tokens']:,} guessed tokens were right"


def card_shown(told: object) -> str:
    """`1.5 GB of pages gave way: others hold 18.2 GB, 2.1 GB are free`; empty where nobody watches a card."""
    if not isinstance(told, dict) or not told:
        return ""
    if told.get("state") == "off":
        return f"not watched any more: {shown(str(told.get('reason')))}"
    if told.get("state") == "unknown":
        return "watched, but it was not told just now who holds what of it"
    if "free_bytes" not in told:
        return "watched, when an engine computes on it"
    given = told.get("yielded_bytes")
    gave = f"{human_bytes(given)} of pages gave way" if given else "no page had to give way"
    return f"{gave}: others hold {human_bytes(told.get('others_bytes'))}, {human_bytes(told['free_bytes'])} are free"


def exclusive_shown(told: object) -> str:
    """`a batch is alone with alpha, 64 at once: 12 of 100 requests, 5m left`; empty when none is."""
    if not isinstance(told, dict):
        return ""
    streams, left = told.get("streams"), told.get("left_s")
    width = f", {streams} at once" if streams else ""
    where = str(told.get("stage")) if told.get("stage") != "running" else ""
    where = where or f"{told.get('done')} of {told.get('total')} requests, {human_seconds(left)} left"
    return f"a batch is alone with {told.get('model')}{width}: {where}"


class Progress:
    """Progress of a long job on the standard error: one moving line on a terminal, else a line per 10%."""

    BAR_CELLS = 24

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._stage: tuple[str, int] = ("", 0)  # and its total: that of kernels grows when more of them are found
        self._tenth = -1
        self._open_line = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Stage by name, done of total; a total of 0 means that it is not known."""
        share = min(1.0, done / total) if total > 0 else 0.0
        tenth = int(share * 10)
        if stage != self._stage[0]:
            self.finish()
        if (stage, total) != self._stage:
            self._stage, self._tenth = (stage, total), -1
        if self._terminal:
            cells = int(share * self.BAR_CELLS)
            bar = "█" * cells + "·" * (self.BAR_CELLS - cells)
            sys.stderr.write(f"\r\x1b[K{shown(stage)}  {bar}  {_amount(done, total)}")
            sys.stderr.flush()
            self._open_line = True
        elif tenth > self._tenth:
            note(f"{shown(stage)} {100 * share:.0f}% {_amount(done, total)}" if total > 0 else f"{shown(stage)} ...")
        self._tenth = max(tenth, self._tenth)

    def on_event(self, event: Event) -> None:
        """The same for a progress event of the daemon."""
        stage = str(event.data.get("stage") or event.data.get("text") or "working")
        stage = "kernels (compiled once, then kept)" if stage == "kernels" else stage
        self(stage, _whole(event.data.get("done")), _whole(event.data.get("total")))

    def finish(self) -> None:
        """End the moving line."""
        if self._open_line:
            sys.stderr.write("\n")
            self._open_line = False


def load_model(client: Client, model: str) -> dict[str, Any]:
    """Have the daemon load a model, with its progress on the standard error; what its engine said when it was ready."""
    progress = Progress()
    try:
        return client.call("load", model=model, on_progress=progress.on_event, wait_s=LOAD_SILENCE_S)
    finally:
        progress.finish()


def _whole(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _amount(done: int, total: int) -> str:
    if total >= 1_000_000:  # no count of tensors or kernels gets that large: these are bytes
        return f"{human_bytes(done)} of {human_bytes(total)}"
    return f"{done} of {total}" if total > 0 else ""


def given_flags(flags: Mapping[str, object]) -> list[str]:
    """The flags of a `settings_options` map that were given, as a command line.

    Without secrets: every user of the machine can read the command line of a process.
    """
    arguments: list[str] = []
    for doc in config.setting_docs():
        value = flags.get(doc.name)
        if value is None or doc.secret:
            continue
        if isinstance(value, bool):
            arguments.append(doc.flag if value else f"--no{doc.flag[1:]}")
        else:
            arguments.append(f"{doc.flag}={value}")
    return arguments


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get("TIERD_DEBUG", "") not in ("", "0")

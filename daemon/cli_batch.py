"""The verb batch: a file of requests through the running daemon, behind everything else that it has to do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from tierd.clients.aio import AsyncClient
from tierd.clients.blocking import Client
from tierd.clients.common import parts_of
from tierd.daemon.batch import Item, Output, Requests
from tierd.daemon.batch_run import Asking
from tierd.daemon.cli_common import (
    json_option,
    leave,
    load_settings,
    note,
    print_json,
    settings_options,
    shown,
)
from tierd.daemon.cli_run import connect_or_start, ensure_model
from tierd.daemon.embedding import Input, Vectors
from tierd.daemon.errors import Aborted, BadRequest, ModelNotFound, TierdError
from tierd.daemon.limits import MAX_PRIORITY
from tierd.daemon.models import catalog
from tierd.daemon.protocol import Event
from tierd.daemon.units import counted, human_seconds

MAX_CONCURRENCY = 256  # as many requests as a connection carries
SILENCE_S = 7200.0  # between two events: whoever asks within the next 100 minutes goes before us
REDRAW_S = 0.2
TELL_S = 2.0  # the daemon hears how far a batch is that has the machine


@click.command()
@click.argument("source", metavar="IN.jsonl", type=click.Path(path_type=Path))
@click.option("--output", "-o", "target", metavar="OUT.jsonl", required=True, type=click.Path(path_type=Path),
              help="File for the answers. One that is there is continued.")  # fmt: skip
@click.option("--model", help="Model for all requests, instead of those that they name.")
@click.option("--concurrency", type=click.IntRange(1, MAX_CONCURRENCY),
              help="Requests at once; if not given as many as the daemon writes answers at once (--max-streams). "
              "They give their places to whoever else asks.")  # fmt: skip
@click.option("--exclusive", is_flag=True,
              help="Have the machine alone meanwhile: as many answers at once as give the most tokens a second. "
              "Others are told to come back.")  # fmt: skip
@json_option
@settings_options()
def batch(
    flags: dict[str, Any], source: Path, target: Path, model: str | None, concurrency: int | None, exclusive: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Answer every request of a file in OpenAI's batch format, after whoever asks in the meantime.

    \b
    A line of IN.jsonl: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    (or /v1/completions, /v1/embeddings); a line of OUT.jsonl has its custom_id, response and error.

    Answers come in the order in which they are finished. Each is on the disk before the next step: after Ctrl-C, a
    crash or a power cut the same command goes on, and computes nothing again that has its line. A request that fails
    has a line with the error; delete it to have it tried again. Exit code 1 when a request has no line at the end.

    With --exclusive running answers end first, every model is unloaded, and the one of the batch is loaded for it:
    where weights are read from the disk in every step, one reading serves all answers. The machine is given back at the
    end, and when this command ends for whatever reason.
    """
    if "-" in (str(source), str(target)):
        raise BadRequest("a batch is a file, so that it can be continued; `-` is none", hint="name a file")
    settings = load_settings(flags)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(Output(target))
        requests = stack.enter_context(Requests(source, output.finished, model))
        output.finished.clear()  # a million entries are 200 MB
        _check(source, requests)
        tally = Tally(requests.total, requests.total - len(requests), time.monotonic())
        if len(requests):
            if model is not None:
                ensure_model(settings, model)
            with connect_or_start(settings, flags) as client:
                _check_models(client, requests)
            # A crowd of readers is of no use: no more than there are requests.
            width = min(concurrency or settings.max_streams, MAX_CONCURRENCY, len(requests))
            wish = _wish(requests, model, concurrency) if exclusive else None
            tally = Tally(requests.total, requests.total - len(requests), time.monotonic())
            _run(settings.socket, Batch(requests, output, tally, model), width, wish)
    _tell(tally, target, as_json=as_json)
    if tally.done < tally.total:
        leave(1)


def _check(source: Path, requests: Requests) -> None:
    """Raises BadRequest for a file with lines that cannot be used, after each was told."""
    for problem in requests.problems:
        note(f"line {problem.number}: {shown(problem.what)}")
    if (count := requests.problem_count) > len(requests.problems):
        note(f"... and {counted(count - len(requests.problems), 'line')} more")
    if count:
        what = f"{count} lines of {source} cannot be used" if count > 1 else f"a line of {source} cannot be used"
        raise BadRequest(f"{what}; nothing was run", hint="mend what is named above and run the command again")
    if not requests.total:
        raise BadRequest(f"{source} holds no request", hint="a line is one, see `tierd batch --help`")


def _check_models(client: Client, requests: Requests) -> None:
    """Raises ModelNotFound for a model that is named and not there, before anything runs."""
    for name, number in requests.models.items():
        try:
            client.call("show", model=name)
        except (ModelNotFound, BadRequest):
            raise ModelNotFound(
                f"line {number}: there is no model {name[:64]!r} here; nothing was run",
                hint="`--model` names one for all requests, `tierd list` shows what there is",
                param="model",
            ) from None


def _wish(requests: Requests, model: str | None, streams: int | None) -> dict[str, Any]:
    """What is told to the daemon of a batch that wants the machine. Raises BadRequest for several models."""
    from tierd.daemon.batch_extent import extent_of  # the planner: only such a batch needs it

    names = [model] if model is not None else sorted({catalog.parse_ref(name) for name in requests.models})
    if len(names) > 1:
        raise BadRequest(
            f"the requests name {len(names)} models, the machine is given to one",
            hint="`--model` names one for all, or split the file", param="model",
        )  # fmt: skip
    return {"model": names[0] if names else "", "streams": streams, **extent_of(requests)._asdict()}


class Tally:
    """How far a batch is. Times are seconds of one clock, given by the caller."""

    def __init__(self, total: int, resumed: int, started_s: float) -> None:
        self.total = total
        self.resumed = resumed  # were finished before this run
        self.answered = 0
        self.failed = 0  # have an error instead of an answer
        self.stopped = 0  # somebody ended them; they have no line
        self.tokens = 0  # generated in this run
        self._started_s = started_s

    def restart(self, now_s: float) -> None:
        """Nothing ran before now: the machine had to be made free."""
        self._started_s = now_s

    @property
    def done(self) -> int:
        """Requests that have a line, those of earlier runs too."""
        return self.resumed + self.answered + self.failed

    def elapsed_s(self, now_s: float) -> float:
        """Since the start of this run."""
        return max(now_s - self._started_s, 1e-9)

    def tokens_per_s(self, now_s: float) -> float:
        """Generated in this run, all requests together."""
        return self.tokens / self.elapsed_s(now_s)

    def left_s(self, now_s: float) -> float | None:
        """Until the end, if the rest goes as what was done in this run; None before the first."""
        ended = self.answered + self.failed + self.stopped
        if not ended:
            return None
        return (self.total - self.resumed - ended) * self.elapsed_s(now_s) / ended

    def line(self, now_s: float) -> str:
        """`12 of 100 requests, 3 with an error, 45.2 tok/s, 5m left`."""
        failed = f", {self.failed} with an error" if self.failed else ""
        rate = f"{self.tokens_per_s(now_s):.1f} tok/s"
        left = human_seconds(self.left_s(now_s))
        return f"{self.done} of {counted(self.total, 'request')}{failed}, {rate}, {left} left"


class Batch:
    """Requests on their way to lines. Threading: one event loop."""

    def __init__(self, requests: Requests, output: Output, tally: Tally, model: str | None) -> None:
        self._items: Iterator[Item] = iter(requests)
        self._output = output
        self._tally = tally
        self._model = model
        self._screen = Screen(tally)

    async def run(self, socket: Path, width: int, wish: dict[str, Any] | None = None) -> None:
        """Until every request had its turn. Raises what ends a batch: the daemon or the disk is gone.

        `wish`: have the machine for the batch alone, which says how many requests there are at once then.
        """
        try:
            async with AsyncClient(socket) as client, asyncio.TaskGroup() as group:
                await client.call("hello")  # a daemon that is full says so here, and not to a request
                if wish is not None:
                    width = await self._reserve(client, wish)
                asking = Asking(
                    functools.partial(client.generate, wait_s=SILENCE_S), functools.partial(_embed, client),
                    model=self._model, on_tokens=self._count,
                )  # fmt: skip
                works = [group.create_task(self._work(asking)) for _ in range(width)]
                if wish is not None:
                    await self._tell_until(client, works)
                    await client.call("release")
        except ExceptionGroup as group_of:
            raise group_of.exceptions[0] from None  # they fail together: a lost connection is told to each
        finally:
            self._screen.finish()

    async def _reserve(self, client: AsyncClient, wish: dict[str, Any]) -> int:
        """Get the machine. Returns how many requests to have under way: some wait for the place of one that ends."""
        said = ""

        def say(event: Event) -> None:
            nonlocal said
            if (text := str(event.data.get("text", ""))) != said:
                said = text
                note(text)

        told = await client.call("reserve", on_progress=say, wait_s=SILENCE_S, **wish)
        for line in told["why"]:
            note(line)
        if unloaded := told.get("unloaded"):
            note(f"unloaded for it: {', '.join(map(str, unloaded))}; loaded again when it has ended")
        note(f"planned: {told['planned_tokens_per_s']:g} tokens/s")
        self._tally.restart(time.monotonic())
        streams = int(told["streams"])
        return min(streams + max(streams // 4, 1), MAX_CONCURRENCY - 2, self._tally.total - self._tally.resumed)

    async def _tell_until(self, client: AsyncClient, works: list[asyncio.Task[None]]) -> None:
        """Tell the daemon how far the batch is, for `ps` and for those who are turned away, until all have ended."""
        left = set(works)
        while left:
            _, left = await asyncio.wait(left, timeout=TELL_S)
            tally = self._tally
            await client.call("reserved", done=tally.done, left_s=tally.left_s(time.monotonic()))

    async def _work(self, asking: Asking) -> None:
        for item in self._items:  # shared: each takes the next one
            try:
                answer = await asking.answer(item)
            except Aborted:
                self._tally.stopped += 1
                continue
            # Blocks the loop, a few milliseconds for each answer: the events of others wait in the socket.
            self._output.append(answer)
            if answer.error is None:
                self._tally.answered += 1
            else:
                self._tally.failed += 1
            self._screen.draw()

    def _count(self, tokens: int) -> None:
        self._tally.tokens += tokens
        self._screen.draw()


async def _embed(client: AsyncClient, model: str, inputs: Sequence[Input]) -> Vectors:
    found = Vectors([], 0, 0)
    for part in parts_of(inputs):
        told = await client.call("embed", model=model, inputs=part, priority=MAX_PRIORITY, wait_s=SILENCE_S)
        usage, more = told["usage"], [array("f", one) for one in told["vectors"]]
        found = Vectors(
            found.vectors + more, found.prompt_tokens + usage["prompt_tokens"],
            found.cached_tokens + usage["cached_tokens"],
        )  # fmt: skip
    return found


class Screen:
    """The state of a batch on the standard error: one moving line on a terminal, else a line per 10%."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._terminal = sys.stderr.isatty()
        self._drawn_s = float("-inf")
        self._tenth = 10 * tally.done // tally.total

    def draw(self) -> None:
        """Show how far it is, if it is time to."""
        now_s = time.monotonic()
        tenth = 10 * self._tally.done // self._tally.total
        if self._terminal and now_s - self._drawn_s >= REDRAW_S:
            self._drawn_s = now_s
            sys.stderr.write(f"\r\x1b[K{self._tally.line(now_s)}")
            sys.stderr.flush()
        elif not self._terminal and tenth > self._tenth:
            note(self._tally.line(now_s))
        self._tenth = tenth

    def finish(self) -> None:
        """End the moving line."""
        if self._terminal and self._drawn_s > 0:
            note(f"\r\x1b[K{self._tally.line(time.monotonic())}")


def _run(socket: Path, work: Batch, width: int, wish: dict[str, Any] | None) -> None:
    try:
        asyncio.run(work.run(socket, width, wish))
    except (KeyboardInterrupt, TierdError):
        note("what is finished is kept; the same command goes on")
        raise


def _tell(tally: Tally, target: Path, *, as_json: bool) -> None:
    now_s = time.monotonic()
    seconds = round(tally.elapsed_s(now_s), 3)
    if as_json:
        rate = round(tally.tokens_per_s(now_s), 2)
        print_json({
            "output": str(target), "total": tally.total, "resumed": tally.resumed, "answered": tally.answered,
            "failed": tally.failed, "stopped": tally.stopped, "tokens": tally.tokens, "seconds": seconds,
            "tokens_per_s": rate,
        })  # fmt: skip
        return
    parts = [f"{tally.answered} answered"]
    parts += [f"{tally.failed} with an error"] if tally.failed else []
    parts += [f"{tally.resumed} there already"] if tally.resumed else []
    parts += [f"{tally.stopped} stopped: the same command tries them again"] if tally.stopped else []
    made = f"{counted(tally.tokens, 'token')} in {human_seconds(seconds)}"
    print(f"{target}: {counted(tally.total, 'request')}, {', '.join(parts)}; {made}")

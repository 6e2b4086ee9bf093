"""The verb batch: a file of requests through the running daemon, behind everything else that it has to do."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from tierd.clients.aio import AsyncClient
from tierd.clients.blocking import Client
from tierd.clients.common import frame_of
from tierd.daemon.api import body_limits, openai
from tierd.daemon.api.openai_answers import Shape, Whole
from tierd.daemon.batch import CHAT_URL, ID_PREFIX, Answer, Fault, Item, Output, Requests, Response
from tierd.daemon.cli_common import (
    human_seconds,
    json_option,
    leave,
    load_settings,
    note,
    print_json,
    settings_options,
    shown,
)
from tierd.daemon.cli_run import connect_or_start, ensure_model
from tierd.daemon.errors import (
    Aborted,
    BadRequest,
    DaemonUnreachable,
    Draining,
    EngineFailed,
    ModelNotFound,
    ProtocolError,
    TierdError,
    TryLater,
)
from tierd.daemon.limits import MAX_PRIORITY
from tierd.daemon.protocol import Event, Submit, generate_request

MAX_CONCURRENCY = 256  # as many requests as a connection carries
SILENCE_S = 7200.0  # between two events: whoever asks within the next 100 minutes goes before us
BUSY_S = 3600.0  # the daemon may have its queue full for that long
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0  # before a request is sent again
ENGINE_TRIES = 3  # an engine that dies takes every request with it, whoever's fault it was
REDRAW_S = 0.2


@click.command()
@click.argument("source", metavar="IN.jsonl", type=click.Path(path_type=Path))
@click.option("--output", "-o", "target", metavar="OUT.jsonl", required=True, type=click.Path(path_type=Path),
              help="File for the answers. One that is there is continued.")  # fmt: skip
@click.option("--model", help="Model for all requests, instead of those that they name.")
@click.option("--concurrency", type=click.IntRange(1, MAX_CONCURRENCY),
              help="Requests at once; if not given as many as the daemon writes answers at once (--max-streams). "
              "Fewer leave places for others.")  # fmt: skip
@json_option
@settings_options()
def batch(
    flags: dict[str, Any], source: Path, target: Path, model: str | None, concurrency: int | None, as_json: bool
) -> None:
    """Answer every request of a file in OpenAI's batch format, after whoever asks in the meantime.

    \b
    A line of IN.jsonl: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    (or /v1/completions); a line of OUT.jsonl has its custom_id, response and error.

    Answers come in the order in which they are finished. Each is on the disk before the next step: after Ctrl-C, a
    crash or a power cut the same command goes on, and computes nothing again that has its line. A request that fails
    has a line with the error; delete it to have it tried again. Exit code 1 when a request has no line at the end.
    """
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
            tally = Tally(requests.total, requests.total - len(requests), time.monotonic())
            _run(settings.socket, Batch(requests, output, tally, model), width)
    _tell(tally, target, as_json=as_json)
    if tally.done < tally.total:
        leave(1)


def _check(source: Path, requests: Requests) -> None:
    """Raises BadRequest for a file with lines that cannot be used, after each was told."""
    for problem in requests.problems:
        note(f"line {problem.number}: {shown(problem.what)}")
    if (count := requests.problem_count) > len(requests.problems):
        note(f"... and {count - len(requests.problems)} lines more")
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
        return f"{self.done} of {self.total} requests{failed}, {rate}, {human_seconds(self.left_s(now_s))} left"


class Batch:
    """Requests on their way to lines. Threading: one event loop."""

    def __init__(self, requests: Requests, output: Output, tally: Tally, model: str | None) -> None:
        self._items: Iterator[Item] = iter(requests)
        self._output = output
        self._tally = tally
        self._model = model
        self._screen = Screen(tally)

    async def run(self, socket: Path, width: int) -> None:
        """Until every request had its turn. Raises what ends a batch: the daemon or the disk is gone."""
        try:
            async with AsyncClient(socket) as client, asyncio.TaskGroup() as group:
                await client.call("hello")  # a daemon that is full says so here, and not to a request
                for _ in range(width):
                    group.create_task(self._work(client))
        except ExceptionGroup as group_of:
            raise group_of.exceptions[0] from None  # they fail together: a lost connection is told to each
        finally:
            self._screen.finish()

    async def _work(self, client: AsyncClient) -> None:
        for item in self._items:  # shared: each takes the next one
            try:
                answer = await self._answer(client, item)
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

    async def _answer(self, client: AsyncClient, item: Item) -> Answer:
        """The line of a request. Raises Aborted when somebody ended it, and what ends the batch."""
        try:
            call = _parsed(item, self._model)
            for submit in call.submits:
                frame_of(generate_request(0, submit))  # what no frame can hold is the fault of this request alone
        except TierdError as exc:
            return _failed(item, exc)
        pause_s, engine_deaths, deadline_s = FIRST_PAUSE_S, 0, time.monotonic() + BUSY_S
        while True:
            try:
                body = await self._generate(client, item, call)
            except (DaemonUnreachable, Draining, ProtocolError, Aborted):
                raise
            except TryLater:
                if time.monotonic() > deadline_s:
                    raise
            except EngineFailed as exc:
                engine_deaths += 1
                if engine_deaths == ENGINE_TRIES:
                    return _failed(item, exc)
            except TierdError as exc:
                return _failed(item, exc)
            else:
                return Answer(item.id, item.custom_id, Response(200, _request_id(item), body))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _generate(self, client: AsyncClient, item: Item, call: openai.Call) -> Any:
        """The body of an answer. Several prompts run one after the other, and so are their choices counted."""
        first = call.submits[0]
        answer_id = f"{'chatcmpl' if item.url == CHAT_URL else 'cmpl'}-{secrets.token_hex(12)}"
        shape = Shape(
            item.url == CHAT_URL, answer_id, int(time.time()), first.model, choices=first.n * len(call.submits),
            logprobs=first.logprobs, echo=call.echo,
        )  # fmt: skip
        whole, usage, last = Whole(shape), dict[str, int](), Event(0, "done")
        for number, submit in enumerate(call.submits):
            async with contextlib.aclosing(client.generate(submit, wait_s=SILENCE_S)) as events:
                async for event in events:
                    if event.ev == "aborted":
                        raise Aborted("the generation was stopped")
                    self._take(whole, event, number * first.n)
                    last = event
            if submit.n == submit.best_of == 1:  # of several answers the end of each was told
                whole.take(Event(last.id, "choice", {"choice": number, "finish": last.data["finish"]}))
            for name, count in last.data.get("usage", {}).items():
                usage[name] = usage.get(name, 0) + count
        return whole.take(Event(last.id, "done", {**last.data, "usage": usage}))

    def _take(self, whole: Whole, event: Event, base: int) -> None:
        """Give an event of one prompt to the answer, the number of its choice moved up by `base`."""
        match event.ev:
            case "text":
                self._tally.tokens += len(event.data["tokens"])
                self._screen.draw()
                whole.take(Event(event.id, "text", {**event.data, "choice": base + event.data.get("choice", 0)}))
            case "choice":
                whole.take(Event(event.id, "choice", {**event.data, "choice": base + event.data["choice"]}))
            case _:
                pass  # `accepted`, `progress`, and what a newer daemon may say; `done` is told once for all prompts


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


def _run(socket: Path, work: Batch, width: int) -> None:
    try:
        asyncio.run(work.run(socket, width))
    except (KeyboardInterrupt, TierdError):
        note("what is finished is kept; the same command goes on")
        raise


def _parsed(item: Item, model: str | None) -> openai.Call:
    """The request, behind all others. Raises BadRequest or Unsupported that names the field."""
    body_limits.check(item.body)
    body = item.body
    if model is not None:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        body = msgspec.json.encode({**fields, "model": model})
    call = openai.parse_chat(body) if item.url == CHAT_URL else openai.parse_completion(body)
    if call.stream:
        raise BadRequest("a batch has no streams", param="stream")
    return call._replace(submits=tuple(_behind(submit) for submit in call.submits))


def _behind(submit: Submit) -> Submit:
    return msgspec.structs.replace(submit, priority=MAX_PRIORITY)


def _failed(item: Item, exc: TierdError) -> Answer:
    body = openai.error(exc)
    response = Response(exc.status, _request_id(item), body)
    return Answer(item.id, item.custom_id, response, Fault(exc.code, openai.sentence(exc)))


def _request_id(item: Item) -> str:
    return "req_" + item.id.removeprefix(ID_PREFIX)


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
    note(f"{target}: {tally.total} requests, {', '.join(parts)}; {tally.tokens} tokens in {human_seconds(seconds)}")

"""Runs batches inside of the daemon: behind everybody else, several at once, on after the daemon was killed.

What is answered stands in files of `daemon.batch`, a line on the disk before it counts; what a batch is about stands in
`batches`. So a start finds the batches that are not finished, and what of each has an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from tierd.daemon.api.batches import (
    ENDED,
    MAX_REQUESTS,
    Batch,
    Batches,
    BatchRequest,
    Counts,
    Fault,
    Faults,
    Job,
    Status,
    new,
)
from tierd.daemon.api.files import OUTPUT, File, Files
from tierd.daemon.batch import Answer, Item, Output, Requests
from tierd.daemon.batch import Fault as LineFault
from tierd.daemon.batch_run import Asking
from tierd.daemon.embedding import Input, Vectors
from tierd.daemon.errors import (
    Aborted,
    BadRequest,
    Conflict,
    Draining,
    InternalError,
    ModelNotFound,
    TierdError,
    TooBusy,
    Unauthorized,
)
from tierd.daemon.inbox import SlowReader
from tierd.daemon.limits import MAX_PRIORITY
from tierd.daemon.paths import make_private_dir
from tierd.daemon.protocol import Event, Submit, error_of
from tierd.daemon.service import Service

log = logging.getLogger("tierd.batches")

_R = TypeVar("_R")

DOOR = "batch"  # in the log and the metrics
_EXPIRED = LineFault("batch_expired", "the time of the batch was over before this request had its turn")


class _Open(NamedTuple):
    """The files of a batch that runs."""

    requests: Requests
    answers: Output
    faults: Output


class Runner:
    """All batches of a daemon, and their files. Threading: for one event loop; the disk is waited for in threads."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._service = service
        self._clock = clock
        self._stores: tuple[Files, Batches] | None = None
        self._disk = asyncio.Lock()  # the stores are for one thread at a time
        self._places = asyncio.Semaphore(service.settings.max_streams)  # requests of all batches at once
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lock_fd = -1

    # -- the life of the daemon ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read what is there, and go on with what is not finished. That the directory can't be used is logged."""
        try:
            self._stores = await asyncio.to_thread(self._open_stores)
        except (TierdError, OSError) as exc:
            log.error("there will be no batches: %s", exc)
            return
        for job in self._stores[1].unfinished():
            log.info("going on with %s", job.batch.id)
            self._begin(job)

    async def close(self) -> None:
        """End what runs; the next start goes on with it."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _open_stores(self) -> tuple[Files, Batches]:
        directory = make_private_dir(self._service.settings.batches_dir)
        self._lock_fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another daemon uses {directory}") from None
        files, batches = Files(directory), Batches(directory)
        files.tidy(name for job in batches.unfinished() for name in (job.answers_id, job.faults_id))
        return files, batches

    # -- for the paths ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def stores(self) -> AsyncGenerator[tuple[Files, Batches], None]:
        """The files and the batches, for one caller at a time. Raises Conflict when there are none."""
        if self._stores is None:
            raise Conflict("files and batches can't be used here", hint="`tierd logs` says why")
        async with self._disk:
            yield self._stores

    async def create(self, given: BatchRequest, tenant: str) -> Batch:
        """A new batch; it is looked through after this returns. Raises NotFound, BadRequest, TooBusy."""
        if self._service.draining:
            raise Draining()
        async with self.stores() as (files, batches):
            if files.get(given.input_file_id, tenant, "input_file_id").purpose == OUTPUT:
                raise BadRequest("that is the output of a batch", param="input_file_id")
            now_s = self._clock()
            batch = new(given, now_s)
            job = Job(tenant, batch, now_s, files.new_id(), files.new_id())
            await _to_its_end(batches.add, job)
        self._begin(job)
        return batch

    async def cancel(self, batch_id: str, tenant: str) -> Batch:
        """Begin to end a batch; what is answered is kept. Raises NotFound, Conflict when it has ended."""
        async with self.stores() as (_, batches):
            job = batches.get(batch_id, tenant)
            if job.batch.status in ENDED:
                raise Conflict(f"the batch is {job.batch.status} already")
            if job.batch.status != "cancelling":
                job.batch.status, job.batch.cancelling_at = "cancelling", int(self._clock())
                await _to_its_end(batches.save, job)
                if (task := self._tasks.get(batch_id)) is not None:
                    task.cancel()
        return job.batch

    # -- one batch -------------------------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        task = asyncio.create_task(self._live(job), name=job.batch.id)
        self._tasks[job.batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.batch.id, None))

    async def _live(self, job: Job) -> None:
        """From where a batch stands to its end, or to that of the daemon."""
        batch = job.batch
        try:
            try:
                if batch.status != "cancelling":
                    await self._process(job)
            except asyncio.CancelledError:
                if batch.status != "cancelling":
                    raise
            if batch.status == "cancelling":
                await self._end(job, "cancelled")
        except Draining:
            log.info("%s goes on at the next start", batch.id)
        except (TierdError, OSError) as exc:
            log.error("%s failed: %s", batch.id, exc)
            code, message = (exc.code, exc.message) if isinstance(exc, TierdError) else ("error", "the disk failed")
            await self._fail(job, [Fault(code, message)])
        except Exception:
            log.exception("%s failed", batch.id)
            await self._fail(job, [Fault(InternalError().code, InternalError().message)])

    async def _process(self, job: Job) -> None:
        batch = job.batch
        is_late = False
        with contextlib.ExitStack() as stack:
            opened = await self._open(stack, job)
            if batch.status == "validating":
                if faults := await self._faults_of(job, opened.requests):
                    await self._fail(job, faults)
                    return
                batch.in_progress_at = int(self._clock())
                await self._save(job, "in_progress")
            try:
                async with asyncio.timeout(max(batch.expires_at - self._clock(), 0.0)):
                    await self._answer_all(job, opened)
            except TimeoutError:
                is_late = True
        if is_late:
            await self._expire(job)
        else:
            await self._end(job, "completed")

    async def _open(self, stack: contextlib.ExitStack, job: Job) -> _Open:
        """Read back what is answered, and look through what is not."""
        async with self.stores() as (files, _):
            paths = [files.path(name) for name in (job.batch.input_file_id, job.answers_id, job.faults_id)]

        def look() -> _Open:
            answers, faults = (stack.enter_context(Output(path)) for path in paths[1:])
            requests = stack.enter_context(Requests(paths[0], {**answers.finished, **faults.finished}))
            return _Open(requests, answers, faults)

        opened = await _to_its_end(look)
        completed, failed = len(opened.answers.finished), len(opened.faults.finished)
        job.batch.request_counts = Counts(opened.requests.total, completed, failed)
        opened.answers.finished.clear()
        opened.faults.finished.clear()
        return opened

    async def _faults_of(self, job: Job, requests: Requests) -> list[Fault]:
        """What keeps a batch from being run."""
        faults = [Fault("invalid_line", problem.what, problem.number) for problem in requests.problems]
        faults += [
            Fault("mismatched_url", f"url is {url}, the endpoint of the batch {job.batch.endpoint}", number, "url")
            for url, number in requests.urls.items()
            if url != job.batch.endpoint
        ]
        for name, number in requests.models.items():
            try:
                await self._service.show(name)
            except (ModelNotFound, BadRequest) as exc:
                faults.append(Fault("model_not_found", exc.message, number, "body.model"))
        if not faults and not 1 <= requests.total <= MAX_REQUESTS:
            what = f"the file holds {requests.total} requests, 1 to {MAX_REQUESTS} are possible"
            faults.append(Fault("bad_request", what))
        return faults

    async def _answer_all(self, job: Job, opened: _Open) -> None:
        """A crowd that takes one request after the other, no larger than there is room for."""
        allowed = self._service.tenants.allowance(job.tenant).requests
        # A key's limit is for its other requests, too.
        width = min(self._service.settings.max_streams, len(opened.requests), max(allowed // 2, 1) if allowed else 1024)
        items, reading, writing = iter(opened.requests), asyncio.Lock(), asyncio.Lock()
        asking = Asking(lambda submit: self._generate(submit, job.tenant), lambda *what: self._embed(job.tenant, *what))

        async def work() -> None:
            while True:
                async with self._places:
                    async with reading:
                        item: Item | None = await _to_its_end(next, items, None)
                    if item is None:
                        return
                    answer = await self._answer(asking, item, job)
                async with writing:
                    await self._append(job, opened, answer)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(width):
                    group.create_task(work())
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _answer(self, asking: Asking, item: Item, job: Job) -> Answer:
        if not self._service.tenants.is_there(job.tenant):
            raise Unauthorized("the key that asked for this batch was removed")
        try:
            return await asking.answer(item)
        except Aborted as exc:
            if self._service.draining:
                raise Draining() from None
            return Answer(item.id, item.custom_id, None, LineFault(exc.code, exc.message))

    async def _append(self, job: Job, opened: _Open, answer: Answer) -> None:
        await _to_its_end((opened.answers if answer.error is None else opened.faults).append, answer)
        if answer.error is None:
            job.batch.request_counts.completed += 1
        else:
            job.batch.request_counts.failed += 1

    async def _generate(self, submit: Submit, tenant: str) -> AsyncGenerator[Event, None]:
        try:
            async with self._service.answering(submit, DOOR, tenant) as events:
                async for event in events:
                    if error := error_of(event):
                        raise error
                    yield event
        except SlowReader:
            raise TooBusy("the daemon could not keep up with its own answers") from None

    async def _embed(self, tenant: str, model: str, inputs: Sequence[Input]) -> Vectors:
        return await self._service.embed(model, inputs, tenant, DOOR, priority=MAX_PRIORITY)

    async def _expire(self, job: Job) -> None:
        """What has no answer when the time is over is told so, each on a line."""
        with contextlib.ExitStack() as stack:
            opened = await self._open(stack, job)

            def tell(items: Iterator[Item]) -> int:
                count = 0
                for item in items:
                    opened.faults.append(Answer(item.id, item.custom_id, None, _EXPIRED))
                    count += 1
                return count

            job.batch.request_counts.failed += await _to_its_end(tell, iter(opened.requests))
        await self._end(job, "expired")

    # -- ends ------------------------------------------------------------------------------------------------------

    async def _save(self, job: Job, status: Status) -> None:
        job.batch.status = status
        async with self.stores() as (_, batches):
            await _to_its_end(batches.save, job)

    async def _fail(self, job: Job, faults: list[Fault]) -> None:
        job.batch.errors = Faults(faults)
        try:
            await self._end(job, "failed")
        except OSError as exc:
            log.error("what became of %s can't be written: %s", job.batch.id, exc)

    async def _end(self, job: Job, status: Status) -> None:
        """The one way to an end. Who cancels meanwhile finds that it has ended."""
        async with self.stores() as (files, batches):
            await _to_its_end(self._finish, job, status, files, batches)
        log.info("%s: %s", job.batch.id, status)

    def _finish(self, job: Job, status: Status, files: Files, batches: Batches) -> None:
        batch, now_s = job.batch, int(self._clock())
        batch.status, batch.finalizing_at = "finalizing", now_s
        batches.save(job)
        for what, file_id in (("output", job.answers_id), ("error", job.faults_id)):
            with contextlib.suppress(FileNotFoundError):
                if size_bytes := files.path(file_id).stat().st_size:
                    name = f"{batch.id}_{what}.jsonl"
                    files.add(job.tenant, File(file_id, size_bytes, now_s, name, OUTPUT), self._clock())
                    setattr(batch, f"{what}_file_id", file_id)
        setattr(batch, f"{status}_at", now_s)
        batch.status = status
        batches.save(job)


async def _to_its_end(function: Callable[..., _R], *args: object) -> _R:
    """Run it in a thread, and wait for it also when cancelled: what it works on is closed afterwards."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise

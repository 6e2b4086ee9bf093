"""Runs batches inside of the daemon: behind everybody else, several at once, on after the daemon was killed.

What is answered stands in files of `daemon.batch`, a line on the disk before it counts; what a batch is about stands in
`batches`. So a start finds the batches that are not finished, and what of each has an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
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
from tierd.daemon.api.batches_places import Places
from tierd.daemon.api.files import OUTPUT, File, Files
from tierd.daemon.batch import Answer, Item, Output, Requests, lines_of
from tierd.daemon.batch import Fault as LineFault
from tierd.daemon.batch_run import Asking
from tierd.daemon.errors import (
    Aborted,
    BadRequest,
    Conflict,
    Draining,
    InternalError,
    ModelNotFound,
    TierdError,
    Unauthorized,
)
from tierd.daemon.paths import make_private_dir
from tierd.daemon.service import Service

log = logging.getLogger("tierd.batches")

_R = TypeVar("_R")

MAX_RUNNING = 4  # batches that have their files open and their requests in mind; the others wait for their turn
EXPIRED_AT_ONCE = 1000  # lines between two looks whether the daemon stops
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
        self._scan = asyncio.Lock()  # looking through a file takes the interpreter for itself
        self._turns = asyncio.Semaphore(MAX_RUNNING)
        self._places = Places(service)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._working: set[str] = set()  # batches whose task may be interrupted: it is not about their end
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
            job = Job(tenant, batch, now_s, *files.book(2))
            try:
                await to_its_end(batches.add, job)
            finally:  # a client that leaves changes nothing
                if batches.knows(job):
                    self._begin(job)
                else:
                    for file_id in (job.answers_id, job.faults_id):
                        await to_its_end(files.drop, file_id)
        return batch

    async def cancel(self, batch_id: str, tenant: str) -> Batch:
        """Begin to end a batch; what is answered is kept. Raises NotFound, Conflict when it has ended."""
        async with self.stores() as (_, batches):
            job = batches.get(batch_id, tenant)
            if job.batch.status in ENDED:
                raise Conflict(f"the batch is {job.batch.status} already")
            is_first = job.batch.status != "cancelling"
            if is_first:
                job.batch.status, job.batch.cancelling_at = "cancelling", int(self._clock())
            # Before anything is waited for: it comes to its end even if the client leaves, or the disk fails.
            if (task := self._tasks.get(batch_id)) is None:
                self._begin(job)
            elif batch_id in self._working:
                task.cancel()
            if is_first:
                await to_its_end(batches.save, job)
        return job.batch

    async def grow(self, file_id: str, more_bytes: int) -> None:
        """Ask for room before a file gets more. Raises OutOfSpace."""
        async with self.stores() as (files, _):
            files.grow(file_id, more_bytes)

    # -- one batch -------------------------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        self._tasks[job.batch.id] = asyncio.create_task(self._live(job), name=job.batch.id)

    async def _live(self, job: Job) -> None:
        """From where a batch stands to its end, or to that of the daemon."""
        try:
            status = await self._work(job)
            try:
                await self._end(job, status)
            except OSError as exc:
                self._blame(job, exc)
                await self._end(job, "failed")
        except Draining:
            log.info("%s goes on at the next start", job.batch.id)
        except Exception:
            log.exception("what became of %s can't be written", job.batch.id)
        finally:
            del self._tasks[job.batch.id]

    async def _work(self, job: Job) -> Status:
        """Do what is left of a batch. Returns how it ends, unless somebody cancels it. Raises Draining."""
        self._working.add(job.batch.id)
        try:
            if job.batch.status == "cancelling":
                return "cancelled"
            async with self._turns:
                return await self._process(job)
        except asyncio.CancelledError:
            if job.batch.status != "cancelling":
                raise
            return "cancelled"
        except Draining:
            raise
        except Exception as exc:
            self._blame(job, exc)
            return "failed"
        finally:
            self._working.remove(job.batch.id)

    def _blame(self, job: Job, exc: Exception) -> None:
        """Note and log why a batch fails."""
        match exc:
            case TierdError():
                log.error("%s failed: %s", job.batch.id, exc)
                fault = Fault(exc.code, exc.message)
            case OSError():
                log.error("%s failed: %s", job.batch.id, exc)
                fault = Fault("error", "the disk failed")
            case _:
                log.error("%s failed", job.batch.id, exc_info=exc)
                fault = Fault(InternalError().code, InternalError().message)
        job.batch.errors = Faults([fault])

    async def _process(self, job: Job) -> Status:
        with contextlib.ExitStack() as stack:
            opened = await self._open(stack, job)
            if job.batch.status == "validating":
                if faults := await self._faults_of(job, opened.requests):
                    job.batch.errors = Faults(faults)
                    return "failed"
                await self._set_out(job)
            try:
                async with asyncio.timeout(max(job.batch.expires_at - self._clock(), 0.0)) as window:
                    await self._answer_all(job, opened)
                return "completed"
            except TimeoutError:
                if not window.expired():
                    raise
        await self._expire(job)
        return "expired"

    async def _set_out(self, job: Job) -> None:
        async with self.stores() as (_, batches):
            if job.batch.status == "validating":
                job.batch.status, job.batch.in_progress_at = "in_progress", int(self._clock())
                await to_its_end(batches.save, job)

    async def _open(self, stack: contextlib.ExitStack, job: Job) -> _Open:
        """Read back what is answered, and look through what is not."""
        async with self.stores() as (files, _):
            paths = [files.path(name) for name in (job.batch.input_file_id, job.answers_id, job.faults_id)]

        def look() -> _Open:
            answers, faults = (stack.enter_context(Output(path, 0o600)) for path in paths[1:])
            finished = {**answers.finished, **faults.finished}
            requests = stack.enter_context(Requests(paths[0], finished, max_lines=MAX_REQUESTS))
            return _Open(requests, answers, faults)

        async with self._scan:
            opened = await to_its_end(look)
        completed, failed = len(opened.answers.finished), len(opened.faults.finished)
        job.batch.request_counts = Counts(opened.requests.total, completed, failed)
        opened.answers.finished.clear()
        opened.faults.finished.clear()
        return opened

    async def _faults_of(self, job: Job, requests: Requests) -> list[Fault]:
        """What keeps a batch from being run."""
        if requests.is_too_long:
            return [Fault("bad_request", f"the file has more than {MAX_REQUESTS} lines")]
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
        if not faults and not requests.total:
            faults.append(Fault("bad_request", "the file holds 0 requests"))
        return faults

    async def _answer_all(self, job: Job, opened: _Open) -> None:
        """A crowd that takes one request after the other, no larger than there is room for."""
        asking, width = self._places.asking(job.tenant), self._places.of(job.tenant).places
        items, reading, writing = iter(opened.requests), asyncio.Lock(), asyncio.Lock()

        async def work() -> None:
            while True:
                async with reading:
                    item: Item | None = await to_its_end(next, items, None)
                if item is None:
                    return
                answer = await self._answer(asking, item, job)
                async with writing:
                    await self._append(job, opened, answer)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(width, len(opened.requests))):
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
        line, counts = lines_of([answer]), job.batch.request_counts

        def tell() -> None:  # and count at once: a cancel that comes meanwhile takes nothing back
            if answer.error is None:
                opened.answers.write(line)
                counts.completed += 1
            else:
                opened.faults.write(line)
                counts.failed += 1

        await self.grow(job.answers_id if answer.error is None else job.faults_id, len(line))
        await to_its_end(tell)

    async def _expire(self, job: Job) -> None:
        """What has no answer when the time is over is told so, each on a line."""
        with contextlib.ExitStack() as stack:
            opened = await self._open(stack, job)
            items = iter(opened.requests)

            def lines() -> tuple[bytes, int]:
                some = itertools.islice(items, EXPIRED_AT_ONCE)
                late = [Answer(item.id, item.custom_id, None, _EXPIRED) for item in some]
                return lines_of(late), len(late)

            while (told := await to_its_end(lines))[1]:
                await self.grow(job.faults_id, len(told[0]))
                await to_its_end(opened.faults.write, told[0])
                job.batch.request_counts.failed += told[1]

    async def _end(self, job: Job, status: Status) -> None:
        """The one way to an end, that of who cancelled meanwhile if somebody did. Raises OSError."""
        async with self.stores() as (files, batches):
            status = "cancelled" if job.batch.status == "cancelling" else status
            await to_its_end(self._finish, job, status, files, batches)
        log.info("%s: %s", job.batch.id, status)

    def _finish(self, job: Job, status: Status, files: Files, batches: Batches) -> None:
        batch, now_s = job.batch, int(self._clock())
        for what, file_id in (("output", job.answers_id), ("error", job.faults_id)):
            path = files.path(file_id)
            if size_bytes := path.stat().st_size if path.exists() else 0:
                name = f"{batch.id}_{what}.jsonl"
                files.add(job.tenant, File(file_id, size_bytes, now_s, name, OUTPUT), self._clock())
                setattr(batch, f"{what}_file_id", file_id)
            else:
                files.drop(file_id)
        if status == "completed":
            batch.finalizing_at = now_s
        setattr(batch, f"{status}_at", now_s)
        batch.status = status
        batches.save(job)


async def to_its_end(function: Callable[..., _R], *args: object) -> _R:
    """Run it in a thread, and wait for it also when cancelled: what it works on is closed afterwards."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():  # cancelled once more: by whoever stops the daemon, say
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise

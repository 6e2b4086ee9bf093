"""The paths of batches, and of the files that they read and write."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

from aiohttp import BodyPartReader, web

from tierd.daemon.api import batches, sse
from tierd.daemon.api.answers import json_response
from tierd.daemon.api.batches_run import Runner, to_its_end
from tierd.daemon.api.files import INPUT, MAX_FILE_BYTES, File, safe_name
from tierd.daemon.api.gate import MULTIPART, tenant_of
from tierd.daemon.api.reading import BODY_TIMEOUT_S, read
from tierd.daemon.errors import BadRequest, OutOfSpace, TimedOut, Unsupported
from tierd.daemon.service import Service

_R = TypeVar("_R")

UPLOAD_TIMEOUT_S = 1800.0  # for the whole of a file; a piece of it has that of any body
MAX_PARTS = 8
MAX_FIELD_BYTES = 1024
PIECE_BYTES = 256 << 10
FILES_PAGE, BATCHES_PAGE = 10_000, 20  # entries of a listing, unless told otherwise


class Routes:
    """The handlers. Threading: for one event loop."""

    def __init__(self, service: Service) -> None:
        self._runner = Runner(service)

    def add(self, app: web.Application) -> None:
        """Register every path, and the life of the batches."""
        app.cleanup_ctx.append(self._live)
        app.router.add_post("/v1/files", self.upload)
        app.router.add_get("/v1/files", self.files)
        app.router.add_get("/v1/files/{file_id}", self.file)
        app.router.add_delete("/v1/files/{file_id}", self.delete)
        app.router.add_get("/v1/files/{file_id}/content", self.content)
        app.router.add_post("/v1/batches", self.create)
        app.router.add_get("/v1/batches", self.batches)
        app.router.add_get("/v1/batches/{batch_id}", self.batch)
        app.router.add_post("/v1/batches/{batch_id}/cancel", self.cancel)

    async def _live(self, _: web.Application) -> AsyncGenerator[None, None]:
        await self._runner.start()
        yield
        await self._runner.close()

    # -- files -----------------------------------------------------------------------------------------------------

    async def upload(self, request: web.Request) -> web.Response:
        """POST /v1/files"""
        if request.content_type != MULTIPART:
            raise BadRequest(f"a file comes as {MULTIPART}", param="Content-Type")
        async with self._runner.stores() as (files, _):
            (file_id,) = files.book()
        try:
            file = await self._take_in(request, file_id)
        except TimeoutError:
            raise TimedOut(f"the file did not come within {UPLOAD_TIMEOUT_S:.0f} s") from None
        except ConnectionError:
            raise
        except OSError as exc:
            raise OutOfSpace(f"the file can't be kept: {exc.strerror}") from None
        return json_response(file)

    async def _take_in(self, request: web.Request, file_id: str) -> File:
        """Receive a file, and know it. Raises TimeoutError, OSError, and what is wrong with the upload."""
        try:
            async with self._runner.stores() as (files, _):
                path = files.path(file_id)
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                name, size_bytes = await _receive(request, path, lambda more: self._runner.grow(file_id, more))
            now_s = time.time()
            file = File(file_id, size_bytes, int(now_s), name, INPUT)
            async with self._runner.stores() as (files, _):
                await to_its_end(files.add, tenant_of(request), file, now_s)
            return file
        finally:
            async with self._runner.stores() as (files, _):
                await to_its_end(files.drop, file_id)  # unless it is known now

    async def files(self, request: web.Request) -> web.Response:
        """GET /v1/files"""
        query = request.query
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("order must be asc or desc", param="order")
        async with self._runner.stores() as (files, _):
            page = files.page(
                tenant_of(request), limit=_limit(request, FILES_PAGE), after=query.get("after"),
                purpose=query.get("purpose"), newest_first=order == "desc",
            )  # fmt: skip
        return json_response(page)

    async def file(self, request: web.Request) -> web.Response:
        """GET /v1/files/{id}"""
        async with self._runner.stores() as (files, _):
            return json_response(files.get(request.match_info["file_id"], tenant_of(request)))

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/files/{id}"""
        file_id = request.match_info["file_id"]
        async with self._runner.stores() as (files, known):
            files.get(file_id, tenant_of(request))
            known.check_unused(file_id)
            return json_response(await to_its_end(files.delete, file_id, tenant_of(request)))

    async def content(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/files/{id}/content"""
        with contextlib.ExitStack() as stack:
            async with self._runner.stores() as (files, _):
                file = files.get(request.match_info["file_id"], tenant_of(request))
                path = files.path(file.id)
                opened = await to_its_end(lambda: stack.enter_context(open(path, "rb")))
            return await _send(request, opened, file.bytes)  # even if it is deleted meanwhile

    # -- batches ---------------------------------------------------------------------------------------------------

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/batches"""
        given = batches.parse(await read(request))
        return json_response(await self._runner.create(given, tenant_of(request)))

    async def batches(self, request: web.Request) -> web.Response:
        """GET /v1/batches"""
        async with self._runner.stores() as (_, known):
            limit, after = _limit(request, BATCHES_PAGE), request.query.get("after")
            return json_response(known.page(tenant_of(request), limit=limit, after=after))

    async def batch(self, request: web.Request) -> web.Response:
        """GET /v1/batches/{id}"""
        async with self._runner.stores() as (_, known):
            return json_response(known.get(request.match_info["batch_id"], tenant_of(request)).batch)

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/batches/{id}/cancel"""
        return json_response(await self._runner.cancel(request.match_info["batch_id"], tenant_of(request)))


def _limit(request: web.Request, default: int) -> int:
    text = request.query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadRequest("limit must be a number", param="limit")
    return int(text)


async def _receive(request: web.Request, path: Path, grow: Callable[[int], Awaitable[None]]) -> tuple[str, int]:
    """Write the file of an upload; its name and size. `grow` asks for room before more bytes are written.

    Raises BadRequest, TimedOut, OSError, and what `grow` does.
    """
    name, size_bytes, purpose = "", 0, None
    try:
        reader = await request.multipart()
        for _ in range(MAX_PARTS):
            match await _in_time(reader.next()):
                case None:
                    break
                case BodyPartReader(name="file") as part if not name:
                    name = safe_name(part.filename)
                    size_bytes = await _write(part, path, grow)
                case BodyPartReader(name="purpose") as part:
                    purpose = await _field(part)
                case part:
                    what = getattr(part, "name", None) or "a part without a name"
                    raise Unsupported(f"{str(what)[:64]} is not supported in an upload", param=str(what)[:64])
        else:
            raise BadRequest(f"the upload has more than {MAX_PARTS} parts")
    except (ValueError, AssertionError, web.RequestPayloadError) as exc:
        raise BadRequest("the body is broken") from exc
    if not name:
        raise BadRequest("file is missing", param="file")
    if purpose is None:
        raise BadRequest("purpose is missing", param="purpose")
    if purpose != INPUT:
        raise Unsupported(f"purpose must be {INPUT}: files are for batches here", param="purpose")
    return name, size_bytes


async def _in_time(piece: Awaitable[_R]) -> _R:
    """The next of an upload. Raises TimedOut."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await piece
    except TimeoutError:
        raise TimedOut(f"nothing more of the file came within {BODY_TIMEOUT_S:.0f} s") from None


async def _write(part: BodyPartReader, path: Path, grow: Callable[[int], Awaitable[None]]) -> int:
    size_bytes = 0
    with contextlib.ExitStack() as stack:
        file = await to_its_end(lambda: stack.enter_context(_create(path)))
        while piece := await _in_time(part.read_chunk(PIECE_BYTES)):
            size_bytes += len(piece)
            if size_bytes > MAX_FILE_BYTES:
                raise BadRequest(f"a file may have {MAX_FILE_BYTES >> 20} MiB", param="file")
            await grow(len(piece))
            await to_its_end(_write_all, file, piece)
        await to_its_end(os.fdatasync, file.fileno())
    return size_bytes


def _create(path: Path) -> FileIO:
    return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _write_all(file: FileIO, piece: bytes) -> None:
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]


async def _field(part: BodyPartReader) -> str:
    value = b""
    while piece := await _in_time(part.read_chunk(MAX_FIELD_BYTES)):
        value += piece
        if len(value) > MAX_FIELD_BYTES:
            raise BadRequest(f"{part.name} is too long", param=part.name)
    return value.decode("utf-8", "replace")


async def _send(request: web.Request, file: BinaryIO, size_bytes: int) -> web.StreamResponse:
    """The content of a file, at the client's speed but not for ever."""
    response = web.StreamResponse(headers={"Content-Type": "application/jsonl", "Content-Length": str(size_bytes)})
    await response.prepare(request)
    with contextlib.suppress(TimeoutError):
        while piece := await to_its_end(file.read, PIECE_BYTES):
            async with asyncio.timeout(sse.WRITE_TIMEOUT_S):
                await response.write(piece)
        await response.write_eof()
        return response
    raise ConnectionResetError("the client does not read")

"""Uploads that are wrong, and the paths of files and batches where the SDK does not go."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from typing import Any

import aiohttp
import pytest
from batch_rig import Gate, a_while

from tests.waiting import until
from tierd.daemon.api import batches_routes
from tierd.daemon.api.files import Files

KEY = {"Authorization": "Bearer any"}


def form(*parts: tuple[str, bytes]) -> bytes:
    """A body of parts: the head of each, and its content."""
    return b"".join(b"--x\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + content + b"\r\n"
                    for head, content in parts) + b"--x--\r\n"  # fmt: skip


FILE, PURPOSE = ('name="file"; filename="in.jsonl"', b"x"), ('name="purpose"', b"batch")


async def upload(http, body: bytes, kind: str = "multipart/form-data; boundary=x"):
    headers = KEY | {"Content-Type": kind}
    async with http.session.post(f"{http.url}/v1/files", data=io.BytesIO(body), headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(PURPOSE), "file"), (form(FILE), "purpose"), (form(FILE, ('name="purpose"', b"vision")), "purpose"),
        (form(FILE, PURPOSE, ('name="expires_after[seconds]"', b"9")), "expires_after[seconds]"),
        (form(FILE, FILE, PURPOSE), "file"), (form(('name="file"', b"x"), PURPOSE), "file"),
        (form(FILE, ('name="purpose"', b"x" * 5000)), "purpose"), (b"nonsense", None), (b"", None),
        (form(FILE, *[PURPOSE] * 9), None),
    ],
)  # fmt: skip
async def test_uploads_that_are_wrong_leave_nothing(shared, shared_daemon, body, param):
    before = sorted((shared_daemon.root / "batches").glob("file-*"))
    status, answer = await upload(shared, body)
    assert status == 400 and answer["error"]["param"] == param
    assert sorted((shared_daemon.root / "batches").glob("file-*")) == before


async def test_a_file_may_come_before_or_after_its_purpose(shared):
    for body in (form(FILE, PURPOSE), form(PURPOSE, FILE)):
        status, answer = await upload(shared, body)
        assert status == 200 and answer["bytes"] == 1 and answer["object"] == "file"


async def test_a_file_that_is_too_large(http, monkeypatch):
    monkeypatch.setattr(batches_routes, "MAX_FILE_BYTES", 1 << 20)
    status, _ = await upload(http, form((FILE[0], b"x" * (1 << 20)), PURPOSE))
    assert status == 200
    status, answer = await upload(http, form((FILE[0], b"x" * ((1 << 20) + 1)), PURPOSE))
    assert status == 400 and "1 MiB" in answer["error"]["message"]


async def test_json_is_no_upload(shared):
    status, answer, _ = await shared.post("/v1/files", {"purpose": "batch"})
    assert status == 400 and "multipart" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/files?limit=0", 400), ("/v1/files?limit=x", 400), ("/v1/files?order=up", 400),
        ("/v1/files?after=file-x", 404), ("/v1/files/..%2flock", 404), ("/v1/files/lock/content", 404),
        ("/v1/batches?limit=101", 400), ("/v1/batches?after=x", 404), ("/v1/batches/x", 404),
    ],
)  # fmt: skip
async def test_wrong_places(shared, path, status):
    found, answer, _ = await shared.get(path)
    assert found == status and answer["error"]["message"]


def runner_of(http) -> Any:
    owners = [getattr(route.handler, "__self__", None) for route in http.front.app.router.routes()]
    return next(owner._runner for owner in owners if isinstance(owner, batches_routes.Routes))


def whole(http) -> None:
    """What is listed is there, and nothing else is, or counts."""
    files, _ = runner_of(http)._stores
    names = {path.name for path in files.directory.glob("file-*")}
    assert names == {file_id + end for file_id in files._kept for end in (".json", ".jsonl")}
    assert not files._coming
    for file_id, kept in files._kept.items():
        assert files.path(file_id).stat().st_size == kept.file.bytes


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (batches_routes, "_create"), (batches_routes, "_write_all"), (os, "fdatasync"), (Files, "add"),
        (Files, "delete"), (Files, "drop"),
    ],
)  # fmt: skip
async def test_a_client_that_leaves_while_the_disk_works_leaves_files_whole(
    http, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
):
    _, file = await upload(http, form(FILE, PURPOSE))
    real, failed = getattr(owner, name), []

    def watched(*args: Any) -> Any:
        try:
            return real(*args)
        except Exception as exc:
            failed.append(exc)
            raise

    before = asyncio.all_tasks()
    with monkeypatch.context() as patch:
        gate = Gate(watched).over(patch, owner, name)
        async with aiohttp.ClientSession() as session:
            if name == "delete":
                call = session.delete(f"{http.url}/v1/files/{file['id']}")
            else:
                kind = {"Content-Type": "multipart/form-data; boundary=x"}
                call = session.post(f"{http.url}/v1/files", data=form(FILE, PURPOSE), headers=KEY | kind)
            asking = asyncio.create_task(call.__aenter__())
            await until(gate.reached.is_set)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
        for _ in range(20):  # the loss of a connection is heard of in a few passes
            await a_while()
        gate.open.set()
        await until(lambda: asyncio.all_tasks() <= before)
        await until(lambda: gate.ended == gate.calls)
    assert not failed
    whole(http)
    status, _ = await upload(http, form(FILE, PURPOSE))
    assert status == 200
    whole(http)


async def test_uploads_are_bounded_together_while_they_come(http):
    await upload(http, form(FILE, PURPOSE))
    async with runner_of(http).stores() as (files, _):
        files._max_total_bytes = 1000
    status, answer = await upload(http, form((FILE[0], b"x" * 1000), PURPOSE))
    assert status == 507 and "together" in answer["error"]["message"]
    whole(http)
    status, _ = await upload(http, form((FILE[0], b"x" * 999), PURPOSE))
    assert status == 200


@pytest.mark.parametrize("sent", [form(FILE, PURPOSE)[:70], form(FILE, PURPOSE)[:-20]])
async def test_a_piece_that_does_not_come_is_told_as_such(http, monkeypatch: pytest.MonkeyPatch, sent: bytes):
    monkeypatch.setattr(batches_routes, "BODY_TIMEOUT_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer any\r\nContent-Length: 999\r\n"
    writer.write(head.encode() + b"Content-Type: multipart/form-data; boundary=x\r\n\r\n" + sent)
    async with asyncio.timeout(20):
        told = await reader.readuntil(b"}}")
    writer.close()
    assert told.startswith(b"HTTP/1.1 504") and b"nothing more of the file came within" in told
    await until(lambda: not list((http.front.settings.batches_dir).glob("file-*")))
    whole(http)

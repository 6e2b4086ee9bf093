"""Uploads that are wrong, and the paths of files and batches where the SDK does not go."""

from __future__ import annotations

import io

import pytest

from tierd.daemon.api import batches_routes

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

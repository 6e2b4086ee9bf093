"""What is known of batches, and what may be asked of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierd.daemon.api import batches
from tierd.daemon.api.batches import MAX_BATCHES, MAX_UNFINISHED, Batches, BatchRequest, Job
from tierd.daemon.errors import BadRequest, Conflict, NotFound, TooBusy, Unsupported

GIVEN = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}


def body(**changes) -> bytes:
    return json.dumps(GIVEN | changes).encode()


def job(tenant: str = "", created_s: float = 1000.5, **changes) -> Job:
    made = batches.new(BatchRequest(**GIVEN), created_s)
    for name, value in changes.items():
        setattr(made, name, value)
    return Job(tenant, made, created_s, "file-2", "file-3")


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"endpoint": "/v1/responses"}, BadRequest, "endpoint"),
        ({"completion_window": "1h"}, BadRequest, "completion_window"),
        ({"metadata": {"a": 1}}, BadRequest, "metadata[...]"),
        ({"metadata": {str(n): "" for n in range(17)}}, BadRequest, "metadata"),
        ({"metadata": {"k" * 65: ""}}, BadRequest, "metadata"),
        ({"metadata": {"k": "v" * 513}}, BadRequest, "metadata"),
        ({"output_expires_after": {"anchor": "created_at"}}, Unsupported, "output_expires_after"),
        ({"colour": 1}, Unsupported, "colour"), ({"input_file_id": None}, BadRequest, "input_file_id"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(changes, error, param):
    with pytest.raises(error) as caught:
        batches.parse(body(**changes))
    assert caught.value.param == param


def test_a_new_batch():
    given = batches.parse(body(metadata={"k" * 64: "v" * 512}, output_expires_after=None))
    made = batches.new(given, 1000.5)
    assert (made.status, made.created_at, made.expires_at) == ("validating", 1000, 1000 + 86400)
    assert made.metadata == given.metadata and made.endpoint == "/v1/chat/completions"


def test_batches_are_there_again(tmp_path: Path):
    one = job("key:a", status="in_progress")
    Batches(tmp_path).add(one)
    (tmp_path / "batch_broken.json").write_text("{")
    again = Batches(tmp_path)
    assert again.unfinished() == [one] and again.get(one.batch.id, "key:a") == one
    with pytest.raises(NotFound):
        again.get(one.batch.id, "")


def test_listing_is_the_newest_first_and_the_tenants_own(tmp_path: Path):
    known = Batches(tmp_path)
    ids = []
    for number in range(3):
        one = job(created_s=number / 4)
        known.add(one)
        ids.append(one.batch.id)
    known.add(job("key:a"))
    assert [batch.id for batch in known.page("", limit=20, after=None).data] == ids[::-1]
    page = known.page("", limit=1, after=ids[2])
    assert [batch.id for batch in page.data] == [ids[1]] and page.has_more
    with pytest.raises(BadRequest):
        known.page("", limit=101, after=None)


def test_a_file_that_is_read_stays(tmp_path: Path):
    known, one = Batches(tmp_path), job()
    known.add(one)
    with pytest.raises(Conflict):
        known.check_unused("file-1")
    one.batch.status = "completed"
    known.check_unused("file-1")


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batches, "write_durably", lambda path, data: path.write_bytes(data))  # a thousand times
    known = Batches(tmp_path)
    for number in range(MAX_BATCHES):
        known.add(job(created_s=number, status="completed"))
    oldest = min(known, key=lambda one: one.created_s)
    known.add(job(created_s=5000))
    assert len(list(known)) == MAX_BATCHES and oldest not in list(known)
    for _ in range(MAX_UNFINISHED - 1):
        known.add(job(created_s=6000))
    with pytest.raises(TooBusy):
        known.add(job())

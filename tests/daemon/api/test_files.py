"""Files on disk: whose they are, how many, what is left after a cut upload."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierd.daemon.api.files import File, Files, paged, safe_name, write_durably
from tierd.daemon.errors import BadRequest, NotFound, OutOfSpace


def keep(files: Files, tenant: str = "", size_bytes: int = 3, created_s: float = 1.0) -> File:
    file = File(files.new_id(), size_bytes, int(created_s), "in.jsonl", "batch")
    files.path(file.id).write_bytes(b"x" * size_bytes)
    files.add(tenant, file, created_s)
    return file


def test_files_are_there_again_and_private(tmp_path: Path) -> None:
    file = keep(Files(tmp_path / "d"))
    again = Files(tmp_path / "d")
    assert again.get(file.id, "") == file and again.path(file.id).read_bytes() == b"xxx"
    assert (tmp_path / "d").stat().st_mode & 0o077 == 0
    for path in (tmp_path / "d").glob("*.json"):
        assert path.stat().st_mode & 0o077 == 0


def test_tenants_see_only_their_own(tmp_path: Path) -> None:
    files = Files(tmp_path)
    mine, other = keep(files, "key:a"), keep(files, "key:b")
    assert [file.id for file in page(files, "key:a").data] == [mine.id]
    for call in (files.get, files.delete):
        with pytest.raises(NotFound):
            call(other.id, "key:a")
    assert files.get(other.id, "key:b")


def page(files: Files, tenant: str = "", **more):
    given = {"limit": 10, "after": None, "purpose": None, "newest_first": True} | more
    return files.page(tenant, **given)


def test_pages_follow_each_other(tmp_path: Path) -> None:
    files = Files(tmp_path)
    ids = [keep(files, created_s=1.0 + n / 10).id for n in range(5)]
    first = page(files, limit=2, newest_first=False)
    assert [file.id for file in first.data] == ids[:2] and first.has_more and first.last_id == ids[1]
    rest = page(files, after=first.last_id, newest_first=False)
    assert [file.id for file in rest.data] == ids[2:] and not rest.has_more
    assert [file.id for file in page(files).data] == ids[::-1] and page(files, purpose="batch_output").data == []
    with pytest.raises(NotFound):
        page(files, after="file-x")


@pytest.mark.parametrize("limit", [0, 11])
def test_limits_of_a_page(limit: int) -> None:
    with pytest.raises(BadRequest, match="1 to 10"):
        paged([], limit, None, 10)


def test_room_is_bounded_in_bytes_and_in_number(tmp_path: Path) -> None:
    files = Files(tmp_path, max_total_bytes=10, max_files=3)
    keep(files, size_bytes=6)
    files.check_room(4)
    with pytest.raises(OutOfSpace):
        files.check_room(5)
    kept = [keep(files, size_bytes=1) for _ in range(2)]
    with pytest.raises(OutOfSpace):
        files.check_room()
    files.delete(kept[0].id, "")
    files.check_room(3)


def test_what_a_cut_upload_left_goes_at_the_next_start(tmp_path: Path) -> None:
    files = Files(tmp_path)
    file, left, used = keep(files), files.path(files.new_id()), files.new_id()
    left.write_bytes(b"half")
    files.path(used).write_bytes(b"answers")
    (tmp_path / "file-broken.json").write_text("{")
    again = Files(tmp_path)
    again.tidy([used])
    assert not left.exists() and again.path(file.id).exists() and again.path(used).exists()
    assert [one.id for one in page(again).data] == [file.id]


@pytest.mark.parametrize("name", [None, "", "a/", "x" * 256, "a\nb"])
def test_names_that_are_none(name: str | None) -> None:
    with pytest.raises(BadRequest):
        safe_name(name)


def test_names_keep_their_last_part() -> None:
    assert safe_name("../../etc/größe.jsonl") == "größe.jsonl" and safe_name("C:\\a\\b.jsonl") == "b.jsonl"


def test_a_small_file_is_replaced_whole(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", b"one")
    write_durably(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"two" and [path.name for path in tmp_path.iterdir()] == ["a"]

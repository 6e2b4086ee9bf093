"""Files on disk: whose they are, how many, what is left after a cut upload."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierd.daemon.api.files import File, Files, paged, safe_name, write_durably
from tierd.daemon.errors import BadRequest, NotFound, OutOfSpace


def keep(files: Files, tenant: str = "", size_bytes: int = 3, created_s: float = 1.0) -> File:
    file = File(files.book()[0], size_bytes, int(created_s), "in.jsonl", "batch")
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
    kept = keep(files, size_bytes=6)
    (to_come,) = files.book()
    with pytest.raises(OutOfSpace):
        files.book(2)
    files.grow(to_come, 3)
    with pytest.raises(OutOfSpace):
        files.grow(to_come, 2)
    files.grow(to_come, 1)
    with pytest.raises(OutOfSpace, match="delete|may have"):
        files.book()  # all bytes are taken
    files.drop(to_come)
    files.drop(kept.id)  # nothing: it is known
    files.grow(*files.book(2)[:1], 4)


def test_what_batches_go_on_to_write_counts_after_a_start(tmp_path: Path) -> None:
    used = [Files(tmp_path).book()[0] for _ in range(2)]
    Files(tmp_path).path(used[0]).write_bytes(b"answers")
    files = Files(tmp_path, max_total_bytes=9, max_files=3)
    files.tidy(used)
    with pytest.raises(OutOfSpace):
        files.grow(used[1], 3)
    files.grow(used[1], 1)
    with pytest.raises(OutOfSpace):
        files.book(2)
    files.book()


def test_what_a_cut_upload_left_goes_at_the_next_start(tmp_path: Path) -> None:
    files = Files(tmp_path)
    file, (cut, used) = keep(files), files.book(2)
    left = files.path(cut)
    left.write_bytes(b"half")
    files.path(used).write_bytes(b"answers")
    (tmp_path / "file-broken.json").write_text("{")
    (tmp_path / f"{file.id}.json.new").write_text("{")
    again = Files(tmp_path)
    again.tidy([used])
    assert not left.exists() and again.path(file.id).exists() and again.path(used).exists()
    assert [one.id for one in page(again).data] == [file.id]
    assert len(list(tmp_path.iterdir())) == 3


def test_facts_without_content_are_no_file(tmp_path: Path) -> None:
    file = keep(Files(tmp_path))
    Files(tmp_path).path(file.id).unlink()
    again = Files(tmp_path)
    assert page(again).data == []
    again.tidy([])
    assert list(tmp_path.iterdir()) == []


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

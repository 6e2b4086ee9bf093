from __future__ import annotations

import resource
from pathlib import Path

from tierd.tiers import small_file


def test_lines_are_added_and_a_file_is_put_in_their_place(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert small_file.read_lines(file) == []
    for line in ("one", "two"):
        small_file.append_line(file, line)
    assert small_file.read_lines(file) == [b"one", b"two"]
    small_file.replace(file, "three\nfour")
    assert small_file.read_lines(file) == [b"three"], "the last line has no end: it was torn"
    small_file.append_line(file, "five")
    assert small_file.read_lines(file) == [b"three", b"four", b"five"]
    assert file.stat().st_mode & 0o777 == 0o600 and [found.name for found in tmp_path.iterdir()] == ["file"]


def test_no_link_is_followed_and_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "file"
    elsewhere.write_text("theirs\n")
    link.symlink_to(elsewhere)
    small_file.append_line(link, "ours")
    assert small_file.read_lines(link) == [] and elsewhere.read_text() == "theirs\n"
    for file in (tmp_path / "gone" / "file",):
        small_file.append_line(file, "line")
        small_file.replace(file, "line\n")
        assert small_file.read_lines(file) == []


def test_what_cannot_take_its_place_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.mkdir()  # nothing can be put in its place
    small_file.replace(file, "line\n")
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_file_cut_short_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    small_file.replace(file, "old\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        small_file.replace(file, "longer than that\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert small_file.read_lines(file) == [b"old"] and [found.name for found in tmp_path.iterdir()] == ["file"]

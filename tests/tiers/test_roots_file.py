from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.pages import key
from tierd.tiers import roots_file


def test_what_was_noted_is_read_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    for number in range(3):
        roots_file.append(file, key(number), b"key:%d" % number)
    assert list(roots_file.read(file, 9).items()) == [(key(number), b"key:%d" % number) for number in range(3)]
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(roots_file.read(file, 2)) == [key(1), key(2)], "the newest"
    roots_file.write(file, {key(7): b"key:7"})
    assert roots_file.read(file, 9) == {key(7): b"key:7"}
    assert [found.name for found in tmp_path.iterdir()] == ["tenants"]


@pytest.mark.parametrize("bad", [b"zz 00\n", b"\n", b"00 00\n", b"\xff\xfe\n", key(2).hex().encode() + b" 61"])
def test_a_damaged_or_torn_line_counts_for_nothing(tmp_path: Path, bad: bytes) -> None:
    file = tmp_path / "tenants"
    roots_file.append(file, key(1), b"key:1")
    with open(file, "ab") as opened:
        opened.write(bad)
    assert roots_file.read(file, 9) == {key(1): b"key:1"}


def test_a_link_is_not_followed_and_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "tenants"
    roots_file.append(elsewhere, key(1), b"key:1")
    link.symlink_to(elsewhere)
    roots_file.append(link, key(2), b"key:2")
    assert roots_file.read(link, 9) == {} and len(roots_file.read(elsewhere, 9)) == 1
    roots_file.append(tmp_path / "gone" / "tenants", key(1), b"key:1")
    roots_file.write(tmp_path / "gone" / "tenants", {key(1): b"key:1"})


def test_what_is_noted_behind_a_torn_line_counts(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    roots_file.append(file, key(1), b"key:1")
    with open(file, "ab") as opened:
        opened.write(key(2).hex().encode()[:9])
    roots_file.append(file, key(3), b"key:3")
    roots_file.append(file, key(4), b"key:4")
    assert list(roots_file.read(file, 9)) == [key(1), key(3), key(4)]

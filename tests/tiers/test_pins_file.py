from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.pages import key
from tierd.tiers import pins_file


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "pinned.json"
    pins_file.write(file, {key(1), key(2)}, {key(3): 77.5})
    assert pins_file.read(file) == ({key(1), key(2)}, {key(3): 77.5})
    assert file.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["pinned.json"]


def test_without_a_file_nothing_is_kept() -> None:
    pins_file.write(None, {key(1)}, {})
    assert pins_file.read(None) == (set(), {})


def test_the_older_form_is_read(tmp_path: Path) -> None:
    file = tmp_path / "pinned.json"
    file.write_text(f'["{key(1).hex()}"]')
    assert pins_file.read(file) == ({key(1)}, {})


@pytest.mark.parametrize("text", ["", "{", "3", "{}", '{"pinned": ["zz"], "until_s": {}}', '["ab"]'])
def test_a_damaged_file_holds_no_pins(tmp_path: Path, text: str) -> None:
    file = tmp_path / "pinned.json"
    file.write_text(text)
    assert pins_file.read(file) == (set(), {})


def test_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    pins_file.write(tmp_path / "gone" / "pinned.json", {key(1)}, {})

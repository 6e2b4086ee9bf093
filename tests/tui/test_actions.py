"""Questions say what will happen, and to how much."""

from __future__ import annotations

import pytest

from tierd.daemon.errors import BadRequest
from tierd.tui import actions
from tierd.tui.snapshot import Snapshot
from tierd.tui.wire import EngineReport, PrefixRow

SNAPSHOT = Snapshot(engine=EngineReport(model="m", state="ready"))


def test_a_question_about_a_prefix_names_its_text_and_size() -> None:
    row = PrefixRow(b"\xab" * 16, -1, 2048, 3, 1 << 20, 0, 1 << 20, 0.0, False, "", "Call me\nIshmael")
    request = actions.on_prefix("drop", row, SNAPSHOT)
    assert "“Call me Ishmael”, 2048 tokens, 2.1 MB?" in request.question
    assert request.args == {"model": "m", "action": "drop", "id": "ab" * 16}


def test_a_prefix_without_a_text_is_named_by_its_key() -> None:
    row = PrefixRow(b"\xab" * 16, -1, 1, 1, 0, 0, 0, 0.0, False, "", "")
    assert "abababababab" in actions.on_prefix("pin", row, SNAPSHOT).question


@pytest.mark.parametrize(("wanted", "number"), [("1GiB", 1 << 30), ("2GB", 2_000_000_000), ("0", 0)])
def test_sizes_are_written_as_in_the_settings(wanted: str, number: int) -> None:
    assert actions.resize("host", wanted, SNAPSHOT).args == {"model": "m", "host_bytes": number}


@pytest.mark.parametrize("wanted", ["", "many", "-1", "auto"])
def test_what_is_no_size_is_refused(wanted: str) -> None:
    with pytest.raises(BadRequest):
        actions.resize("device", wanted, SNAPSHOT)

"""Wire structs: lenient about news, strict about kinds."""

from __future__ import annotations

import msgspec
import pytest

from tests.tui.scenes import prefixes
from tierd.daemon.errors import ProtocolError
from tierd.tui.wire import DaemonReport, PrefixRow, TopAnswer, convert, prefix_rows


def test_an_empty_answer_reports_nothing() -> None:
    answer = convert({}, TopAnswer)
    assert answer.maps == () and answer.sequences is None and answer.prefixes is None and answer.events is None


def test_fields_of_a_newer_daemon_are_ignored() -> None:
    assert convert({"pid": 3, "moon": "full"}, DaemonReport).pid == 3


@pytest.mark.parametrize("data", [{"pid": "x"}, {"engines": [{"running": "many"}]}, {"queue": None}])
def test_a_wrong_kind_names_its_place(data: object) -> None:
    with pytest.raises(ProtocolError, match=r"\$"):
        convert(data, DaemonReport)


def test_rows_come_back_as_they_were() -> None:
    table = prefixes(5)
    assert table.rows is not None
    assert msgspec.msgpack.encode(prefix_rows(table.rows)) == table.rows


@pytest.mark.parametrize("packed", [b"", b"\x91", b"\x91\x90", b"\x91" * 4000, b"\x81\x01\x02"])
def test_rows_that_are_none_are_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        prefix_rows(packed)


def test_a_child_before_its_parent_is_refused() -> None:
    row = PrefixRow(b"k", 0, 1, 1, 1, 1, 1, 0.0, False, "", "")
    with pytest.raises(ProtocolError, match="before its parent"):
        prefix_rows(msgspec.msgpack.encode((row,)))

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest

from tierd.daemon.engine import turns
from tierd.daemon.engine.turns import Turn, Turns, after, start
from tierd.daemon.protocol import Message, Tool, ToolCall

ONE, TWO = Turn((1, 70_000, 3), "assistant\n\u00e9", False), Turn((4,), "", True)
A, B = b"a" * 16, b"b" * 16


def digest(*messages: Message, salt: bytes = b"", tools: tuple[Tool, ...] = ()) -> bytes:
    found = start(salt, tools)
    for message in messages:
        found = after(found, message)
    return found


CALL = Message("assistant", "x", tool_calls=(ToolCall("1", "f", '{"a": 1, "b": [2]}'),))


def test_what_clients_change_without_meaning_it_does_not_count() -> None:
    same = Message("assistant", " x\n", thinking="hm", tool_calls=(ToolCall("other", "f", '{"b":[2],"a":1}'),))
    assert digest(CALL) == digest(same)
    result = Message("tool", "7", tool_call_id="1", name="f")
    assert digest(CALL, result) == digest(CALL, Message("tool", "7", tool_call_id="9"))


@pytest.mark.parametrize(
    "other",
    [
        digest(Message("assistant", "y", tool_calls=CALL.tool_calls)),
        digest(Message("assistant", "x")),
        digest(Message("assistant", "x", tool_calls=(ToolCall("1", "f", '{"a": 2, "b": [2]}'),))),
        digest(Message("assistant", "x", tool_calls=(ToolCall("1", "g", '{"a": 1, "b": [2]}'),))),
        digest(Message("user", "x", tool_calls=CALL.tool_calls)),
        digest(Message("user", "before"), CALL),
        digest(CALL, salt=b"tenant"),
        digest(CALL, tools=(Tool("f"),)),
    ],
)
def test_everything_else_does(other: bytes) -> None:
    assert other != digest(CALL)


def test_a_user_may_mean_white_space() -> None:
    assert digest(Message("user", "x")) != digest(Message("user", "x "))


def test_turns_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / turns.FILE_NAME
    one = Turns(path)
    one.put(A, ONE)
    one.put(B, TWO)
    one.flush()  # and then it is killed
    two = Turns(path)
    assert two.get(A) == ONE and two.get(B) == TWO and len(two) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    one.close()
    two.close()


def test_the_least_recently_used_make_room_in_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / turns.FILE_NAME
    one = Turns(path, max_tokens=300)
    for number in range(5):
        one.put(bytes([number]) * 16, Turn((number,) * 30, "", False))
        one.flush()
        assert one.get(bytes(16)) is not None  # used each time
    assert len(one) == 3 and one.get(bytes([1]) * 16) is None
    one.close()
    two = Turns(path, max_tokens=300)
    assert len(two) == 3 and two.get(bytes([4]) * 16) is not None
    two.close()
    three = Turns(path, max_tokens=100)  # less than what the file holds
    assert len(three) == 1
    three.flush()
    three.close()
    assert sqlite3.connect(path).execute("SELECT count(*) FROM turns").fetchone() == (1,)


def test_a_tenant_with_many_turns_pushes_out_its_own(tmp_path: Path) -> None:
    path = tmp_path / turns.FILE_NAME
    one = Turns(path, max_tokens=1000)
    one.put(A, ONE, b"one")
    for number in range(50):
        one.put(bytes([number, 0]) * 8, Turn((number,) * 30, "", False), b"two")
    one.flush()
    one.close()
    two = Turns(path, max_tokens=1000)
    for number in range(50, 100):  # whose turns are whose is known after a restart, too
        two.put(bytes([number, 0]) * 8, Turn((number,) * 30, "", False), b"two")
    assert two.get(A) == ONE and two.get(bytes([99, 0]) * 8) is not None and 5 < len(two) < 15
    two.close()


def test_cleared_turns_are_gone_from_the_disk(tmp_path: Path) -> None:
    path = tmp_path / turns.FILE_NAME
    one = Turns(path)
    one.put(A, Turn((1,), "a secret tail", False))
    one.flush()
    one.clear()
    assert len(one) == 0
    one.close()
    assert b"secret" not in path.read_bytes()


def test_a_damaged_file_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / turns.FILE_NAME
    path.write_bytes(b"no database" * 1000)
    one = Turns(path)
    one.put(A, ONE)
    one.flush()
    one.close()
    two = Turns(path)
    assert two.get(A) == ONE
    two.close()


def test_without_a_file_they_are_kept_in_memory(tmp_path: Path) -> None:
    for path in (None, tmp_path / "nowhere" / turns.FILE_NAME):
        one = Turns(path)
        one.put(A, ONE)
        one.flush()
        assert one.get(A) == ONE
        one.clear()
        one.close()
        assert one.get(A) is None


def test_a_disk_that_fails_is_given_up(tmp_path: Path) -> None:
    one = Turns(tmp_path / turns.FILE_NAME)
    assert one._file is not None
    one._file.execute("DROP TABLE turns")
    one.put(A, ONE)
    one.flush()
    one.put(B, TWO)
    one.flush()
    assert one.get(A) == ONE and one.get(B) == TWO

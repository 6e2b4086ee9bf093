"""Recordings: what is written is what is read; what is no recording is told, and what was cut is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.scenes import busy, record
from tierd.daemon.errors import BadRequest
from tierd.tui.record import FORMAT, Recorder, Recording


def test_frames_come_back_as_they_were(tmp_path: Path) -> None:
    recording = Recording(record("busy", tmp_path / "r", 3))
    assert [recording.frame(place) for place in range(len(recording))] == [busy(at) for at in range(3)]
    recording.close()


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text("mine")
    with pytest.raises(BadRequest, match="exists"):
        Recorder(path)
    assert path.read_text() == "mine"


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot write"):
        Recorder(tmp_path / "no" / "r")


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x00\xff\n", b"{}\n", b'{"format":"other"}\n'])
def test_what_is_no_recording_is_told(tmp_path: Path, content: bytes, no_files_left: None) -> None:
    path = tmp_path / "r"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match="no recording"):
        Recording(path)


def test_a_recording_without_a_frame_is_told(tmp_path: Path) -> None:
    path = tmp_path / "r"
    Recorder(path).close()
    with pytest.raises(BadRequest, match="no whole frame"):
        Recording(path)


def test_every_cut_leaves_the_whole_frames_before_it(tmp_path: Path) -> None:
    whole = record("idle", tmp_path / "r", 3).read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for cut in [ends[1] + 1, ends[2] - 1, ends[2], ends[3] - 1]:
        (tmp_path / "cut").write_bytes(whole[:cut])
        recording = Recording(tmp_path / "cut")
        assert len(recording) == sum(end <= cut for end in ends[1:])
        assert recording.cut is (cut not in ends)
        recording.close()


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"at_s":"x"}', b'{"at_s":1,"daemon":{"pid":"x"}}', b"[" * 5000])
def test_a_frame_that_cannot_be_read_names_its_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "r"
    path.write_bytes(b'{"format":"%s"}\n' % FORMAT.encode() + line + b"\n")
    recording = Recording(path)
    with pytest.raises(BadRequest, match="line 2"):
        recording.frame(0)
    recording.close()


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot read"):
        Recording(tmp_path / "none")

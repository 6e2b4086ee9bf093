"""Recorded feeds: one JSON document a line. The first names the format, each further one is a whole frame."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import msgspec

from tierd.daemon.errors import BadRequest, OutOfSpace
from tierd.tui.snapshot import ArenaMap, Snapshot
from tierd.tui.wire import DaemonReport, EventRow, PageMap, PrefixTable, TopAnswer

FORMAT = "tierd-top-1"
MAX_LINE_BYTES = 64 << 20
MAX_FRAMES = 1_000_000


class Head(msgspec.Struct, frozen=True):
    """The first line."""

    format: str


class Frame(msgspec.Struct, frozen=True):
    """What the daemon said at one moment. Page maps are whole."""

    at_s: float
    daemon: DaemonReport
    top: TopAnswer | None = None
    wall_s: float | None = None
    ops: tuple[str, ...] = ()
    log: tuple[EventRow, ...] | None = None  # what happened to the daemon since the frame before


def frame_of(
    snapshot: Snapshot, answer: TopAnswer | None, wall_s: float | None, log: tuple[EventRow, ...] | None = None
) -> Frame:
    """A frame that stands alone: with the maps and the rows that the snapshot holds."""
    top = None
    if answer is not None:
        table = None
        if snapshot.prefixes is not None:
            table = PrefixTable(
                snapshot.prefixes_version, msgspec.msgpack.encode(snapshot.prefixes), snapshot.prefixes_total
            )
        maps = tuple(_whole(held) for held in snapshot.maps)
        top = msgspec.structs.replace(answer, maps=maps, prefixes=table)
    return Frame(snapshot.at_s, snapshot.daemon, top, wall_s, tuple(sorted(snapshot.ops)), log)


def _whole(held: ArenaMap) -> PageMap:
    return PageMap(
        held.tier, held.version, slots=held.slots, cells=held.cells, used=held.used.tobytes(),
        owners=held.owners.tobytes(), prefixes=held.prefixes.tobytes(),
    )  # fmt: skip


class Recorder:
    """Appends frames to a new file. Every line is whole when `write` returns, whatever ends the process later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: BinaryIO = path.open("xb")
        except FileExistsError:
            raise BadRequest(f"{path} exists", hint="name a new file to record to", param="record") from None
        except OSError as exc:
            raise BadRequest(f"cannot write {path}: {exc.strerror}", param="record") from None
        self._write(Head(FORMAT))

    def write(self, frame: Frame) -> None:
        """Append a frame. Raises OutOfSpace when the disk does not take it."""
        self._write(frame)

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._file.close()

    def _write(self, what: msgspec.Struct) -> None:
        try:
            self._file.write(msgspec.json.encode(what) + b"\n")
            self._file.flush()
        except OSError as exc:
            raise OutOfSpace(f"cannot write {self._path}: {exc.strerror}") from None


class Recording:
    """A recorded file. Only the place of each line is held; a frame is read when it is asked for.

    Raises BadRequest for a file that is none. A last line without an end was being written when its writer died: it is
    left out, and `cut` says so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut = False
        self._starts: list[tuple[int, int]] = []
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as exc:
            raise BadRequest(f"cannot read {path}: {exc.strerror}", param="replay") from None
        try:
            self._index()
        except BaseException:
            self._file.close()
            raise

    def _index(self) -> None:
        first = self._file.readline(MAX_LINE_BYTES)
        try:
            head = msgspec.json.decode(first, type=Head)
        except msgspec.DecodeError:
            head = Head("")
        if head.format != FORMAT:
            said = f" (it says {head.format[:32]!r})" if head.format else ""
            raise BadRequest(f"{self.path} is no recording of `tierd top`{said}", param="replay")
        place = len(first)
        while line := self._file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    raise BadRequest(f"{self.path}: a frame is larger than {MAX_LINE_BYTES} bytes", param="replay")
                self.cut = True
                break
            self._starts.append((place, len(line)))
            if len(self._starts) > MAX_FRAMES:
                raise BadRequest(f"{self.path} holds more than {MAX_FRAMES} frames", param="replay")
            place += len(line)
        if not self._starts:
            raise BadRequest(f"{self.path} holds no whole frame", param="replay")

    def __len__(self) -> int:
        return len(self._starts)

    def frame(self, place: int) -> Frame:
        """The frame at `place`. Raises BadRequest that names the line."""
        start, length = self._starts[place]
        self._file.seek(start)
        try:
            return msgspec.json.decode(self._file.read(length), type=Frame)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise BadRequest(f"{self.path}, line {place + 2}: {exc}", param="replay") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

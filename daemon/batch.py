"""Files of requests and of their answers in OpenAI's batch format: read, put in order, appended, taken up again.

A line of the input is `{"custom_id", "method": "POST", "url", "body"}`, one of the output `{"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}`. Lines of the output stand in the order in which their
requests ended. Of the input some 250 bytes a line are kept, never a body. No network, no clock.

The `id` of a line of the output is made from the request (its custom_id, url, body, and the model that replaces its
own), so that an output file is only ever continued with the input that it belongs to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec

from tierd.daemon.errors import BadRequest, Conflict, NotFound, OutOfSpace, PermissionDenied, TierdError
from tierd.daemon.protocol import MAX_FRAME_BYTES

CHAT_URL, COMPLETION_URL, EMBEDDING_URL = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
URLS = (CHAT_URL, COMPLETION_URL, EMBEDDING_URL)
ID_PREFIX = "batch_req_"
MAX_LINE_BYTES = MAX_FRAME_BYTES  # what is longer cannot be sent
MAX_PROBLEMS = 20  # that are told of one file; the others are counted
_ID_BYTES = 12
_MARKS = [int(64 * 1.25**step) for step in range(32)]  # bytes of a prompt, 64 to 64 Ki: see `_order`
_SUM_BITS = 0xFFFF
_PLACE = struct.Struct(">QII")  # offset, bytes, line number: equal prompts stay in the order of the file
_OWN_LINE = b'{"id":"' + ID_PREFIX.encode()


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def _none() -> msgspec.Raw:
    return msgspec.Raw(b"")


class _Head(msgspec.Struct):
    """What of a body its place depends on, as it is written."""

    model: msgspec.Raw = msgspec.field(default_factory=_none)
    tools: msgspec.Raw = msgspec.field(default_factory=_none)
    messages: msgspec.Raw = msgspec.field(default_factory=_none)
    prompt: msgspec.Raw = msgspec.field(default_factory=_none)
    input: msgspec.Raw = msgspec.field(default_factory=_none)


class _Written(msgspec.Struct):
    """What is read back of a line of the output."""

    id: str
    custom_id: str


class Item(NamedTuple):
    """One request of the input."""

    number: int  # its line
    id: str
    custom_id: str
    url: str
    body: bytes


class Problem(NamedTuple):
    """A line that cannot be used, and why."""

    number: int
    what: str


class Response(msgspec.Struct):
    """What HTTP would have answered."""

    status_code: int
    request_id: str
    body: Any


class Fault(msgspec.Struct):
    """Why a request has no answer."""

    code: str
    message: str


class Answer(msgspec.Struct):
    """A line of the output. A request that failed has its status and body in `response`, and `error` too."""

    id: str  # first: `Output` knows its own lines by it
    custom_id: str
    response: Response | None  # None: it was never asked
    error: Fault | None = None


class Requests:
    """The requests of an input file that have no answer yet, those with a common prefix next to each other.

    Iterating reads one line at a time. Raises Conflict when the file changed since it was looked through.
    """

    def __init__(self, path: Path, finished: dict[bytes, str], model: str | None = None, max_lines: int = 0) -> None:
        """Look through the file. `finished`: see `Output`; `model` replaces the one that a body names; `max_lines`: no
        further than that, 0 is no limit.

        Raises NotFound, PermissionDenied, BadRequest for what is no file, Conflict when `finished` holds others.
        """
        self.total = 0  # usable lines
        self.models: dict[str, int] = {}  # that bodies name: the first line of each
        self.urls: dict[str, int] = {}  # the first line of each
        self.problems: list[Problem] = []  # the first of them
        self.problem_count = 0
        self.is_too_long = False  # it has more lines
        self._model = model
        self._places: list[bytes] = []
        self._file = _open_input(path)
        try:
            self._stamp = self._stamped()
            self._scan(finished, max_lines)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        """Requests without an answer."""
        return len(self._places)

    def __iter__(self) -> Iterator[Item]:
        for place in self._places:
            offset, length, number = _PLACE.unpack(place[-_PLACE.size :])
            if self._stamped() != self._stamp:
                raise Conflict(f"{self._file.name} was changed while its requests ran", hint="run the command again")
            self._file.seek(offset)
            yield self._item(number, _decoded(self._file.read(length)))

    def _stamped(self) -> tuple[int, int]:
        info = os.fstat(self._file.fileno())
        return info.st_size, info.st_mtime_ns

    def _scan(self, finished: dict[bytes, str], max_lines: int) -> None:
        seen: dict[bytes, int] = {}
        found = 0
        for number, offset, line in _lines(self._file):
            if 0 < max_lines < number:
                self.is_too_long = True
                break
            if not line.strip():
                continue
            try:
                if len(line) > MAX_LINE_BYTES:
                    raise BadRequest(f"has more than {MAX_LINE_BYTES >> 20} MiB")
                given = _decoded(line)
                key = key_of(given.custom_id)
                if (first := seen.setdefault(key, number)) != number:
                    raise BadRequest(f"custom_id {_quoted(given.custom_id)} is that of line {first} too")
                item = self._item(number, given)
                if (written := finished.get(key)) is not None:
                    found += 1
                    if written != item.id:
                        raise BadRequest(f"custom_id {_quoted(item.custom_id)} has the answer to another request")
                else:
                    self._add(item, offset, len(line))
                self.total += 1
                self.urls.setdefault(item.url, number)
            except BadRequest as exc:
                self.problem_count += 1
                if len(self.problems) < MAX_PROBLEMS:
                    self.problems.append(Problem(number, exc.message))
        if found < len(finished) and not self.problem_count and not self.is_too_long:
            raise Conflict(
                f"the output holds {len(finished) - found} answers to requests that {self._file.name} does not have",
                hint="it belongs to another input: name another output",
            )
        self._places.sort()

    def _add(self, item: Item, offset: int, length: int) -> None:
        head = msgspec.json.decode(item.body, type=_Head)
        model = self._model
        if model is None:
            with contextlib.suppress(msgspec.DecodeError):  # another type, or none: told when the request runs
                model = msgspec.json.decode(head.model, type=str)
                self.models.setdefault(model, item.number)
        prompt = bytes(head.tools) + bytes(head.messages) + bytes(head.prompt) + bytes(head.input)
        self._places.append(_order(model or "", prompt) + _PLACE.pack(offset, length, item.number))

    def _item(self, number: int, given: _Line) -> Item:
        body = bytes(given.body)
        parts = (given.custom_id.encode(), given.url.encode(), (self._model or "").encode(), body)
        digest = hashlib.blake2b(b"".join(len(part).to_bytes(8, "big") + part for part in parts), digest_size=_ID_BYTES)
        return Item(number, ID_PREFIX + digest.hexdigest(), given.custom_id, given.url, body)


class Output:
    """The file of answers. Each line is on the disk before `append` returns; a line that was cut is dropped at the
    next opening. Two processes cannot have one open at once. Threading: one thread.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Open or create it and read back what is finished. `mode`: of a new one, less what the umask takes.

        Raises Conflict when another process has it, or when it holds something else; PermissionDenied, OutOfSpace.
        """
        self.path = path
        self.finished: dict[bytes, str] = {}  # `key_of` its custom_id -> its id
        self._created = not path.exists()
        self._fault: TierdError | None = None
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, mode)
        except OSError as exc:
            raise _file_error(path, exc) from None
        self._file = open(fd, "r+b", buffering=0)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BadRequest(f"{path} is no regular file", hint="answers are read back from it: name a file")
            self._lock()
            self._read_back()
            if self._created:
                _sync_directory(path.parent)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if self._created and not os.fstat(self._file.fileno()).st_size:
                self.path.unlink(missing_ok=True)  # nothing ran

    def append(self, answer: Answer) -> None:
        """Write one line and wait until the disk has it. Raises what `write` does."""
        self.write(lines_of([answer]))

    def write(self, lines: bytes) -> None:
        """Write what `lines_of` made; the disk has it then. Raises OutOfSpace, and TierdError for another fault of it.

        After a fault nothing more is written: a line behind a half one would make both unreadable.
        """
        if self._fault is not None:
            raise self._fault
        left = memoryview(lines)
        try:
            while left:
                left = left[os.write(self._file.fileno(), left) :]
            os.fdatasync(self._file.fileno())
        except OSError as exc:
            self._fault = _file_error(self.path, exc)
            raise self._fault from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another `tierd batch` writes {self.path}", hint="wait, or name another output") from None

    def _read_back(self) -> None:
        """Fill `finished`; cut what a killed process left of its last line."""
        whole = 0
        with open(self.path, "rb") as reader:
            for number, offset, line in _lines(reader, None):
                if not line.endswith(b"\n"):
                    # Zeros are what a power cut can leave of a line. Anything else is not ours to cut.
                    rest = line.strip(b"\0")
                    if not (rest.startswith(_OWN_LINE) or _OWN_LINE.startswith(rest)):
                        raise self._foreign(number)
                    break
                whole = offset + len(line)
                if not line.startswith(_OWN_LINE):
                    raise self._foreign(number)
                try:
                    written = msgspec.json.decode(line, type=_Written)
                except (msgspec.DecodeError, UnicodeError):
                    raise self._foreign(number) from None
                self.finished[key_of(written.custom_id)] = written.id
        self._file.truncate(whole)

    def _foreign(self, number: int) -> Conflict:
        return Conflict(
            f"line {number} of {self.path} was not written by `tierd batch`", hint="name another output with -o"
        )


def lines_of(answers: Iterable[Answer]) -> bytes:
    """The lines of some answers."""
    return b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers)


def key_of(custom_id: str) -> bytes:
    """A custom_id in 16 bytes, however long it is."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def _order(model: str, prompt: bytes) -> bytes:
    """A key in whose order prompts with a common beginning stand together, without keeping any prompt.

    One checksum of everything up to each mark: prompts that agree up to a mark agree in all of the key before it, so
    the groups nest like the prompts. A collision mixes two groups that part between two marks, no more.
    """
    total, start = zlib.crc32(model.encode()), 0
    sums = [total & _SUM_BITS]
    for mark in _MARKS:
        if len(prompt) < mark:
            break
        total, start = zlib.crc32(prompt[start:mark], total), mark
        sums.append(total & _SUM_BITS)
    sums += [0] * (1 + len(_MARKS) - len(sums))
    return struct.pack(f">{len(sums)}H", *sums)


def _decoded(line: bytes) -> _Line:
    """A line of the input, checked but for what is in its body. Raises BadRequest."""
    try:
        given = msgspec.json.decode(line, type=_Line)
        if bytes(given.body).lstrip()[:1] != b"{":
            raise BadRequest("body is not an object")
        msgspec.json.decode(given.body, type=_Head)
    except msgspec.ValidationError as exc:
        raise BadRequest(str(exc).replace("`", "")) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise BadRequest("is not valid JSON") from None
    if given.method != "POST":
        raise BadRequest(f"method {_quoted(given.method)} is not POST")
    if given.url not in URLS:
        raise BadRequest(f"url {_quoted(given.url)} is not served: it is one of {', '.join(URLS)}")
    return given


def _lines(file: BinaryIO, limit: int | None = MAX_LINE_BYTES) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, line with its end); one over the limit is given cut, one byte longer than it may be."""
    number = offset = 0
    while line := file.readline(-1 if limit is None else limit + 1):
        number += 1
        length, rest = len(line), line
        while limit is not None and len(rest) > limit and not rest.endswith(b"\n"):
            rest = file.readline(limit + 1)
            length += len(rest)
        yield number, offset, line
        offset += length


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 64 else text[:61] + "...")


def _open_input(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a pipe that nobody writes would wait for ever
            raise BadRequest(f"{path} is no regular file", hint="its lines are read more than once: name a file")
        return open(path, "rb")
    except OSError as exc:
        raise _file_error(path, exc) from None


def _file_error(path: Path, exc: OSError) -> TierdError:
    match exc:
        case FileNotFoundError():
            return NotFound(f"there is no {path if path.parent.is_dir() else path.parent}", hint="is the path right?")
        case PermissionError() | OSError(errno=errno.EROFS):
            return PermissionDenied(f"no permission for {path}: {exc.strerror}", hint="choose another, or see `ls -l`")
        case IsADirectoryError():
            return BadRequest(f"{path} is a directory", hint="name a file")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return OutOfSpace(f"no space is left for {path}", hint="make room and run the same command: it goes on")
        case _:
            return TierdError(f"{path}: {exc.strerror or exc}", hint="run the same command again: it goes on")


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

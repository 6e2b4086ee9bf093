"""The wire: frames and messages between clients, front and engine. Sans I/O: bytes in, messages out.

A frame is a 4-byte big-endian length and a msgpack map. A request map holds `v` (protocol version), `id` (chosen by the
sender, echoed in every answer) and `op`; an answer holds `v`, `id` and `ev`. Requests end with exactly one terminal
event: `result` (a simple call), or for a generation `done`, `refused`, `aborted`, `failed`. No msgpack ext types.

Imports neither torch nor sockets, so that a client needs nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from tierd.daemon.errors import BadRequest, ProtocolError, TierdError, Unsupported, from_wire, suggest
from tierd.daemon.generation import Format as Format
from tierd.daemon.generation import Keep as Keep
from tierd.daemon.generation import Message as Message
from tierd.daemon.generation import Sampling as Sampling
from tierd.daemon.generation import Submit as Submit
from tierd.daemon.generation import Timings as Timings
from tierd.daemon.generation import Tool as Tool
from tierd.daemon.generation import ToolCall as ToolCall
from tierd.daemon.generation import Usage as Usage

VERSION = 1
HEADER_BYTES = 4
MAX_FRAME_BYTES = 16 << 20
MAX_DEPTH = 64
MAX_VALUES = 1 << 20  # in one frame: a value of one byte on the wire becomes an object of 50 bytes and more


class Request(msgspec.Struct, omit_defaults=True):
    """A request frame. `args` depends on `op`; for `generate` it is a `Submit`."""

    id: int
    op: str
    args: dict[str, Any] = {}
    v: int = VERSION


class Event(msgspec.Struct, omit_defaults=True):
    """An answer frame. Under id 0 it is about the connection or the engine itself, not about a request.

    `ev`: `accepted` {prompt_tokens, cached_tokens, and for a request with `keep` how much of the prompt each of them
    covers: keep_tokens [...]}; `text` {text, tokens} and, where there is something to say,
    `thinking` (text of the model's reasoning), `calls` [{index, id, name, arguments}: pieces of tool calls, id and
    name only in the first of a call], `logprobs` [{token, text, bytes, logprob, top: [{token, text, bytes, logprob}]}:
    one for each of `tokens`], `choice` (which of several answers); `choice` {choice, finish, stop}: one of several
    answers has ended; `progress` {stage, done, total, text}, of the stage `prompt` in tokens;
    terminal: `done` {finish: stop|length|tool_calls, stop (the stop string, if one was found), usage, timings},
    `refused` {code, message}, `aborted` {usage}, `failed` {code, message}, `result` {anything, by op}.
    """

    id: int
    ev: str
    data: dict[str, Any] = {}
    v: int = VERSION


PROMPT = "prompt"  # the stage of progress while a prompt is computed
TERMINAL = frozenset({"done", "refused", "aborted", "failed", "result"})


def encode(message: Request | Event, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """One frame. Structs inside `args` or `data` (a `Submit`, a `Usage`) are written as maps.

    Raises ProtocolError for a message that no receiver would accept: the sender hears it and not the peer.
    """
    body: dict[str, Any] = {"v": message.v, "id": message.id}
    match message:
        case Request():
            body["op"] = message.op
            if message.args:
                body["args"] = message.args
        case Event():
            body["ev"] = message.ev
            if message.data:
                body["data"] = message.data
    payload = msgspec.msgpack.encode(body)
    if len(payload) > max_frame_bytes:
        raise ProtocolError(f"message of {len(payload)} bytes, a frame holds {max_frame_bytes}")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameDecoder:
    """Bytes of one direction of one connection, in any pieces, to message maps.

    Never holds more than one frame of `max_frame_bytes` plus the piece just fed. After a fault the stream has lost
    its rhythm: every later `feed` raises the same error, and the connection must be closed. Threading: one thread.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._fault: ProtocolError | None = None
        self.salvaged: list[dict[str, Any]] = []
        """Whole messages that came before the fault in the same piece: valid, whatever the cut of the pieces was."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes of a frame that is not whole yet. At the end of a stream anything but 0 means that it was cut."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The maps of all frames that are whole now. Raises ProtocolError that names what is wrong."""
        if self._fault is not None:
            raise self._fault
        self._buffer += data
        messages: list[dict[str, Any]] = []
        start = 0
        try:
            while len(self._buffer) - start >= HEADER_BYTES:
                # The length is judged before its bytes are waited for: a huge one costs nothing.
                length = int.from_bytes(self._buffer[start : start + HEADER_BYTES], "big")
                if length > self._max_frame_bytes:
                    raise ProtocolError(f"frame of {length} bytes, the limit is {self._max_frame_bytes}")
                stop = start + HEADER_BYTES + length
                if len(self._buffer) < stop:
                    break
                messages.append(decode_payload(bytes(self._buffer[start + HEADER_BYTES : stop])))
                start = stop
        except ProtocolError as exc:
            self._fault = exc
            self._buffer.clear()
            self.salvaged = messages
            raise
        del self._buffer[:start]
        return messages


def decode_payload(payload: bytes) -> dict[str, Any]:
    """The map in one frame, checked: structure, depth, number of values, version. Raises ProtocolError."""
    check_structure(payload)
    try:
        message = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError) as exc:
        # The structure is sound by now; what is left is text that is not UTF-8. msgspec's words hold no content.
        raise ProtocolError(f"frame cannot be decoded: {exc}") from None
    if not isinstance(message, dict):
        raise ProtocolError("frame is not a map")
    version = message.get("v")
    if type(version) is not int or version != VERSION:
        said = version if type(version) is int else "none"
        raise ProtocolError(f"protocol version {said}, this side speaks {VERSION}", hint="update the older side")
    return message


def _tables() -> tuple[bytes, bytes]:
    """Per first byte of a msgpack value: its kind, and the bytes of the value or of its length field."""
    kinds, sizes = bytearray(256), bytearray(256)
    plan: list[tuple[range, int, int]] = [
        (range(0x00, 0x80), _INT, 1), (range(0x80, 0x90), _MAP, 0), (range(0x90, 0xA0), _ARRAY, 0),
        (range(0xA0, 0xC0), _STR, 0), (range(0xC0, 0xC1), _SCALAR, 1), (range(0xC1, 0xC2), _BAD, 0),
        (range(0xC2, 0xC4), _SCALAR, 1), (range(0xC7, 0xCA), _EXT, 0), (range(0xCA, 0xCB), _SCALAR, 5),
        (range(0xCB, 0xCC), _SCALAR, 9), (range(0xD4, 0xD9), _EXT, 0), (range(0xE0, 0x100), _INT, 1),
    ]  # fmt: skip
    for codes, kind, size in plan:
        for code in codes:
            kinds[code], sizes[code] = kind, size
    for power in range(4):
        for first in (0xCC, 0xD0):
            kinds[first + power], sizes[first + power] = _INT, 1 + (1 << power)
    for power in range(3):
        kinds[0xC4 + power], sizes[0xC4 + power] = _BIN, 1 << power
        kinds[0xD9 + power], sizes[0xD9 + power] = _STR, 1 << power
    for power in range(2):
        kinds[0xDC + power], sizes[0xDC + power] = _ARRAY, 2 << power
        kinds[0xDE + power], sizes[0xDE + power] = _MAP, 2 << power
    return bytes(kinds), bytes(sizes)


_SCALAR, _INT, _STR, _BIN, _ARRAY, _MAP, _EXT, _BAD = range(8)
_KINDS, _SIZES = _tables()
_SHORT_MASK = {_STR: 0x1F, _ARRAY: 0x0F, _MAP: 0x0F}


def check_structure(data: bytes, max_depth: int = MAX_DEPTH, max_values: int = MAX_VALUES) -> None:
    """Walk msgpack bytes without making objects; raises ProtocolError unless they are exactly one sound value.

    No decoder has all of these limits: depth, number of values (a 16 MiB frame of empty arrays would become 900 MB of
    lists), keys that are text or integers, no ext types (msgspec turns -1 into a datetime), no bytes left over.
    About 0.2 us per value.
    """
    end, pos, values = len(data), 0, 0
    outer: list[tuple[int, bool]] = []
    left, in_map = 1, False
    while True:
        while left == 0:
            if not outer:
                if pos != end:
                    raise ProtocolError(f"{end - pos} bytes after the end of the message")
                return
            left, in_map = outer.pop()
        if pos >= end:
            raise ProtocolError("frame ends inside a value")
        first = data[pos]
        kind = _KINDS[first]
        if in_map and left % 2 == 0 and kind not in (_STR, _INT):
            raise ProtocolError("a map key is neither text nor an integer")
        left -= 1
        if kind <= _INT:
            pos += _SIZES[first]
            if pos > end:
                raise ProtocolError("frame ends inside a value")
            continue
        if kind >= _EXT:
            raise ProtocolError("ext types are not part of the protocol" if kind == _EXT else "byte 0xc1 is no value")
        head = _SIZES[first]
        length = int.from_bytes(data[pos + 1 : pos + 1 + head], "big") if head else first & _SHORT_MASK[kind]
        pos += 1 + head
        if kind in (_STR, _BIN):
            pos += length
        else:
            length *= 2 if kind == _MAP else 1
            values += length
            if values > max_values:
                raise ProtocolError(f"more than {max_values} values in one frame")
            outer.append((left, in_map))
            if len(outer) > max_depth:
                raise ProtocolError(f"nested more than {max_depth} levels deep")
            left, in_map = length, kind == _MAP
        if pos > end:
            raise ProtocolError("frame ends inside a value")


_M = TypeVar("_M", Request, Event)


def to_request(message: Mapping[str, Any]) -> Request:
    """A request from a decoded map. Raises BadRequest; the caller can answer it under `message["id"]`."""
    return _envelope(message, Request)


def to_event(message: Mapping[str, Any]) -> Event:
    """An event from a decoded map. Raises BadRequest. Events with names we do not know pass: receivers ignore them."""
    return _envelope(message, Event)


def _envelope(message: Mapping[str, Any], cls: type[_M]) -> _M:
    if unknown := message.keys() - set(cls.__struct_fields__):
        raise BadRequest(f"unknown field {_shown(unknown.pop())} beside {', '.join(cls.__struct_fields__)}")
    try:
        converted = msgspec.convert(message, cls, strict=True)
    except msgspec.ValidationError as exc:
        raise _bad_field(str(exc), "message") from None
    if not 0 <= converted.id < 1 << 63:
        raise BadRequest("id must be an integer from 0 to 2**63 - 1", param="id")
    return converted


def error_of(event: Event) -> TierdError | None:
    """The typed error of a `refused` or `failed` event, None for all others."""
    return from_wire(event.data) if event.ev in ("refused", "failed") else None


def generate_request(request_id: int, submit: Submit) -> Request:
    """The frame that starts a generation."""
    return Request(id=request_id, op="generate", args=msgspec.to_builtins(submit))


def cancel_request(request_id: int, target: int) -> Request:
    """The frame that stops the request `target` of this connection."""
    return Request(id=request_id, op="cancel", args={"target": target})


_FRONT_ONLY = ("tenant", "quota_pages", "resume")


def to_submit(args: Mapping[str, Any], *, from_client: bool = False) -> Submit:
    """The typed form of the arguments of `generate`.

    `from_client`: refuse the fields that only the front may set. Raises Unsupported for an option that does not exist,
    BadRequest for a value of a wrong type; both name the field in `param`.
    """
    if from_client:
        for name in _FRONT_ONLY:
            if name in args:
                raise Unsupported(f"{name!r} is set by the daemon, not by clients", param=name)
    try:
        return msgspec.convert(args, Submit, strict=True)
    except msgspec.ValidationError as exc:
        raise _bad_field(str(exc), "request") from None


_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`(?: - at `\$(.*)`)?$", re.DOTALL)
_WRONG = re.compile(r"(.*) - at (?:`key` in )?`\$(.*)`$", re.DOTALL)


def _bad_field(text: str, what: str) -> BadRequest:
    """msgspec's sentence as an error that names the field the way a user writes it: `sampling.top_k`."""
    if found := _UNKNOWN.match(text):
        name = _dotted(found[2], found[1])
        known = [*Submit.__struct_fields__, *Sampling.__struct_fields__]
        return Unsupported(f"unknown option {_shown(name)}", hint=suggest(found[1][:64], known), param=name[:64])
    if found := _MISSING.match(text):
        name = _dotted(found[2], found[1])
        return BadRequest(f"{what} has no {name!r}", param=name)
    if found := _WRONG.match(text):
        name = _dotted(found[2], "")
        return BadRequest(f"{name or what}: {found[1].replace('`', '')}", param=name or None)
    return BadRequest(f"{what}: {text.replace('`', '')}")


def _dotted(parent: str | None, name: str) -> str:
    return ".".join(part for part in ((parent or "").strip("."), name) if part)


def _shown(name: object) -> str:
    """A name from outside, short enough for one line."""
    return repr(name if len(str(name)) <= 64 else str(name)[:61] + "...")

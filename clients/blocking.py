"""The blocking client: one plain socket, one request at a time."""

from __future__ import annotations

import socket
from array import array
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tierd.clients.common import (
    CALL_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    EVENT_TIMEOUT_S,
    LISTED,
    RECEIVE_BYTES,
    RESIZE_TIMEOUT_S,
    Input,
    connect_error,
    frame_of,
    lost_error,
    parts_of,
    silence_error,
)
from tierd.daemon.protocol import (
    TERMINAL,
    Event,
    FrameDecoder,
    Request,
    Submit,
    cancel_request,
    encode,
    error_of,
    generate_request,
    to_event,
)


class Client:
    """A connection to the daemon.

        with Client(path) as client:
            for event in client.generate(Submit(model="smollm2:135m", prompt="Hello")):
                ...

    Threading: one thread at a time. While a `generate` is being read, other requests on the same client raise
    RuntimeError; open a second client for them.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._socket: socket.socket | None = None
        self._decoder = FrameDecoder()
        self._arrived: deque[Event] = deque()
        self._last_id = 0
        self._streaming = False

    def connect(self) -> Self:
        """Open the connection. Raises DaemonUnreachable or PermissionDenied, each with a next step."""
        self.close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_TIMEOUT_S)
        try:
            sock.connect(str(self.path))
        except OSError as exc:
            sock.close()
            raise connect_error(self.path, exc) from None
        self._socket, self._decoder, self._streaming = sock, FrameDecoder(), False
        self._arrived.clear()
        return self

    def close(self) -> None:
        """Close the connection; the daemon stops what still runs on it. Closing twice is fine."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self if self._socket is not None else self.connect()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(
        self,
        op: str,
        *,
        on_progress: Callable[[Event], None] | None = None,
        wait_s: float = CALL_TIMEOUT_S,
        **args: Any,
    ) -> dict[str, Any]:
        """A simple request: the map of its `result`.

        `wait_s` bounds each wait for an answer; progress events go to `on_progress` and start it anew.
        Raises the daemon's error, DaemonUnreachable, TimedOut.
        """
        self._refuse_while_streaming()
        request = Request(id=self._next_id(), op=op, args=args)
        self._send(request)
        while True:
            event = self._receive(request.id, op, wait_s)
            if error := error_of(event):
                raise error
            if event.ev in TERMINAL:
                return event.data
            if event.ev == "progress" and on_progress is not None:
                on_progress(event)

    def prefixes(self, model: str | None = None, limit: int = LISTED) -> list[dict[str, Any]]:
        """Known prefixes, the one used last first: `id`, `text`, `tokens`, `pages`, by tier `device`, `host`, `nvme`,
        `hits`, `idle_s`, `pinned` (`wished`: by a request, not by hand), `in_use`, `parent`. Of the model used last,
        unless one is named."""
        answer = self.call("prefix", action="ls", model=model, limit=limit, wait_s=EVENT_TIMEOUT_S)
        return list(answer["prefixes"])

    def pin(self, prefix_id: str, model: str | None = None) -> int:
        """Keep a prefix: its pages are not evicted. Returns how many. `prefix_id` may be shortened, as in all three."""
        return self._on_prefix("pin", prefix_id, model)

    def unpin(self, prefix_id: str, model: str | None = None) -> int:
        """Let a prefix be evicted again, and those that go on from it. Returns how many pages."""
        return self._on_prefix("unpin", prefix_id, model)

    def drop(self, prefix_id: str, model: str | None = None) -> int:
        """Forget a prefix, and what goes on from it, in all tiers. Returns how many pages. Raises Conflict."""
        return self._on_prefix("drop", prefix_id, model)

    def embed(
        self, model: str, inputs: Sequence[Input], *, dimensions: int | None = None, wait_s: float = EVENT_TIMEOUT_S
    ) -> list[array[float]]:
        """A vector of unit length for each text, or list of token ids: float32, as many values as the model is wide.

        `dimensions`: only so many of them, of unit length again. Raises BadRequest that names the input.
        """
        vectors: list[array[float]] = []
        for part in parts_of(inputs):
            answer = self.call("embed", model=model, inputs=part, dimensions=dimensions, wait_s=wait_s)
            vectors += [array("f", one) for one in answer["vectors"]]
        return vectors

    def resize(
        self,
        model: str | None = None,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        timeout_s: float = RESIZE_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Change the memory of a loaded model while it works; the sizes then. Raises OutOfSpace that says what fits."""
        return self.call(
            "resize",
            wait_s=timeout_s + CALL_TIMEOUT_S,
            model=model,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            timeout_s=timeout_s,
        )

    def _on_prefix(self, action: str, prefix_id: str, model: str | None) -> int:
        answer = self.call("prefix", action=action, id=prefix_id, model=model, wait_s=EVENT_TIMEOUT_S)
        return int(answer["pages"])

    def generate(self, submit: Submit, *, wait_s: float = EVENT_TIMEOUT_S) -> Generator[Event, None, None]:
        """The events of one generation; the last one is `done` or `aborted`.

        `refused` and `failed` are raised as their error. Closing the iterator early (also by an exception such as
        KeyboardInterrupt in the loop) cancels the generation.
        """
        self._refuse_while_streaming()
        request = generate_request(self._next_id(), submit)
        self._streaming = True
        ended = True  # what was never sent needs no cancel
        try:
            self._send(request)
            ended = False
            while not ended:
                event = self._receive(request.id, "generate", wait_s)
                ended = event.ev in TERMINAL
                if error := error_of(event):
                    raise error
                yield event
        finally:
            self._streaming = False
            if not ended:
                self._cancel(request.id)

    def _cancel(self, target: int) -> None:
        # Nobody waits for the answer: late events of the target and this one's result are skipped by their ids.
        if self._socket is not None:
            try:
                self._socket.sendall(encode(cancel_request(self._next_id(), target)))
            except OSError:
                self.close()  # a daemon that is gone has stopped the generation as well

    def _refuse_while_streaming(self) -> None:
        if self._streaming:
            raise RuntimeError("a generation is being read on this client; use a second one")

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _send(self, request: Request) -> None:
        if self._socket is None:
            self.connect()
        assert self._socket is not None
        frame = frame_of(request)
        try:
            self._socket.settimeout(CONNECT_TIMEOUT_S)
            self._socket.sendall(frame)
        except TimeoutError:
            self.close()
            raise silence_error(request.op, CONNECT_TIMEOUT_S) from None
        except OSError:
            self.close()
            raise lost_error(self.path) from None

    def _receive(self, request_id: int, op: str, wait_s: float) -> Event:
        """The next event of this request. Events of earlier, cancelled requests are skipped."""
        while True:
            while self._arrived:
                event = self._arrived.popleft()
                if event.id == request_id:
                    return event
                if event.id == 0 and (fault := error_of(event)):  # about the connection, not about a request
                    self.close()
                    raise fault
            if self._socket is None:
                raise lost_error(self.path)
            try:
                self._socket.settimeout(wait_s)
                data = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError:
                raise silence_error(op, wait_s) from None
            except OSError:
                data = b""
            if not data:
                self.close()
                raise lost_error(self.path)
            self._arrived.extend(to_event(message) for message in self._decoder.feed(data))

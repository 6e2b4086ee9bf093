"""What real clients send, byte for byte, in sessions of theirs: each is answered as that client reads it.

The sessions stand in `sessions/`, written by hand after the clients' sources and documents: `about` says what the
client does. A request has its headers in the client's order and spelling; Host and Content-Length are those of the
test. The words with an exclamation mark are for the fake engine.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front_harness import until
from sdk_daemon import Served, served
from wire_rules import MEDIA, RULES

SESSIONS = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "sessions").glob("*"))}
WAIT_S = 30.0


class Connection:
    """One connection of a client that sends its next request on it, unless it said otherwise."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._sock: socket.socket | None = None

    def send(self, request: dict[str, Any]) -> http.client.HTTPResponse:
        """The answer, its body not read yet."""
        headers = {"Host": f"127.0.0.1:{self._port}"} | request["headers"]
        body = json.dumps(request["body"]).encode() if "body" in request else b""
        if body:
            headers["Content-Length"] = str(len(body))
        lines = [f"{request['method']} {request['path']} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        if self._sock is None:
            self._sock = socket.create_connection(("127.0.0.1", self._port), WAIT_S)
        self._sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        response = http.client.HTTPResponse(self._sock, method=request["method"])
        response.begin()
        if response.will_close:
            self._sock.close()  # the response holds it until it is read
            self._sock = None
        return response

    def close(self) -> None:
        """Leave, whatever was not read."""
        if self._sock is not None:
            self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()


def found(value: Any, dotted: str) -> bool:
    """Whether there is something, if only null, at a path such as `data.0.id`."""
    for name in dotted.split("."):
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def check(step: dict[str, Any], response: http.client.HTTPResponse) -> None:
    """Raises for an answer that the client could not use."""
    wanted = dict(step["answer"])
    text = response.read().decode()
    assert response.status == wanted.pop("status"), text
    assert response.getheader("Server") == "tierd"
    if kind := wanted.pop("stream", None):
        assert response.getheader("Content-Type", "").split(";")[0] == MEDIA[kind]
        told = RULES[kind](text)
        assert {name: told[name] for name in wanted} == wanted, text
    elif fields := wanted.pop("fields", ()):
        assert response.getheader("Content-Type", "").split(";")[0] == "application/json"
        missing = [name for name in fields if not found(json.loads(text), name)]
        assert not missing and not wanted, text


def changed(name: str, words: str) -> tuple[str, dict[str, Any]]:
    """The first streamed conversation of a client with other words for the engine, and its kind of stream."""
    for step in SESSIONS[name]["steps"]:
        text = json.dumps(step["request"].get("body"))
        if "stream" in step["answer"] and "!" in text:
            body = json.loads(re.sub(r"![a-z]+(=\d+)?( ![a-z]+(=\d+)?)*", words, text, count=1))
            return step["answer"]["stream"], step["request"] | {"body": body}
    raise AssertionError("no step streams")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served(tmp_path_factory.mktemp("daemon"))


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_goes_as_the_client_expects(daemon: Served, name: str) -> None:
    connection = Connection(int(daemon.url.rpartition(":")[2]))
    try:
        for step in SESSIONS[name]["steps"]:
            check(step, connection.send(step["request"]))
    finally:
        connection.close()
    assert daemon.live() == 0


# Two of them by default: each brings up engines of its own.
CLIENTS = ["claude", "codex"]
EVERY = [pytest.param(name, marks=[] if name in CLIENTS else pytest.mark.long) for name in SESSIONS]


@pytest.mark.parametrize("name", EVERY)
async def test_a_stream_whose_engine_dies_for_good_has_one_end(http, name):
    kind, request = changed(name, "!always=2")
    connection = Connection(http.port)

    def ask() -> tuple[int, str]:
        response = connection.send(request)
        return response.status, response.read().decode()

    status, text = await asyncio.to_thread(ask)
    connection.close()
    assert status == 200
    RULES[kind](text, dies=True)
    assert http.front.service.live == 0


@pytest.mark.parametrize("name", EVERY)
async def test_a_client_that_leaves_ends_its_generation(http, name):
    _, request = changed(name, "!hang")
    connection = Connection(http.port)
    response = await asyncio.to_thread(connection.send, request)
    assert response.status == 200 and http.front.service.live == 1
    response.close()
    connection.close()
    await until(lambda: http.front.service.live == 0 and not http.front.engine().streams)

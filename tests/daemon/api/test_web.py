"""What every HTTP request must fulfil, and the shape of every error."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import socket

import pytest
from front_harness import make_settings

from tierd.daemon.api import openapi, reading, web
from tierd.daemon.api.gate import Gate
from tierd.daemon.keys import KeyRing

CHAT = "/v1/chat/completions"
BODY = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
KEY = {"api_key": "geheim"}


def request(path="/v1/models", *lines, method="GET", body=b""):
    head = [f"{method} {path} HTTP/1.1", *lines, "Connection: close"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST", "localhost:PORT", "[::1]:PORT"])
async def test_our_hosts(http, host):
    answer = await http.raw(request("/v1/models", f"Host: {host.replace('PORT', str(http.port))}"))
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "lines",
    [
        ["Host: evil.example"], ["Host: localhost.evil.example"], ["Host: 127.0.0.1.nip.io"], ["Host: 192.168.1.5"],
        ["Host: localhost:1"], ["Host: "], ["Host: localhost@evil.example"], ["Host: 0.0.0.0"], [], ["Host: [::2]"],
        ["Host: localhost", "Host: evil.example"], ["Host: localhost", "Host: localhost"],
        ["Host: localhost", "Origin: http://evil.example"], ["Host: localhost", "Origin: null"],
        ["Host: localhost", "Origin: http://localhost"], ["Host: localhost", "Sec-Fetch-Site: cross-site"],
        ["Host: localhost", "Sec-Fetch-Site: same-site"], ["Host: localhost", "Origin:"],
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/models", "/", "/health", "/metrics", CHAT])
async def test_strange_hosts_and_origins_are_refused(http, lines, path):
    answer = await http.raw(request(path, *lines, method="POST" if path == CHAT else "GET"))
    assert answer.split()[1] in (b"400", b"403"), answer


@pytest.mark.parametrize(
    ("listen", "host", "is_let_in"),
    [
        ("0.0.0.0:1", "192.168.1.5", True), ("0.0.0.0:1", "[fe80::1]", True), ("0.0.0.0:1", "evil.example", False),
        ("0.0.0.0:1", "localhost", True), ("127.0.0.1:1", "192.168.1.5", False), ("[::1]:1", "::2", False),
        ("tierd.example:1", "tierd.example", True), ("0.0.0.0:1", "1.2.3.4.evil.example", False),
    ],
)  # fmt: skip
def test_addresses_are_let_in_where_other_machines_are(tmp_path, listen, host, is_let_in):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        settings = make_settings(tmp_path, listen=listen)
        assert Gate(settings, KeyRing(settings.keys_file), sock).is_ours(host) == is_let_in


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_only_json_bodies(http, kind):
    status, body, _ = await http.post(CHAT, BODY, Content_Type=kind)
    assert status == 400 and body["error"]["param"] == "Content-Type"
    assert http.front.service.live == 0


async def test_json_with_a_charset_is_fine(http):
    assert (await http.post(CHAT, BODY, Content_Type="application/json; charset=utf-8"))[0] == 200


async def test_compressed_bodies_are_refused(http):
    status, body, _ = await http.post(CHAT, gzip.compress(b"{}"), Content_Encoding="gzip")
    assert status == 400 and body["error"]["param"] == "Content-Encoding"


@pytest.mark.parametrize("http", [KEY], indirect=True)
async def test_with_a_key_every_route_but_two_needs_it(http):
    described = [(one.method, one.path.replace("{model}", "alpha"), one.is_open) for one in openapi.ENDPOINTS]
    for method, path, is_open in (*described, ("get", "/nothing", False)):
        if is_open:
            assert (await http.get(path))[0] == 200
            continue
        for value in (None, "Bearer wrong", "geheim", "Basic geheim", "Bearer", "Bearer geheimer"):
            headers = {"Authorization": value} if value else {}
            body = {} if method == "post" else None
            async with http.session.request(method, http.url + path, headers=headers, json=body) as response:
                text = await response.text()
                assert response.status == 401 and "API key" in text, (path, headers)
    assert (await http.get("/v1/models", Authorization="Bearer geheim"))[0] == 200


async def test_unknown_paths_and_methods(http):
    status, body, headers = await http.get("/v1/nothing")
    assert status == 404 and body["error"]["code"] == "not_found" and headers["x-should-retry"] == "false"
    assert headers["Server"] == "tierd"
    status, body, headers = await http.get(CHAT)
    assert status == 405 and headers["Allow"] == "POST" and body["error"]["message"]


async def test_a_body_over_the_limit(http):
    data, headers = io.BytesIO(b" " * (web.MAX_BODY_BYTES + 1)), {"Content-Type": "application/json"}
    async with http.session.post(http.url + CHAT, data=data, headers=headers) as response:
        assert response.status == 413 and "larger" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 100_000, b'{"a":' + b"[" * 50_000, b"{}",
     b'{"model":"alpha","messages":[{"role":"user","content":"x"}],"temperature":1e999}'],
)  # fmt: skip
async def test_broken_bodies(http, body):
    status, answer, headers = await http.post(CHAT, body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert headers["x-should-retry"] == "false"


async def test_header_limits(http):
    long, many = "X-Big: " + "x" * 20_000, [f"X-{n}: 1" for n in range(200)]
    for raw in (request("/", "Host: localhost", long), request("/", "Host: localhost", *many),
                request("/" + "a" * 20_000, "Host: localhost")):  # fmt: skip
        assert (await http.raw(raw)).split()[1] in (b"400", b"414", b"431")
    assert (await http.get("/"))[0] == 200


async def test_a_body_that_never_comes(http, monkeypatch):
    monkeypatch.setattr(reading, "BODY_TIMEOUT_S", 0.2)
    lines = ("Host: localhost", "Content-Type: application/json", "Content-Length: 100")
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(request(CHAT, *lines, method="POST", body=b"{"))
    async with asyncio.timeout(5):
        assert (await reader.readline()).split()[1] == b"504"
    writer.transport.abort()


async def test_an_unforeseen_error_tells_no_internals(http, monkeypatch):
    async def boom():
        raise RuntimeError("secret at 0xdead in /home/someone")

    monkeypatch.setattr(http.front.service, "models", boom)
    status, body, headers = await http.get("/v1/models")
    assert status == 500 and body["error"]["code"] == "internal_error" and headers["x-should-retry"] == "false"
    assert "secret" not in json.dumps(body) and "/home" not in json.dumps(body)


async def test_many_connections_that_say_nothing(http):
    pairs = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", http.port) for _ in range(150)))
    assert (await http.post(CHAT, BODY))[0] == 200
    for _, writer in pairs:
        writer.transport.abort()

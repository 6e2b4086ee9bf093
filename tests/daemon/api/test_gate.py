"""Who may come in by HTTP, and as whom."""

from __future__ import annotations

import asyncio
import itertools

import aiohttp
import pytest

from tierd.daemon import keys, tenants
from tierd.daemon.api import gate, openapi

CHAT = "/v1/chat/completions"
BODY = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PAGE = "http://page.example:3000"


def add_key(http, name="a", **limits):
    return keys.add(http.front.settings.keys_file, name, **limits)


def bearer(text):
    return {"Authorization": f"Bearer {text}"}


# -- keys ----------------------------------------------------------------------------------------------------------


async def test_a_key_that_is_made_while_it_runs_is_asked_for_at_once(http):
    assert (await http.get("/v1/models"))[0] == 200
    _, text = add_key(http)
    status, body, headers = await http.get("/v1/models")
    assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
    assert (await http.get("/v1/models", **bearer(text)))[0] == 200
    assert (await http.get("/v1/models", **{"x-api-key": text}))[0] == 200
    assert (await http.get("/health"))[0] == (await http.get("/"))[0] == 200
    keys.remove(http.front.settings.keys_file, "a")
    assert (await http.get("/v1/models", **bearer(text)))[0] == 200  # none is needed any more


async def test_a_removed_key_is_refused_while_others_are_there(http):
    _, text = add_key(http)
    add_key(http, "b")
    keys.remove(http.front.settings.keys_file, "a")
    assert (await http.get("/v1/models", **bearer(text)))[0] == 401


@pytest.mark.parametrize("http", [{"api_key": "geheim"}], indirect=True)
async def test_the_one_key_of_the_settings_works_beside_the_others(http):
    _, text = add_key(http)
    for key in ("geheim", text):
        assert (await http.get("/v1/models", **bearer(key)))[0] == 200
    assert (await http.get("/v1/models", **bearer("geheim" + text)))[0] == 401


async def test_one_good_key_of_two_is_enough(http):
    _, text = add_key(http)
    assert (await http.get("/v1/models", **{"Authorization": "Bearer dummy", "x-api-key": text}))[0] == 200


async def test_a_broken_file_of_keys_closes_the_door(http):
    _, text = add_key(http)
    http.front.settings.keys_file.write_text("{")
    assert (await http.get("/v1/models", **bearer(text)))[0] == 401
    assert (await http.get("/v1/models"))[0] == 401


async def test_every_route_that_generates_runs_in_the_name_of_its_key(http):
    seen = []
    submit = http.front.service.submit

    def spy(given, tenant=""):
        seen.append(tenant)
        return submit(given, tenant)

    http.front.service.submit = spy
    made, text = add_key(http)
    messages = {"model": "alpha", "messages": BODY["messages"]}
    bodies = {
        CHAT: BODY,
        "/v1/completions": {"model": "alpha", "prompt": "hi", "max_tokens": 2},
        "/v1/responses": {"model": "alpha", "input": "hi", "max_output_tokens": 2},
        "/v1/messages": {**messages, "max_tokens": 2},
        "/api/chat": {**messages, "stream": False},
        "/api/generate": {"model": "alpha", "prompt": "hi", "stream": False},
    }
    for path, body in bodies.items():
        status, answer, _ = await http.post(path, body, **bearer(text))
        assert status == 200, (path, answer)
    assert seen == [tenants.of_key(made)] * len(bodies)
    generating = {one.path for one in openapi.ENDPOINTS if one.method == "post"}
    others = {"/api/show", "/api/pull", "/api/embed", "/api/embeddings", "/v1/messages/count_tokens", "/v1/embeddings",
              "/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"}  # fmt: skip
    assert generating <= set(bodies) | others  # a new one belongs into one of the two


async def test_a_key_with_enough_requests_gets_429(http):
    _, text = add_key(http, max_requests=1)
    hang = {**BODY, "messages": [{"role": "user", "content": "!hang"}], "stream": True}
    async with http.session.post(http.url + CHAT, json=hang, headers=bearer(text)) as running:
        assert running.status == 200
        status, body, headers = await http.post(CHAT, BODY, **bearer(text))
        assert status == 429 and body["error"]["code"] == "quota_exceeded" and headers["Retry-After"]
        assert "x-should-retry" not in headers
        running.close()


async def test_a_key_neither_adds_nor_removes_models(http):
    _, text = add_key(http)
    for method, path in gate.OWNER_ONLY:
        async with http.session.request(method, http.url + path, json={"model": "alpha"}, headers=bearer(text)) as one:
            assert one.status == 403, path
    assert (http.front.settings.models_dir / "alpha").exists()


# -- hosts and origins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("http", [{"allowed_hosts": ("tierd.example", "other.example:8080")}], indirect=True)
@pytest.mark.parametrize(
    ("host", "is_let_in"),
    [
        ("tierd.example", True), ("TIERD.example:99", True), ("other.example:8080", True), ("other.example", False),
        ("other.example:8081", False), ("x.tierd.example", False), ("tierd.example.evil", False), ("localhost", True),
        ("tierd.example@evil", False), ("tierd.example:80:80", False),
    ],
)  # fmt: skip
async def test_allowed_hosts(http, host, is_let_in):
    answer = await http.raw(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200" if is_let_in else b"HTTP/1.1 40")


@pytest.mark.parametrize("http", [{"origins": (PAGE,)}], indirect=True)
async def test_a_page_on_the_list_may_ask_and_read(http):
    preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}  # fmt: skip
    async with http.session.options(http.url + CHAT, headers=preflight) as answer:
        assert answer.status == 204 and answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert "x-stainless-os" in answer.headers["Access-Control-Allow-Headers"]
        assert "Access-Control-Allow-Credentials" not in answer.headers
    status, _, headers = await http.post(CHAT, BODY, Origin=PAGE, Sec_Fetch_Site="cross-site")
    assert status == 200 and headers["Access-Control-Allow-Origin"] == PAGE and headers["Vary"] == "Origin"
    status, _, headers = await http.get("/v1/nothing", Origin=PAGE)
    assert status == 404 and headers["Access-Control-Allow-Origin"] == PAGE  # it may read errors, too
    async with http.session.post(http.url + CHAT, json={**BODY, "stream": True}, headers={"Origin": PAGE}) as answer:
        assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == PAGE


@pytest.mark.parametrize("http", [{}, {"origins": (PAGE,)}], indirect=True)
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": origin, "Sec-Fetch-Site": site} | ({"Access-Control-Request-Method": "POST"} if asks else {})
        for origin, site, asks in itertools.product(
            ["http://evil.example", "null", "http://page.example", PAGE + "/", PAGE + ".evil", "http://localhost"],
            ["cross-site", "same-origin"], [True, False],
        )
    ],
)  # fmt: skip
async def test_other_pages_may_not(http, headers):
    for method in ("GET", "OPTIONS", "POST"):
        async with http.session.request(method, http.url + CHAT, headers=headers) as answer:
            assert answer.status == 403 and "Access-Control-Allow-Origin" not in answer.headers


async def test_a_preflight_tells_nothing_without_a_list(http):
    async with http.session.options(http.url + CHAT) as answer:
        assert answer.status == 405 and "Access-Control-Allow-Origin" not in answer.headers


# -- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "status"), [(15_000, 200), (17_000, 431)])
async def test_headers_have_a_limit_together(http, size, status):
    lines = [f"X-{number}: {'x' * 990}" for number in range(size // 1000)]
    head = ["GET /v1/models HTTP/1.1", "Host: localhost", "Connection: close", *lines]
    answer = await http.raw(("\r\n".join(head) + "\r\n\r\n").encode())
    assert int(answer.split()[1]) == status


async def test_too_many_connections(http, monkeypatch):
    monkeypatch.setattr(gate, "MAX_CONNECTIONS", 3)
    pairs = [await asyncio.open_connection("127.0.0.1", http.port) for _ in range(4)]
    answer = await http.raw(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.split()[1] == b"503" and b"Retry-After" in answer
    for _, writer in pairs:
        writer.transport.abort()


@pytest.mark.parametrize("http", [{"max_streams": 1, "max_queue": 1}], indirect=True)
async def test_a_full_queue_is_503_with_a_time(http):
    hang = {**BODY, "messages": [{"role": "user", "content": "!hang"}], "stream": True}
    running = [await http.session.post(http.url + CHAT, json=hang) for _ in range(2)]
    status, body, headers = await http.post(CHAT, BODY)
    assert status == 503 and body["error"]["code"] == "overloaded" and int(headers["Retry-After"]) > 0
    for one in running:
        one.close()


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 405), ("/health", 405), ("/v1/nothing", 404)])
async def test_where_nobody_takes_a_body_it_need_not_be_json(http, path, status):
    async with http.session.post(http.url + path, data="x", headers={"Content-Type": "text/plain"}) as answer:
        assert answer.status == status and ("Allow" in answer.headers) == (status == 405)


async def test_a_body_beyond_its_depth_is_refused_on_every_path(http):
    deep = b'{"model": "alpha", "x": ' + b"[" * 64 + b"]" * 64 + b"}"
    for one in openapi.ENDPOINTS:
        if one.method == "post":
            status, answer, _ = await http.post(one.path.replace("{batch_id}", "x"), deep)
            assert status == 400 and "64 levels" in str(answer), one.path


async def test_uploads_need_a_header_that_no_form_can_send(http):
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"x", filename="in.jsonl")
    async with http.session.post(http.url + "/v1/files", data=form()) as response:
        assert response.status == 401
    for path in ("/v1/chat/completions", "/v1/batches"):
        headers = {"Authorization": "Bearer any", "Content-Type": "multipart/form-data; boundary=x"}
        async with http.session.post(http.url + path, data=b"--x--", headers=headers) as response:
            assert response.status == 400 and "JSON" in await response.text()


async def test_files_of_one_key_are_not_there_for_another(http):
    texts = [add_key(http, name)[1] for name in ("a", "b")]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"x", filename="in.jsonl")
    async with http.session.post(http.url + "/v1/files", data=form(), headers=bearer(texts[0])) as response:
        file = await response.json()
    path = f"/v1/files/{file['id']}"
    assert (await http.get(path, **bearer(texts[0])))[0] == 200
    for one in (path, f"{path}/content", "/v1/batches/batch_x"):
        assert (await http.get(one, **bearer(texts[1])))[0] == 404
    assert (await http.get("/v1/files", **bearer(texts[1])))[1]["data"] == []

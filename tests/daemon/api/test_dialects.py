"""Errors in the shape of the dialect whose path it is."""

from __future__ import annotations

import json

import pytest
from aiohttp.test_utils import make_mocked_request

from tierd.daemon.api import dialects
from tierd.daemon.errors import TooBusy, Unauthorized


def error(path, exc, **options):
    response = dialects.error_response(make_mocked_request("POST", path), exc, **options)
    return response, json.loads(response.body)


@pytest.mark.parametrize(
    ("path", "status", "keys"),
    [("/v1/messages", 529, {"type", "error", "request_id"}),
     ("/v1/messages/count_tokens", 529, {"type", "error", "request_id"}),
     ("/api/chat", 503, {"error"}), ("/api/nothing", 503, {"error"}), ("/v1/chat/completions", 503, {"error"})],
)  # fmt: skip
def test_each_dialect_has_its_own_shape(path, status, keys):
    response, body = error(path, TooBusy("full", hint="wait"))
    assert response.status == status and set(body) == keys and response.headers["Retry-After"] == "2"
    assert "full; wait" in str(body)
    assert isinstance(body["error"], str) == path.startswith("/api/")


def test_what_cannot_help_is_not_to_be_tried_again():
    response, _ = error("/api/chat", Unauthorized("no key"))
    assert response.headers["x-should-retry"] == "false" and response.headers["WWW-Authenticate"] == "Bearer"


def test_a_status_of_http_itself():
    response, body = error("/v1/messages", TooBusy("x"), status=413)
    assert response.status == 413 and body["error"]["type"] == "request_too_large"


async def test_requests_have_an_id_of_their_own():
    request = make_mocked_request("POST", "/v1/messages")
    assert dialects.request_id(request) == dialects.request_id(request)
    assert dialects.request_id(request) != dialects.request_id(make_mocked_request("POST", "/v1/messages"))

"""Which dialect a path belongs to, and errors in its shape."""

from __future__ import annotations

import secrets

from aiohttp import web

from tierd.daemon.api import answers, anthropic_answers
from tierd.daemon.errors import TierdError, sentence

_ANTHROPIC, _OLLAMA = "/v1/messages", "/api/"
_REQUEST_ID = web.RequestKey("request_id", str)


def request_id(request: web.Request) -> str:
    """The id of a request: made here, told to its client, and used for nothing else."""
    if _REQUEST_ID not in request:
        request[_REQUEST_ID] = f"req_{secrets.token_hex(12)}"
    return request[_REQUEST_ID]


async def sign(request: web.Request, response: web.StreamResponse) -> None:
    """What every answer of a dialect carries. For `on_response_prepare`."""
    if request.path.startswith(_ANTHROPIC):
        response.headers["request-id"] = request_id(request)


def error_response(request: web.Request, exc: TierdError, *, status: int | None = None) -> web.Response:
    """An error before anything was sent."""
    if request.path.startswith(_ANTHROPIC):
        status = status or anthropic_answers.status_of(exc)
        body = anthropic_answers.error_body(exc, request_id(request), status=status)
        return answers.error_response(exc, status=status, body=body)
    if request.path.startswith(_OLLAMA):
        return answers.error_response(exc, status=status, body={"error": sentence(exc)})
    return answers.error_response(exc, status=status)

"""Answers of HTTP that no dialect has to itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from tierd.daemon.api import openai
from tierd.daemon.errors import TierdError, TryLater, Unauthorized, should_retry

RETRY_AFTER_S = 2


def error_response(exc: TierdError, *, status: int | None = None, body: Any = None) -> web.Response:
    """An error before anything was sent. `body`: in the shape of a dialect; without it in OpenAI's."""
    headers = {}
    if not should_retry(exc):
        headers["x-should-retry"] = "false"
    if isinstance(exc, TryLater):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(exc, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(openai.error(exc) if body is None else body, status=status or exc.status, headers=headers)


def json_response(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON body."""
    return web.Response(body=msgspec.json.encode(data), content_type="application/json", status=status, headers=headers)

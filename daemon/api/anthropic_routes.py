"""The paths of the Anthropic dialect."""

from __future__ import annotations

import secrets

from aiohttp import web

from tierd.daemon import limits
from tierd.daemon.api import sse
from tierd.daemon.api.answers import json_response
from tierd.daemon.api.anthropic import parse_count, parse_messages
from tierd.daemon.api.anthropic_answers import Teller, Voice, Whole
from tierd.daemon.api.dialects import request_id
from tierd.daemon.api.gate import tenant_of
from tierd.daemon.api.reading import read
from tierd.daemon.service import Service

# Says that lines of the system prompt which name the client were left out of the prompt.
STRIPPED_HEADER = "x-tierd-stripped"


class Routes:
    """The handlers. Threading: for one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add(self, router: web.UrlDispatcher) -> None:
        """Register every path. The query (`?beta=true`) is no part of it."""
        router.add_post("/v1/messages", self.messages)
        router.add_post("/v1/messages/count_tokens", self.count_tokens)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages"""
        strip = self._service.settings.strip_attribution
        call = parse_messages(await read(request), strip_attribution=strip)
        headers = {STRIPPED_HEADER: "attribution"} if call.dropped_attribution else {}
        teller = Teller(call, f"msg_{secrets.token_hex(12)}")
        submit = limits.fitted(call.submit, self._service.context_tokens(call.submit.model))
        events = self._service.answering(submit, "http", tenant_of(request))
        voice = (lambda: Voice(teller, request_id(request))) if call.stream else None
        return await sse.answer(request, events, voice, lambda: Whole(teller), headers)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens"""
        strip = self._service.settings.strip_attribution
        submit = parse_count(await read(request), strip_attribution=strip)
        return json_response({"input_tokens": await self._service.count(submit, tenant_of(request))})

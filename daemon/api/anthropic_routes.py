"""The paths of the Anthropic dialect."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

import msgspec
from aiohttp import web

from tierd.daemon.api import bodies, sse
from tierd.daemon.api.answers import json_response
from tierd.daemon.api.anthropic import Call, parse_count, parse_messages
from tierd.daemon.api.anthropic_answers import Teller, Voice, Whole
from tierd.daemon.api.dialects import request_id
from tierd.daemon.api.gate import tenant_of
from tierd.daemon.errors import Aborted
from tierd.daemon.generation import Submit
from tierd.daemon.protocol import error_of
from tierd.daemon.service import Service

# Says that lines of the system prompt which name the client were left out of the prompt.
STRIPPED_HEADER = "x-tierd-stripped"


def _prompt_of(submit: Submit) -> dict[str, Any]:
    """What the prompt of a request depends on, for the engine to count its tokens."""
    given: dict[str, Any] = msgspec.to_builtins(submit)
    return {name: given[name] for name in ("messages", "tools", "thinking") if name in given}


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
        call = self._fitted(parse_messages(await bodies.read(request), strip_attribution=strip))
        headers = {STRIPPED_HEADER: "attribution"} if call.dropped_attribution else {}
        teller = Teller(call, f"msg_{secrets.token_hex(12)}")
        stream = self._service.submit(call.submit, tenant_of(request))
        with sse.cutting(request):
            async with contextlib.aclosing(self._service.run(stream, "http")) as events:
                if call.stream:
                    return await sse.send(request, events, Voice(teller, request_id(request)), headers)
                whole = Whole()
                async for event in events:
                    if error := error_of(event):
                        raise error
                    for piece in teller.pieces(event):
                        whole.add(piece)
                    if event.ev == "done":
                        return json_response(whole.message, headers=headers)
        raise Aborted("the generation was stopped")

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens"""
        strip = self._service.settings.strip_attribution
        submit = parse_count(await bodies.read(request), strip_attribution=strip)
        counted = await self._service.tokenize(submit.model, _prompt_of(submit))
        return json_response({"input_tokens": len(counted["tokens"])})

    def _fitted(self, call: Call) -> Call:
        """`max_tokens` is a bound: an answer can't be longer than the context, and its `stop_reason` would say so."""
        limit = self._service.context_tokens(call.submit.model)
        sampling = call.submit.sampling
        if sampling.max_tokens is None or sampling.max_tokens <= limit:
            return call
        sampling = msgspec.structs.replace(sampling, max_tokens=limit)
        return call._replace(submit=msgspec.structs.replace(call.submit, sampling=sampling))

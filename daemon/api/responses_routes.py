"""The paths of /v1/responses."""

from __future__ import annotations

import secrets
import time

import msgspec
from aiohttp import web

from tierd.daemon import limits
from tierd.daemon.api import responses, sse
from tierd.daemon.api.answers import json_response
from tierd.daemon.api.gate import tenant_of
from tierd.daemon.api.reading import read
from tierd.daemon.api.responses_answers import Teller, Voice, Whole
from tierd.daemon.api.responses_store import Store, Stored
from tierd.daemon.api.responses_types import Deleted
from tierd.daemon.service import Service

# Says which types of tools the model was not told of.
LEFT_OUT_HEADER = "x-tierd-tools-left-out"


class Routes:
    """The handlers. Threading: for one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = Store()

    def add(self, router: web.UrlDispatcher) -> None:
        """Register every path."""
        router.add_post("/v1/responses", self.create)
        router.add_get("/v1/responses/{response_id}", self.show)
        router.add_delete("/v1/responses/{response_id}", self.forget)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses"""
        tenant = tenant_of(request)
        call = responses.parse(await read(request))
        previous = call.given.previous_response_id
        earlier = self._store.conversation(previous, tenant) if previous is not None else ()
        submit = limits.fitted(call.following(earlier), self._service.context_tokens(call.given.model))
        teller = Teller(call, f"resp_{secrets.token_hex(16)}", time.time)

        def keep() -> None:
            if call.given.store is not False:
                said = call.messages + teller.answer()
                body = msgspec.json.encode(teller.response)
                self._store.put(teller.response.id, Stored(tenant, previous, said, body))

        headers = {LEFT_OUT_HEADER: ",".join(call.left_out)} if call.left_out else {}
        events = self._service.answering(submit, "http", tenant)
        voice = (lambda: Voice(teller, keep)) if call.given.stream else None
        return await sse.answer(request, events, voice, lambda: Whole(teller, keep), headers)

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/responses/{id}"""
        stored = self._store.get(request.match_info["response_id"], tenant_of(request))
        return web.Response(body=stored.body, content_type="application/json")

    async def forget(self, request: web.Request) -> web.Response:
        """DELETE /v1/responses/{id}"""
        response_id = request.match_info["response_id"]
        self._store.delete(response_id, tenant_of(request))
        return json_response(Deleted(response_id))

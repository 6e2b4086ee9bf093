"""The paths of /v1/responses."""

from __future__ import annotations

import contextlib
import secrets
import time

import msgspec
from aiohttp import web

from tierd.daemon.api import bodies, responses, sse
from tierd.daemon.api.answers import json_response
from tierd.daemon.api.gate import tenant_of
from tierd.daemon.api.responses_answers import Teller, Voice
from tierd.daemon.api.responses_store import Store, Stored
from tierd.daemon.api.responses_types import Deleted
from tierd.daemon.errors import Aborted
from tierd.daemon.protocol import error_of
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
        call = responses.parse(await bodies.read(request))
        previous = call.given.previous_response_id
        earlier = self._store.conversation(previous, tenant) if previous is not None else ()
        stream = self._service.submit(call.following(earlier), tenant)
        teller = Teller(call, f"resp_{secrets.token_hex(16)}", time.time)

        def keep() -> None:
            if call.given.store is not False:
                said = call.messages + teller.answer()
                body = msgspec.json.encode(teller.response)
                self._store.put(teller.response.id, Stored(tenant, previous, said, body))

        headers = {LEFT_OUT_HEADER: ",".join(call.left_out)} if call.left_out else {}
        with sse.cutting(request):
            async with contextlib.aclosing(self._service.run(stream, "http")) as events:
                if call.given.stream:
                    return await sse.send(request, events, Voice(teller, keep), headers)
                async for event in events:
                    if error := error_of(event):
                        raise error
                    for _ in teller.pieces(event):
                        pass  # the response is what they add up to
                    if event.ev == "done":
                        keep()
                        return json_response(teller.response, headers=headers)
        raise Aborted("the generation was stopped")

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/responses/{id}"""
        stored = self._store.get(request.match_info["response_id"], tenant_of(request))
        return web.Response(body=stored.body, content_type="application/json")

    async def forget(self, request: web.Request) -> web.Response:
        """DELETE /v1/responses/{id}"""
        response_id = request.match_info["response_id"]
        self._store.delete(response_id, tenant_of(request))
        return json_response(Deleted(response_id))

"""The paths of embeddings, OpenAI's and Ollama's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tierd.daemon.api import embeddings
from tierd.daemon.api.answers import json_response
from tierd.daemon.api.embeddings import Call
from tierd.daemon.api.gate import may_manage, tenant_of
from tierd.daemon.api.reading import read
from tierd.daemon.embedding import Vectors
from tierd.daemon.service import Service


class Routes:
    """The handlers. Threading: for one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add(self, router: web.UrlDispatcher) -> None:
        """Register every path."""
        router.add_post("/v1/embeddings", self.create)
        router.add_post("/api/embed", self.embed)
        router.add_post("/api/embeddings", self.older_embed)

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/embeddings"""
        call = embeddings.parse(await read(request))
        found = await self._service.embed(call.ref, call.inputs, tenant_of(request), "http")
        # A million numbers take a quarter of a second to write: others go on meanwhile.
        return await asyncio.to_thread(lambda: json_response(embeddings.answer(call, found)))

    async def embed(self, request: web.Request) -> web.Response:
        """POST /api/embed"""
        return await self._ollama(request, embeddings.parse_ollama(await read(request)), embeddings.ollama_answer)

    async def older_embed(self, request: web.Request) -> web.Response:
        """POST /api/embeddings"""
        call = embeddings.parse_older_ollama(await read(request))
        return await self._ollama(request, call, embeddings.older_ollama_answer)

    async def _ollama(
        self, request: web.Request, call: Call, answer: Callable[[Call, Vectors, float], Any]
    ) -> web.Response:
        started_s, service = time.monotonic(), self._service
        if call.inputs:
            tenant = tenant_of(request)
            found = await service.embed(call.ref, call.inputs, tenant, "http", truncate=call.truncate)
        else:
            await service.load(call.ref, tenant_of(request))
            found = Vectors([], 0, 0)
        if call.keep_alive is not None and may_manage(request):
            service.keep_loaded(call.ref, call.keep_alive[0])
        total_s = time.monotonic() - started_s
        return await asyncio.to_thread(lambda: json_response(answer(call, found, total_s)))

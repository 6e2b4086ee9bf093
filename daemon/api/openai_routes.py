"""The paths of OpenAI's chat completions, completions and models, and those that tell how the daemon is."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from aiohttp import web

from tierd.daemon import limits, metrics
from tierd.daemon.api import anthropic_answers, ollama_routes, openai, openapi, sse
from tierd.daemon.api.answers import json_response
from tierd.daemon.api.gate import tenant_of
from tierd.daemon.api.openai import Call
from tierd.daemon.api.openai_answers import Shape, Teller, Voice, Whole
from tierd.daemon.api.reading import read
from tierd.daemon.service import Service
from tierd.daemon.version import version

ANTHROPIC_VERSION = "anthropic-version"  # a header of every request of Anthropic's clients: this path is shared


class Routes:
    """The handlers. Threading: for one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def add(self, router: web.UrlDispatcher) -> None:
        """Register every path."""
        router.add_get("/", self.root)
        router.add_get("/health", self.health)
        router.add_get("/metrics", self.metrics)
        router.add_get("/v1/models", self.models)
        router.add_get("/v1/models/{model:.+}", self.model)
        router.add_post("/v1/chat/completions", self.chat)
        router.add_post("/v1/completions", self.completions)
        router.add_get("/openapi.json", self.openapi)

    async def root(self, request: web.Request) -> web.Response:
        """Who is here."""
        is_ollama = ollama_routes.is_ollama_mode(self._service.settings.listen)
        return web.Response(text=ollama_routes.RUNNING if is_ollama else "tierd is running\n")

    async def health(self, request: web.Request) -> web.Response:
        """200 while requests are taken, also when a model loads; 503 when the daemon is stopping."""
        state = self._service.state
        status = 503 if state == "draining" else 200
        health = {"status": "ok" if status == 200 else state, "state": state, "version": version()}
        return json_response(health, status=status)

    async def metrics(self, request: web.Request) -> web.Response:
        """For Prometheus."""
        text = await self._service.metrics_text()
        return web.Response(body=text.encode(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def models(self, request: web.Request) -> web.Response:
        """Every model that can be used, loaded or not."""
        listed = await self._service.models()
        dialect = anthropic_answers if ANTHROPIC_VERSION in request.headers else openai
        return json_response(dialect.models(listed))

    async def model(self, request: web.Request) -> web.Response:
        """One of them."""
        shown = await self._service.show(request.match_info["model"])
        dialect = anthropic_answers if ANTHROPIC_VERSION in request.headers else openai
        return json_response(dialect.model(shown))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        return await self._generate(request, openai.parse_chat, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        return await self._generate(request, openai.parse_completion, chat=False)

    async def openapi(self, request: web.Request) -> web.Response:
        """Every path of HTTP, described."""
        return json_response(openapi.document())

    async def _generate(
        self, request: web.Request, parse: Callable[[bytes], Call], *, chat: bool
    ) -> web.StreamResponse:
        call = parse(await read(request))
        first = call.submits[0]
        limit = self._service.context_tokens(first.model)
        submits = [limits.fitted(one, limit) for one in call.submits]
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        shape = Shape(
            chat, answer_id, int(time.time()), first.model, choices=first.n * len(call.submits),
            include_usage=call.include_usage, logprobs=first.logprobs, echo=call.echo,
        )  # fmt: skip
        events = self._service.answering(submits, "http", tenant_of(request))
        voice = (lambda: Voice(Teller(shape))) if call.stream else None
        return await sse.answer(request, events, voice, lambda: Whole(shape))

"""The paths of the Ollama dialect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from tierd.daemon.api import bodies, ollama_models, sse
from tierd.daemon.api.answers import json_response
from tierd.daemon.api.gate import tenant_of
from tierd.daemon.api.ollama import Call, model_name, parse_chat, parse_generate
from tierd.daemon.api.ollama_answers import NDJSON, Teller, Voice, Whole, encode
from tierd.daemon.config import split_listen
from tierd.daemon.errors import Aborted, BadRequest, Conflict, TierdError, Unsupported
from tierd.daemon.generation import Submit
from tierd.daemon.models import catalog
from tierd.daemon.protocol import Event, error_of
from tierd.daemon.puller import Puller
from tierd.daemon.service import Service
from tierd.daemon.version import version

PORT = 11434  # Ollama's own: who listens there is taken for it
RUNNING = "Ollama is running"
_TEMPLATE_CHARS = 1 << 20


class _Named(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body that names a model, by its newer or its older key."""

    model: str = ""
    name: str = ""

    @property
    def ref(self) -> str:
        """The model that is meant. Raises BadRequest."""
        if not (self.model or self.name):
            raise BadRequest("model is missing", param="model")
        return model_name(self.model or self.name)


class _Show(_Named, forbid_unknown_fields=True, kw_only=True):
    verbose: bool | None = None  # tokenizer tables: they are never told here


class _Pull(_Named, forbid_unknown_fields=True, kw_only=True):
    stream: bool | None = None
    insecure: bool | None = None


class Routes:
    """The handlers. Threading: for one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._puller = Puller(service.settings)

    def add(self, router: web.UrlDispatcher) -> None:
        """Register every path but `/`, which is shared."""
        router.add_get("/api/version", self.version)
        router.add_get("/api/tags", self.tags)
        router.add_get("/api/ps", self.ps)
        router.add_post("/api/show", self.show)
        router.add_post("/api/chat", self.chat)
        router.add_post("/api/generate", self.generate)
        router.add_post("/api/pull", self.pull)
        router.add_delete("/api/delete", self.delete)
        router.add_post("/api/embed", self.embed)
        router.add_post("/api/embeddings", self.embed)

    # -- models ----------------------------------------------------------------------------------------------------

    async def version(self, request: web.Request) -> web.Response:
        """GET /api/version"""
        return json_response({"version": ollama_models.API_VERSION, "tierd": version()})

    async def tags(self, request: web.Request) -> web.Response:
        """GET /api/tags"""
        return json_response(ollama_models.tags(await self._service.models()))

    async def ps(self, request: web.Request) -> web.Response:
        """GET /api/ps"""
        engines, listed = (await self._service.ps())["engines"], await self._service.models()
        return json_response(ollama_models.ps(engines, listed, self._service.settings.ctx, datetime.now(UTC)))

    async def show(self, request: web.Request) -> web.Response:
        """POST /api/show"""
        given = bodies.decode(await bodies.read(request), _Show)
        shown = await self._service.show(given.ref)
        shown["context"] = self._service.context_tokens(given.ref)
        template = await asyncio.to_thread(_template_of, shown["path"])
        return json_response(ollama_models.show(shown, template, ollama_models.capabilities(template)))

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /api/delete. A model that is loaded and not in use is unloaded first."""
        given = bodies.decode(await bodies.read(request), _Named)
        await self._service.show(given.ref)
        try:
            await self._service.unload(given.ref)
        except TierdError as exc:
            raise Conflict(f"{given.ref} is in use", hint="ask again when its answers are written") from exc
        await asyncio.to_thread(catalog.remove, self._service.settings.models_dir, given.ref)
        return web.Response(status=200)

    async def embed(self, request: web.Request) -> web.Response:
        """POST /api/embed"""
        raise Unsupported("embeddings are not supported in this dialect", param="input")

    async def pull(self, request: web.Request) -> web.StreamResponse:
        """POST /api/pull"""
        given = bodies.decode(await bodies.read(request), _Pull)
        if given.insecure:
            raise Unsupported("insecure is not supported", param="insecure")
        ref = _hub_ref(given.ref)
        async with contextlib.aclosing(self._puller.pull(ref)) as steps:
            if given.stream is False:
                async for _ in steps:
                    pass
                return json_response({"status": "success"})
            return await _tell_pull(request, steps, ref)

    # -- answers ---------------------------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /api/chat"""
        return await self._answer(request, parse_chat, chat=True)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /api/generate"""
        return await self._answer(request, parse_generate, chat=False)

    async def _answer(self, request: web.Request, parse: Callable[[bytes], Call], *, chat: bool) -> web.StreamResponse:
        call = parse(await bodies.read(request))
        teller = Teller(call.model, chat=chat)
        if call.submit is None:
            return await self._load_or_unload(request, call, teller)
        events = self._events(call, self._fitted(call.submit), tenant_of(request))
        with sse.cutting(request):
            async with contextlib.aclosing(events):
                if call.stream:
                    return await sse.send(request, events, Voice(teller))
                whole = Whole(teller)
                async for event in events:
                    if error := error_of(event):
                        raise error
                    for line in teller.lines(event):
                        whole.add(line)
                    if event.ev == "done":
                        return json_response(whole.body)
        raise Aborted("the generation was stopped")

    async def _events(self, call: Call, submit: Submit, tenant: str) -> AsyncGenerator[Event, None]:
        """The events of a call; where it is wanted, `done` has the tokens of the whole conversation as `context`."""
        prompt: list[int] = []
        if call.context is not None:
            prompt = [*call.context, *await self._tokens_of(submit)]
            submit = msgspec.structs.replace(submit, messages=None, tokens=tuple(prompt))
        said: list[int] = []
        stream = self._service.submit(submit, tenant)
        try:
            async with contextlib.aclosing(self._service.run(stream, "http")) as events:
                async for event in events:
                    if event.ev == "text":
                        said.extend(event.data["tokens"])
                    if event.ev == "done" and call.tells_context:
                        prompt = prompt or await self._tokens_of(submit)
                        event = Event(event.id, "done", {**event.data, "context": [*prompt, *said]})
                    yield event
        finally:
            if call.keep_alive is not None:
                self._service.keep_loaded(submit.model, call.keep_alive[0])

    async def _tokens_of(self, submit: Submit) -> list[int]:
        given = {"messages": msgspec.to_builtins(submit.messages)}
        return list((await self._service.tokenize(submit.model, given))["tokens"])

    async def _load_or_unload(self, request: web.Request, call: Call, teller: Teller) -> web.StreamResponse:
        """A request without a question: it loads the model, or with keep_alive 0 lets it go when it is idle."""
        ref = model_name(call.model)
        unload = call.keep_alive == (0.0,)
        if not unload:
            await self._service.load(ref)
        if call.keep_alive is not None:
            self._service.keep_loaded(ref, call.keep_alive[0])
        line = teller.loaded("unload" if unload else "load")
        if call.stream:
            return web.Response(body=encode(line), headers={"Content-Type": NDJSON})
        return json_response(line)

    def _fitted(self, submit: Submit) -> Submit:
        """Bounds that are larger than the model's context mean the context."""
        limit = self._service.context_tokens(submit.model)
        sampling = submit.sampling
        if sampling.max_tokens is not None and sampling.max_tokens > limit:
            sampling = msgspec.structs.replace(sampling, max_tokens=limit)
        ctx = None if submit.ctx is None or submit.ctx >= limit else submit.ctx
        return msgspec.structs.replace(submit, sampling=sampling, ctx=ctx)


def is_ollama_mode(listen: str) -> bool:
    """Whether the daemon listens where Ollama's clients look for it."""
    return bool(listen) and split_listen(listen)[1] == PORT


async def _tell_pull(
    request: web.Request, steps: AsyncGenerator[dict[str, Any], None], ref: str
) -> web.StreamResponse:
    """Progress as lines; what fails after the first of them is a line too."""
    response = web.StreamResponse(headers={"Content-Type": NDJSON, "Cache-Control": "no-cache"})
    try:
        async for step in steps:
            if not response.prepared:
                await response.prepare(request)
                await response.write(encode({"status": "pulling manifest"}))
            async with asyncio.timeout(sse.WRITE_TIMEOUT_S):
                await response.write(encode(ollama_models.pulling(step, ref)))
    except TimeoutError:
        raise ConnectionResetError("the client does not read") from None
    except TierdError as exc:
        if not response.prepared:
            raise
        await response.write(Voice(Teller(ref, chat=False)).fail(exc))
    await response.write_eof()
    return response


def _hub_ref(ref: str) -> str:
    """A reference as `tierd pull` has it: Ollama's clients write the hub's as `hf.co/owner/name:quant`."""
    for prefix in ("hf.co/", "huggingface.co/"):
        if ref.startswith(prefix):
            return "hf:" + ref.removeprefix(prefix)
    return ref


def _template_of(directory: str) -> str:
    try:
        with open(f"{directory}/{catalog.TEMPLATE}", encoding="utf-8", errors="replace") as file:
            return file.read(_TEMPLATE_CHARS)
    except OSError:
        return ""

"""The paths of the Ollama dialect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from tierd.daemon import limits
from tierd.daemon.api import bodies, ollama_models, sse
from tierd.daemon.api.answers import json_response
from tierd.daemon.api.gate import may_manage, tenant_of
from tierd.daemon.api.ollama import Call, model_name, parse_chat, parse_generate
from tierd.daemon.api.ollama_answers import Steps, Teller, Voice, Whole
from tierd.daemon.api.reading import read
from tierd.daemon.config import split_listen
from tierd.daemon.errors import BadRequest, Conflict, PermissionDenied, TierdError, Unsupported
from tierd.daemon.generation import Submit
from tierd.daemon.models import catalog
from tierd.daemon.protocol import Event
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

    def check_empty(self, *names: str) -> None:
        """Raises Unsupported for those of these fields that hold something."""
        for name in names:
            if getattr(self, name):
                raise Unsupported(f"{name} is not supported", param=name)


class _Show(_Named, forbid_unknown_fields=True, kw_only=True):
    verbose: bool | None = None  # tokenizer tables: they are never told here
    # Ollama's own command sends them with every request, and empty.
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


class _Pull(_Named, forbid_unknown_fields=True, kw_only=True):
    stream: bool | None = None
    insecure: bool | None = None
    username: str | None = None  # the same
    password: str | None = None


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
        given = bodies.decode(await read(request), _Show)
        given.check_empty("system", "template", "options")
        shown = await self._service.show(given.ref)
        shown["context"] = self._service.context_tokens(given.ref)
        template = await asyncio.to_thread(_template_of, shown["path"])
        return json_response(ollama_models.show(shown, template, ollama_models.capabilities(template)))

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /api/delete. A model that is loaded and not in use is unloaded first."""
        given = bodies.decode(await read(request), _Named)
        await self._service.show(given.ref)
        try:
            await self._service.unload(given.ref)
        except TierdError as exc:
            raise Conflict(f"{given.ref} is in use", hint="ask again when its answers are written") from exc
        await asyncio.to_thread(catalog.remove, self._service.settings.models_dir, given.ref)
        return web.Response(status=200)

    async def pull(self, request: web.Request) -> web.StreamResponse:
        """POST /api/pull"""
        given = bodies.decode(await read(request), _Pull)
        given.check_empty("username", "password")
        if given.insecure:
            raise Unsupported("insecure is not supported", param="insecure")
        ref = _hub_ref(given.ref)
        events = contextlib.aclosing(_pull_steps(self._puller, ref))
        return await _told(request, events, Steps({"status": "pulling manifest"}), stream=given.stream is not False)

    # -- answers ---------------------------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /api/chat"""
        return await self._answer(request, parse_chat, chat=True)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /api/generate"""
        return await self._answer(request, parse_generate, chat=False)

    async def _answer(self, request: web.Request, parse: Callable[[bytes], Call], *, chat: bool) -> web.StreamResponse:
        call = parse(await read(request))
        teller = Teller(call.model, chat=chat)
        if call.submit is None:
            return await self._load_or_unload(request, call, teller)
        events = contextlib.aclosing(self._events(call, self._fitted(call.submit), request))
        voice = (lambda: Voice(teller)) if call.stream else None
        return await sse.answer(request, events, voice, lambda: Whole(teller))

    async def _events(self, call: Call, submit: Submit, request: web.Request) -> AsyncGenerator[Event, None]:
        """The events of a call."""
        async with self._service.answering(submit, "http", tenant_of(request)) as events:
            try:
                async for event in events:
                    yield event
            finally:
                self._keep_loaded(request, call, submit.model)

    def _keep_loaded(self, request: web.Request, call: Call, ref: str) -> None:
        """How long a model stays is for the owner of the daemon to say: others use it, too."""
        if call.keep_alive is not None and may_manage(request):
            self._service.keep_loaded(ref, call.keep_alive[0])

    async def _load_or_unload(self, request: web.Request, call: Call, teller: Teller) -> web.StreamResponse:
        """A request without a question: it loads the model, or with keep_alive 0 lets it go when it is idle."""
        if call.keep_alive == (0.0,) and not may_manage(request):
            raise PermissionDenied("this key may use models, not unload them", param="keep_alive")
        events = contextlib.aclosing(self._load_steps(request, call, teller))
        return await _told(request, events, Steps(teller.line()), stream=call.stream)

    async def _load_steps(self, request: web.Request, call: Call, teller: Teller) -> AsyncGenerator[Event, None]:
        """One step, which may take minutes."""
        ref = model_name(call.model)
        unload = call.keep_alive == (0.0,)
        if not unload:
            await self._service.load(ref, tenant_of(request))
        self._keep_loaded(request, call, ref)
        yield Event(0, "done", {"line": teller.loaded("unload" if unload else "load")})

    def _fitted(self, submit: Submit) -> Submit:
        """Bounds that are larger than the model's context mean the context."""
        limit = self._service.context_tokens(submit.model)
        ctx = None if submit.ctx is None or submit.ctx >= limit else submit.ctx
        return msgspec.structs.replace(limits.fitted(submit, limit), ctx=ctx)


def is_ollama_mode(listen: str) -> bool:
    """Whether the daemon listens where Ollama's clients look for it."""
    return bool(listen) and split_listen(listen)[1] == PORT


async def _told(
    request: web.Request, events: contextlib.aclosing[AsyncGenerator[Event, None]], steps: Steps, *, stream: bool
) -> web.StreamResponse:
    return await sse.answer(request, events, (lambda: steps) if stream else None, lambda: steps)


async def _pull_steps(puller: Puller, ref: str) -> AsyncGenerator[Event, None]:
    """A pull as events. It is accepted when something was found: what fails before is a status."""
    async with contextlib.aclosing(puller.pull(ref)) as steps:
        is_accepted = False
        async for step in steps:
            if not is_accepted:
                is_accepted = True
                yield Event(0, "accepted")
            yield Event(0, "done" if "name" in step else "text", {"line": ollama_models.pulling(step, ref)})


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

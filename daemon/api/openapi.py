"""`/openapi.json`: every path of HTTP as an OpenAPI 3.1 document, made from the types that are decoded and sent."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from tierd.daemon.api import anthropic, ollama, openai_types, responses_types
from tierd.daemon.version import version

_SCHEMAS = "#/components/schemas/"
_JSON, _TEXT, _EVENTS, _LINES = "application/json", "text/plain", "text/event-stream", "application/x-ndjson"
_FREE: dict[str, Any] = {"type": "object"}


class Endpoint(NamedTuple):
    """One operation. `body`: None has none. `answer`: a type, None for a JSON object, or `str` for text."""

    method: str
    path: str
    summary: str
    body: Any = None
    answer: Any = None
    streams: str = ""  # the media type of a streamed answer
    is_open: bool = False  # needs no key


ENDPOINTS = (
    Endpoint("get", "/", "Who is here", answer=str, is_open=True),
    Endpoint("get", "/health", "200 while requests are taken, 503 while the daemon stops", is_open=True),
    Endpoint("get", "/metrics", "Counters for Prometheus", answer=str),
    Endpoint("get", "/openapi.json", "This document"),
    Endpoint("get", "/v1/models", "The models that can be used", answer=openai_types.ModelList),
    Endpoint("get", "/v1/models/{model}", "One of them", answer=openai_types.Model),
    Endpoint(
        "post", "/v1/chat/completions", "Answer a conversation", openai_types.ChatRequest,
        openai_types.ChatCompletion, _EVENTS,
    ),
    Endpoint(
        "post", "/v1/completions", "Continue a text", openai_types.CompletionRequest, openai_types.Completion, _EVENTS
    ),
    Endpoint("post", "/v1/embeddings", "Not supported: answers 404", dict[str, Any]),
    Endpoint(
        "post", "/v1/responses", "Answer a conversation, and keep the response", responses_types.ResponseRequest,
        responses_types.Response, _EVENTS,
    ),
    Endpoint("get", "/v1/responses/{response_id}", "A response that is kept", answer=responses_types.Response),
    Endpoint("delete", "/v1/responses/{response_id}", "Forget a response", answer=responses_types.Deleted),
    Endpoint("post", "/v1/messages", "Answer a conversation (Anthropic)", anthropic.CreateMessage, streams=_EVENTS),
    Endpoint("post", "/v1/messages/count_tokens", "Count its tokens (Anthropic)", anthropic.CountTokens),
    Endpoint("get", "/api/version", "The version (Ollama)"),
    Endpoint("get", "/api/tags", "The models that can be used (Ollama)"),
    Endpoint("get", "/api/ps", "The models that are loaded (Ollama)"),
    Endpoint("post", "/api/show", "One model (Ollama)", dict[str, Any]),
    Endpoint("post", "/api/chat", "Answer a conversation (Ollama)", ollama.OllamaChat, streams=_LINES),
    Endpoint("post", "/api/generate", "Continue a text (Ollama)", ollama.OllamaGenerate, streams=_LINES),
    Endpoint("post", "/api/pull", "Fetch a model (Ollama)", dict[str, Any], streams=_LINES),
    Endpoint("delete", "/api/delete", "Remove a model (Ollama)", dict[str, Any]),
    Endpoint("post", "/api/embed", "Not supported: answers 404 (Ollama)", dict[str, Any]),
    Endpoint("post", "/api/embeddings", "Not supported: answers 404 (Ollama)", dict[str, Any]),
)  # fmt: skip


def document(endpoints: tuple[Endpoint, ...] = ENDPOINTS) -> dict[str, Any]:
    """The whole of it."""
    kinds = [kind for one in endpoints for kind in (one.body, one.answer) if _is_struct(kind)]
    unique = list(dict.fromkeys([*kinds, openai_types.ChatChunk, openai_types.ErrorAnswer]))
    references, schemas = msgspec.json.schema_components(unique, ref_template=_SCHEMAS + "{name}")
    found = dict(zip(unique, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method] = _operation(one, found)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tierd", "version": version()},
        "security": [{"bearer": []}, {}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(one: Endpoint, found: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    media = _TEXT if one.answer is str else _JSON
    schema = {"type": "string"} if one.answer is str else found.get(one.answer, _FREE)
    content: dict[str, Any] = {media: {"schema": schema}}
    if one.streams:
        content[one.streams] = {"schema": {"type": "string"}}
    error = {"description": "What is wrong", "content": {_JSON: {"schema": _error(one.path, found)}}}
    operation: dict[str, Any] = {
        "summary": one.summary,
        "operationId": f"{one.method}_{re.sub(r'[^a-z0-9]+', '_', one.path).strip('_') or 'root'}",
        "responses": {"200": {"description": "The answer", "content": content}, "4XX": error, "5XX": error},
    }
    if one.is_open:
        operation["security"] = []
    if names := re.findall(r"\{(\w+)\}", one.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if one.body is not None:
        body = {"schema": found.get(one.body, _FREE)} if _is_struct(one.body) else {"schema": _FREE}
        operation["requestBody"] = {"required": True, "content": {_JSON: body}}
    return operation


def _error(path: str, found: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Each dialect has a shape of its own."""
    if path.startswith(("/v1/messages", "/api/")):
        return {"type": "object"}
    return found[openai_types.ErrorAnswer]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)

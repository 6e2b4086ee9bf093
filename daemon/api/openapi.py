"""`/openapi.json`: every path of HTTP as an OpenAPI 3.1 document, made from the types that are decoded and sent."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from tierd.daemon.api import anthropic, batches, embeddings, files, ollama, openai_types, responses_types
from tierd.daemon.version import version

_SCHEMAS = "#/components/schemas/"
_JSON, _TEXT, _EVENTS, _LINES = "application/json", "text/plain", "text/event-stream", "application/x-ndjson"
_LINES_OF_FILE = "application/jsonl"
_FREE: dict[str, Any] = {"type": "object"}
_UPLOAD: dict[str, Any] = {
    "type": "object", "required": ["file", "purpose"], "additionalProperties": False,
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
}  # fmt: skip
_ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "code"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}, "code": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_OLLAMA_ERROR: dict[str, Any] = {
    "type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}
}  # fmt: skip


class Endpoint(NamedTuple):
    """One operation. `body`: None has none. `answer`: a type, None for a JSON object, or `str` for text."""

    method: str
    path: str
    summary: str
    body: Any = None
    answer: Any = None
    streams: str = ""  # the media type of a streamed answer
    is_open: bool = False  # needs no key
    media: str = _JSON  # of the body
    queries: tuple[str, ...] = ()  # parameters, none of them required


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
    Endpoint(
        "post", "/v1/embeddings", "A vector for each text", embeddings.EmbeddingRequest, embeddings.EmbeddingList
    ),
    Endpoint(
        "post", "/v1/responses", "Answer a conversation, and keep the response", responses_types.ResponseRequest,
        responses_types.Response, _EVENTS,
    ),
    Endpoint("get", "/v1/responses/{response_id}", "A response that is kept", answer=responses_types.Response),
    Endpoint("delete", "/v1/responses/{response_id}", "Forget a response", answer=responses_types.Deleted),
    Endpoint("post", "/v1/files", "Keep a file of requests", _UPLOAD, files.File, media="multipart/form-data"),
    Endpoint(
        "get", "/v1/files", "The files that are kept", answer=files.FileList,
        queries=("limit", "after", "purpose", "order"),
    ),
    Endpoint("get", "/v1/files/{file_id}", "A file, but for its content", answer=files.File),
    Endpoint("delete", "/v1/files/{file_id}", "Delete a file", answer=files.FileDeleted),
    Endpoint("get", "/v1/files/{file_id}/content", "The content of a file", answer=bytes),
    Endpoint("post", "/v1/batches", "Answer a file of requests", batches.BatchRequest, batches.Batch),
    Endpoint("get", "/v1/batches", "The batches, the newest first", answer=batches.BatchList,
             queries=("limit", "after")),
    Endpoint("get", "/v1/batches/{batch_id}", "How far a batch is", answer=batches.Batch),
    Endpoint("post", "/v1/batches/{batch_id}/cancel", "End a batch", answer=batches.Batch),
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
    Endpoint("post", "/api/embed", "A vector for each text (Ollama)", embeddings.OllamaEmbed),
    Endpoint("post", "/api/embeddings", "The vector of a text (Ollama, older)", embeddings.OllamaEmbeddings),
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
    media = {str: _TEXT, bytes: _LINES_OF_FILE}.get(one.answer, _JSON)
    schema = {"type": "string"} if one.answer in (str, bytes) else found.get(one.answer, _FREE)
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
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", one.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in one.queries]
    if parameters:
        operation["parameters"] = parameters
    if one.body is not None:
        schema = one.body if isinstance(one.body, dict) else found[one.body] if _is_struct(one.body) else _FREE
        operation["requestBody"] = {"required": True, "content": {one.media: {"schema": schema}}}
    return operation


def _error(path: str, found: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Each dialect has a shape of its own."""
    if path.startswith("/v1/messages"):
        return _ANTHROPIC_ERROR
    if path.startswith("/api/"):
        return _OLLAMA_ERROR
    return found[openai_types.ErrorAnswer]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)

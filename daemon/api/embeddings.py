"""Embeddings in OpenAI's and in Ollama's dialect: bodies to inputs, vectors to answers. Pure."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tierd.daemon.api import bodies, openai_fields
from tierd.daemon.api.ollama import Duration, duration_s, model_name
from tierd.daemon.embedding import Input, Vectors, shortened
from tierd.daemon.errors import BadRequest

_METADATA = frozenset({"user"})  # it describes the sender


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/embeddings. `input`: a text, token ids, or several of either."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class EmbeddingUsage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct):
    """The vector of one input. `embedding`: numbers, or float32 in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """The answer of /v1/embeddings."""

    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class OllamaEmbed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /api/embed."""

    model: str
    input: str | list[str] = msgspec.field(default_factory=list)
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, msgspec.Raw] | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of the older /api/embeddings."""

    model: str
    prompt: str = ""
    options: dict[str, msgspec.Raw] | None = None
    keep_alive: float | str | None = None


class Call(NamedTuple):
    """A request as the routes want it."""

    model: str  # as the client spells it: the answer repeats it
    ref: str
    inputs: tuple[Input, ...]  # none: the model is only to be loaded
    dimensions: int | None = None
    is_base64: bool = False
    truncate: bool = False
    keep_alive: tuple[Duration] | None = None  # None: nothing was said


def parse(body: bytes) -> Call:
    """The body of /v1/embeddings. Raises BadRequest or Unsupported that names the field."""
    known = EmbeddingRequest.__struct_encode_fields__
    openai_fields.check_unknown(bodies.decode(body, dict[str, msgspec.Raw]), known, _METADATA, {})
    given = bodies.decode(body, EmbeddingRequest)
    return Call(given.model, given.model, _inputs(given.input), given.dimensions, given.encoding_format == "base64")


def parse_ollama(body: bytes) -> Call:
    """The body of /api/embed. Options place the model or tune answers: none of them changes a vector."""
    given = bodies.decode(body, OllamaEmbed)
    inputs = (given.input,) if isinstance(given.input, str) else tuple(given.input)
    inputs = () if inputs == ("",) else inputs
    ref = model_name(given.model)
    return Call(
        given.model, ref, inputs, given.dimensions or None, truncate=bool(given.truncate), keep_alive=_keep(given)
    )


def parse_older_ollama(body: bytes) -> Call:
    """The body of /api/embeddings."""
    given = bodies.decode(body, OllamaEmbeddings)
    inputs = (given.prompt,) if given.prompt else ()
    return Call(given.model, model_name(given.model), inputs, keep_alive=_keep(given))


def answer(call: Call, found: Vectors) -> EmbeddingList:
    """The answer of /v1/embeddings. Raises BadRequest for more dimensions than the model has."""
    data = [
        EmbeddingItem(index, base64.b64encode(one.tobytes()).decode() if call.is_base64 else one.tolist())
        for index, one in enumerate(vectors(call, found))
    ]
    return EmbeddingList(data, call.model, EmbeddingUsage(found.prompt_tokens, found.prompt_tokens))


def ollama_answer(call: Call, found: Vectors, total_s: float) -> dict[str, Any]:
    """The answer of /api/embed."""
    return {
        "model": call.model,
        "embeddings": [one.tolist() for one in vectors(call, found)],
        "total_duration": round(total_s * 1e9),
        "load_duration": 0,
        "prompt_eval_count": found.prompt_tokens,
    }


def older_ollama_answer(call: Call, found: Vectors, total_s: float) -> Mapping[str, Any]:
    """The answer of /api/embeddings. Of unit length, as those of /api/embed are."""
    return {"embedding": [x for one in vectors(call, found) for x in one]}


def vectors(call: Call, found: Vectors) -> Sequence[array[float]]:
    """As long as they were asked for."""
    return [shortened(one, call.dimensions) for one in found.vectors]


def _keep(given: OllamaEmbed | OllamaEmbeddings) -> tuple[Duration] | None:
    return None if given.keep_alive is None else (duration_s(given.keep_alive),)


def _inputs(given: str | list[str | int | list[int]]) -> tuple[Input, ...]:
    if isinstance(given, str):
        return (given,)
    if given and all(isinstance(part, int) for part in given):
        return (tuple(part for part in given if isinstance(part, int)),)
    inputs: list[Input] = []
    for part in given:
        if isinstance(part, int):
            raise BadRequest("input mixes token ids with inputs", param="input")
        inputs.append(part if isinstance(part, str) else tuple(part))
    return tuple(inputs)

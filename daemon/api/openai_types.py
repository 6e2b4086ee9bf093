"""Bodies of the OpenAI dialect, in and out, as types: what is decoded, what is sent, what `/openapi.json` describes."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

# -- what comes in -------------------------------------------------------------------------------------------------


class StreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream is told. Obfuscation is padding against eavesdroppers; there are none on a loopback."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Part(Struct):
    """A piece of a message."""

    type: str
    text: str | None = None


class GivenFunction(Struct):
    """`arguments`: JSON text."""

    name: str
    arguments: str = ""


class GivenCall(Struct):
    """A tool call in the history."""

    id: str
    function: GivenFunction
    type: str = "function"


class Turn(Struct, forbid_unknown_fields=True):
    """A message. Fields of type null are what an SDK sends back of an answer it got."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[GivenCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class Function(Struct, forbid_unknown_fields=True):
    """A function that may be called. `parameters`: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GivenTool(Struct, forbid_unknown_fields=True):
    """A tool; only functions exist here."""

    type: str
    function: Function | None = None


class SchemaFormat(Struct, forbid_unknown_fields=True):
    """A named schema."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """`schema` beside `type` is the spelling of llama.cpp."""

    type: str
    json_schema: SchemaFormat | None = None
    schema: dict[str, Any] | None = None


class TemplateOptions(Struct, forbid_unknown_fields=True):
    """The one option of a chat template that a request may set."""

    enable_thinking: bool | None = None


class CacheOptions(Struct, forbid_unknown_fields=True):
    """How long the prompt is worth keeping."""

    mode: str | None = None
    ttl: str | None = None
    prewarm: bool | None = None


class Common(Struct):
    """What both endpoints take. The second half is not of OpenAI, and spelled as in other servers."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    n: int | None = None
    best_of: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    kv_mode: str | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None


class ChatRequest(Common, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[Turn]
    max_completion_tokens: int | None = None
    tools: list[GivenTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: CacheOptions | None = None


class CompletionRequest(Common, kw_only=True):
    """The body of /v1/completions. `prompt`: a text, token ids, or several of either."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    beam_width: int | None = None
    response_format: ResponseFormat | None = None


# -- what goes out -------------------------------------------------------------------------------------------------


class PromptDetails(Struct):
    """Of the prompt's tokens: how many were not computed; how many were, and are kept from now on."""

    cached_tokens: int
    cache_write_tokens: int


class CompletionDetails(Struct):
    """Of the answer's tokens: how many were thinking."""

    reasoning_tokens: int


class Usage(Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    kv_mode: str | UnsetType = UNSET  # not of OpenAI: what was kept of the context, if not all


class Alternative(Struct):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """A token that was."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Alternative]


class ChatLogprobs(Struct):
    """Of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    """Of a completion: columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CalledFunction(Struct):
    """Name and arguments of a call, or a piece of them."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CallPiece(Struct):
    """A piece of a call in a stream: `id`, `type` and `name` only in the first of a call."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Call(Struct):
    """A whole call."""

    id: str
    function: CalledFunction
    type: str = "function"


class Delta(Struct):
    """What a piece adds. `content` is never absent: some clients read it in every piece."""

    content: str = ""
    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallPiece] | UnsetType = UNSET


class ChunkChoice(Struct):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Answered(Struct):
    """The message of an answer."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: Answered
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class TextChoice(Struct):
    """One answer of a completion, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class _Head(Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    usage: Usage | UnsetType = UNSET
    timings: dict[str, Any] | UnsetType = UNSET


class ChatCompletion(_Head, kw_only=True):
    """The answer of /v1/chat/completions."""

    choices: list[ChatChoice]


class ChatChunk(_Head, kw_only=True):
    """A piece of it in a stream."""

    choices: list[ChunkChoice]


class Completion(_Head, kw_only=True):
    """The answer of /v1/completions, and a piece of it in a stream."""

    choices: list[TextChoice]


class Model(Struct):
    """A model that can be used."""

    id: str
    created: int
    context_length: int
    object: str = "model"
    owned_by: str = "tierd"


class ModelList(Struct):
    """The answer of /v1/models."""

    data: list[Model]
    object: str = "list"


class ErrorBody(Struct):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct):
    """The answer to a request that fails, and the last event of a stream that does."""

    error: ErrorBody

"""Bodies of /v1/responses, in and out, as types."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from tierd.daemon.api.openai_types import CacheOptions, CompletionDetails, Part, PromptDetails, StreamOptions

# -- what comes in -------------------------------------------------------------------------------------------------


class Item(Struct):
    """A piece of the conversation. Which fields count depends on `type`; clients send back more than these."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class FlatTool(Struct):
    """A tool; functions are flat here. `tools`: of a namespace."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[FlatTool] | None = None


class TextFormat(Struct, forbid_unknown_fields=True):
    """What the text is held to."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    """Of verbosities there is only `medium`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """With a `summary` the thinking is told as one, whole and not summed up: some clients show nothing else."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseRequest(Struct):
    """The body of /v1/responses. The last lines are not of OpenAI."""

    model: str
    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: CacheOptions | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    cache_salt: str | None = None
    kv_mode: str | None = None


# -- what goes out -------------------------------------------------------------------------------------------------


class OutputText(Struct):
    """The text of a message."""

    text: str
    type: str = "output_text"
    annotations: list[Any] = []
    logprobs: list[dict[str, Any]] = []


class OutputMessage(Struct, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class Thought(Struct):
    """Thinking; `type` tells whether it stands as content or as a summary."""

    text: str
    type: str


class Reasoning(Struct, tag_field="type", tag="reasoning"):
    """What the model thinks first. `encrypted_content`: on demand, to be sent back; it is encoded, not encrypted."""

    id: str
    status: str
    summary: list[Thought]
    content: list[Thought]
    encrypted_content: str | None = None


class FunctionCall(Struct, tag_field="type", tag="function_call"):
    """What the model asks for. `namespace`: of the tool, if it came in one."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | Reasoning | FunctionCall


class ResponseUsage(Struct):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: PromptDetails
    output_tokens_details: CompletionDetails
    kv_mode: str | UnsetType = UNSET  # not of OpenAI: what was kept of the context, if not all


class ResponseError(Struct):
    """Why it failed."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Why it is incomplete."""

    reason: str


class Response(Struct, kw_only=True):
    """The answer of /v1/responses. `status`: in_progress, completed, incomplete, failed."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    model: str
    output: list[OutputItem] = []
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FlatTool] = []
    tool_choice: str | dict[str, Any] = "auto"
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    store: bool = True
    truncation: str = "disabled"
    background: bool = False
    metadata: dict[str, str] = {}
    timings: dict[str, Any] | UnsetType = UNSET


class Deleted(Struct):
    """The answer of DELETE."""

    id: str
    object: str = "response"
    deleted: bool = True

"""What a generation may be asked for and what it tells: one set of types for every dialect.

`Submit` is what the front makes of any request, whatever dialect it came in; it crosses the wire to the engine.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a function that the model asked for. `arguments`: JSON text of an object."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation. `role`: system, user, assistant, tool."""

    role: str
    content: str
    thinking: str = ""  # of an assistant: what it thought before it answered
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    tool_call_id: str = ""  # of a tool: the call that it answers
    name: str = ""  # of a tool: the function


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call. `parameters`: a JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False  # the arguments are held to the schema


class Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer is held to. `source`: a JSON schema as JSON text, a regular expression, or a Lark grammar.

    Empty for `json_object`.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar"]
    source: str = ""


class Keep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wish that the beginning of the prompt stay cached: that many `messages` of it (0: the tools), `ttl_s` long."""

    messages: int
    ttl_s: float


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are chosen. Ranges are checked by `limits.check_submit`, once for all dialects."""

    temperature: float | None = None  # None: the model's default (0.8 with top_p 0.95 if it has none); 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None  # None: up to the context
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False


class Submit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One generation, whatever the dialect it came in. Exactly one of messages, prompt, tokens is given."""

    model: str
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    suffix: str | None = None  # with `prompt`: what comes after the answer (fill in the middle)
    tokens: tuple[int, ...] | None = None
    before: tuple[int, ...] = ()  # with `messages`: tokens that come before theirs
    tell_prompt: bool = False  # `done` has the tokens of the prompt
    sampling: Sampling = Sampling()
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"  # auto, none, required, or `function:NAME`
    parallel_tool_calls: bool = True
    format: Format | None = None
    thinking: bool | None = None  # None: as the model's template has it
    logprobs: int | None = None  # tell the log probability of every token, and of so many alternatives
    n: int = 1  # answers to one prompt; they share its pages
    best_of: int = 1  # that many are computed, the n likeliest are given
    beam_width: int = 0  # 0: off; beam search of that width instead of sampling
    keep: tuple[Keep, ...] = ()
    salt: str = ""  # requests with different salts share no page
    tenant: str = ""  # set by the front from the peer, never by a client
    quota_pages: int = 0  # set by the front: cached pages that the tenant may have; 0 is no bound
    kv_mode: str | None = None  # a bounded memory mode (see `kv_mode`), or "exact"; None: the daemon's own
    ctx: int | None = None  # a smaller context than the model's, in tokens
    priority: int = 0  # lower runs first; above 0 it gives its place to those that are not
    # Filled by the front when it resumes a stream on a new engine: tokens the client already has.
    resume: tuple[int, ...] = ()


# The bounds of what an answer is held to, for whoever checks requests and for whoever compiles grammars.
MAX_TOOLS = 128
MAX_FORMAT_CHARS = {"json_object": 0, "json_schema": 256 << 10, "regex": 8192, "grammar": 64 << 10}


class Usage(msgspec.Struct, frozen=True):
    """Token counts. `cached_tokens`: prompt tokens that were really not computed. `kv_mode`: the mode of memory."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    kv_mode: str | msgspec.UnsetType = msgspec.UNSET


class Timings(msgspec.Struct, frozen=True):
    """Measured times of one request. `hit_*` and `recomputed` count prompt tokens by where they came from."""

    ttft_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    hit_device: int = 0
    hit_host: int = 0
    hit_nvme: int = 0
    recomputed: int = 0
    queue_ms: float = 0.0
    restore_ms: float = 0.0  # from admission until every page that was found could be read
    load_ms: float = 0.0  # waiting for the model to come up
    drafted: int = 0  # tokens of the answer that were guessed and computed several at once; and of those
    accepted: int = 0  # the ones that were drawn

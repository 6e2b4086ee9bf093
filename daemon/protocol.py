"""The wire: frames and messages between clients, front and engine. Sans I/O: bytes in, messages out.

A frame is a 4-byte big-endian length and a msgpack map. A request map holds `v` (protocol version), `id` (chosen by the
sender, echoed in every answer) and `op`; an answer holds `v`, `id` and `ev`. Requests end with exactly one terminal event:
`result` (a simple call), or for a generation `done`, `refused`, `aborted`, `failed`. No msgpack ext types.

Imports neither torch nor sockets, so that a client needs nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec

VERSION = 1
HEADER_BYTES = 4
MAX_FRAME_BYTES = 16 << 20
MAX_DEPTH = 64


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation. `role`: system, user, assistant, tool."""

    role: str
    content: str


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are chosen. Ranges are checked by `service.check_submit`, once for all dialects."""

    temperature: float | None = None  # None: the model's default (1.0 unless it says otherwise); 0 is greedy
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
    tokens: tuple[int, ...] | None = None
    sampling: Sampling = Sampling()
    tenant: str = ""  # set by the front from the peer, never by a client
    ctx: int | None = None  # a smaller context than the model's, in tokens
    priority: int = 0  # lower runs first
    # Filled by the front when it resumes a stream on a new engine: tokens the client already has.
    resume: tuple[int, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """Token counts. `cached_tokens`: prompt tokens that were really not computed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


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
    load_ms: float = 0.0  # waiting for the model to come up


class Request(msgspec.Struct, omit_defaults=True):
    """A request frame. `args` depends on `op`; for `generate` it is a `Submit`."""

    id: int
    op: str
    args: dict[str, Any] = {}
    v: int = VERSION


class Event(msgspec.Struct, omit_defaults=True):
    """An answer frame.

    `ev`: `accepted` {prompt_tokens, cached_tokens}; `text` {text, tokens}; `progress` {stage, done, total, text};
    terminal: `done` {finish: stop|length, usage, timings}, `refused` {code, message}, `aborted` {usage},
    `failed` {code, message}, `result` {anything, by op}.
    """

    id: int
    ev: str
    data: dict[str, Any] = {}
    v: int = VERSION


TERMINAL = frozenset({"done", "refused", "aborted", "failed", "result"})

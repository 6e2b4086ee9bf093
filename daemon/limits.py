"""What a generation may ask for. One check for all dialects, before anything is allocated for the request."""

from __future__ import annotations

import math

from tierd.daemon.config_values import MIN_CONTEXT_TOKENS
from tierd.daemon.errors import BadRequest
from tierd.daemon.protocol import Sampling, Submit

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 16384
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_TOKEN_ID = (1 << 31) - 1
MAX_PENALTY = 100.0
MAX_PRIORITY = 100
MAX_SEED = (1 << 63) - 1


def check_submit(submit: Submit, context_tokens: int) -> None:
    """Raises BadRequest that names the first field whose value makes no sense.

    `context_tokens`: what the model was trained for. Whether the prompt fits is known when it is tokenized: the engine
    says so.
    """
    _check_input(submit)
    _check_sampling(submit.sampling, context_tokens)
    if submit.ctx is not None and not MIN_CONTEXT_TOKENS <= submit.ctx <= context_tokens:
        raise _bad("ctx", f"must be from {MIN_CONTEXT_TOKENS} to the model's {context_tokens} tokens, not {submit.ctx}")
    if abs(submit.priority) > MAX_PRIORITY:
        raise _bad("priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")


def _check_input(submit: Submit) -> None:
    given = [name for name in ("messages", "prompt", "tokens") if getattr(submit, name) is not None]
    if len(given) != 1:
        said = " and ".join(given) if given else "none of them"
        raise BadRequest(f"exactly one of messages, prompt and tokens is needed, there is {said}", param="messages")
    if submit.messages is not None:
        if not submit.messages:
            raise _bad("messages", "is empty")
        if len(submit.messages) > MAX_MESSAGES:
            raise _bad("messages", f"has {len(submit.messages)} entries, at most {MAX_MESSAGES} are allowed")
        for index, message in enumerate(submit.messages):
            if message.role not in ROLES:
                raise _bad(f"messages[{index}].role", f"must be one of {', '.join(ROLES)}")
    elif submit.prompt is not None:
        if not submit.prompt:
            raise _bad("prompt", "is empty")
    elif submit.tokens is not None:
        if not submit.tokens:
            raise _bad("tokens", "is empty")
        if not all(0 <= token <= MAX_TOKEN_ID for token in submit.tokens):
            raise _bad("tokens", "holds a number that is no token id")


def _check_sampling(sampling: Sampling, context_tokens: int) -> None:
    if sampling.temperature is not None:
        _within("temperature", sampling.temperature, 0.0, MAX_PENALTY)
    if not 0 <= sampling.top_k <= MAX_TOKEN_ID:
        raise _bad("top_k", "must be 0 (off) or more")
    _within("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0.0:
        raise _bad("top_p", "must be more than 0")
    _within("min_p", sampling.min_p, 0.0, 1.0)
    _within("repetition_penalty", sampling.repetition_penalty, 0.0, MAX_PENALTY)
    if sampling.repetition_penalty == 0.0:
        raise _bad("repetition_penalty", "must be more than 0; 1 is off")
    _within("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if sampling.seed is not None and not -MAX_SEED <= sampling.seed <= MAX_SEED:
        raise _bad("seed", "must fit into 64 bits")
    if len(sampling.stop) > MAX_STOPS:
        raise _bad("stop", f"has {len(sampling.stop)} entries, at most {MAX_STOPS} are allowed")
    for stop in sampling.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _bad("stop", f"entries have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}")
    if sampling.max_tokens is not None and not 1 <= sampling.max_tokens <= context_tokens:
        raise _bad(
            "max_tokens", f"must be from 1 to the model's context of {context_tokens} tokens, not {sampling.max_tokens}"
        )
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise _bad("logit_bias", f"has {len(sampling.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token <= MAX_TOKEN_ID:
            raise _bad("logit_bias", f"{token} is no token id")
        _within("logit_bias", bias, -MAX_BIAS, MAX_BIAS)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise _bad(name, f"must be from {low:g} to {high:g}, not {value:g}")


def _bad(name: str, what: str) -> BadRequest:
    return BadRequest(f"{name} {what}", param=name)

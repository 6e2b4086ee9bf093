"""From a `Submit` to a `Request`: template, tokens, limits, defaults. What cannot run is refused here, with the reason.

Threading: one thread (the tokenizer's); it may be another than the step thread.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierd.daemon.engine.chat import ChatTemplate
from tierd.daemon.engine.request import Request, Times
from tierd.daemon.engine.sampler import Sampler, settle
from tierd.daemon.engine.tokens import TextStream, Vocabulary
from tierd.daemon.errors import BadRequest, ContextLengthExceeded, Unsupported
from tierd.daemon.protocol import Message, Submit


@dataclass(frozen=True, slots=True)
class Facts:
    """What a request is measured against."""

    vocab: int  # ids the model knows
    context: int  # tokens of prompt and answer together
    capacity_tokens: int  # tokens of one sequence that the device's pages hold
    end_ids: frozenset[int]
    bos_id: int | None
    add_bos: bool
    sampling: Mapping[str, float]  # the model's own defaults

    def __post_init__(self) -> None:
        if min(self.vocab, self.context, self.capacity_tokens) < 1:
            raise ValueError("vocab, context and capacity must be positive")


class Intake:
    """Makes requests. Every refusal is a `BadRequest` of some kind."""

    def __init__(self, facts: Facts, vocabulary: Vocabulary, template: ChatTemplate | None) -> None:
        self.facts = facts
        self._vocabulary = vocabulary
        self._template = template
        self._serials = itertools.count()

    def tokens_of(
        self,
        *,
        messages: Sequence[Message] | None = None,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
    ) -> list[int]:
        """Token ids of exactly one of the three. Raises BadRequest when it is not one, or cannot be tokens."""
        if sum(one is not None for one in (messages, prompt, tokens)) != 1:
            raise BadRequest("give exactly one of messages, prompt and tokens")
        if messages is not None:
            if self._template is None:
                raise Unsupported(
                    "this model has no chat template",
                    hint="send a prompt instead of messages, or choose an instruct model",
                    param="messages",
                )
            return self._template.encode(messages)
        if prompt is not None:
            ids = self._vocabulary.encode(prompt)
            if self.facts.add_bos and self.facts.bos_id is not None and ids[:1] != [self.facts.bos_id]:
                ids.insert(0, self.facts.bos_id)
            return ids
        assert tokens is not None
        self._check_ids(tokens, "tokens")
        return list(tokens)

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones left out."""
        return self._vocabulary.text(tokens)

    def request(self, request_id: int, submit: Submit, arrived_s: float) -> Request:
        """A request ready to be queued. `arrived_s`: on the step loop's clock."""
        sampling, facts = submit.sampling, self.facts
        prompt = self.tokens_of(messages=submit.messages, prompt=submit.prompt, tokens=submit.tokens)
        limit = self._limit(submit.ctx)
        if not prompt:
            raise BadRequest("the prompt is empty", hint="send at least one token", param="prompt")
        # Of a resumed request the answer so far counts as answer: it may fill the context, the prompt may not.
        if len(prompt) >= limit:
            raise self._too_long(len(prompt), limit, submit.ctx)
        self._check_ids(submit.resume, "resume")
        self._check_ids(tuple(sampling.logit_bias), "sampling.logit_bias")
        params = settle(sampling, facts.sampling, secrets.randbits(63))
        wanted = limit if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        stream = TextStream(self._vocabulary, sampling.stop)
        for token in submit.resume:
            stream.push(token)  # its client has this text
        return Request(
            id=request_id,
            serial=next(self._serials),
            priority=submit.priority,
            salt=submit.tenant.encode(),
            prompt_tokens=len(prompt),
            tokens=[*prompt, *submit.resume],
            max_total_tokens=min(wanted, limit),
            end_ids=frozenset() if sampling.ignore_eos else facts.end_ids,
            sampler=Sampler(params, facts.vocab, prompt, submit.resume),
            stream=stream,
            times=Times(arrived_s),
            resumed=len(submit.resume),
        )

    def _limit(self, ctx: int | None) -> int:
        if ctx is not None and ctx > self.facts.context:
            raise ContextLengthExceeded(
                f"a context of {ctx} tokens was asked for, this model's is {self.facts.context}", param="ctx"
            )
        if ctx is not None and ctx < 2:
            raise BadRequest("ctx must hold at least a token of prompt and one of answer", param="ctx")
        return min(ctx or self.facts.context, self.facts.capacity_tokens)

    def _too_long(self, used: int, limit: int, ctx: int | None) -> ContextLengthExceeded:
        if limit < (ctx or self.facts.context):
            return ContextLengthExceeded(
                f"the prompt has {used} tokens; the memory given to tierd holds {limit} of one sequence, "
                "the answer included",
                hint="give it more with --device-mem, --host-mem or --nvme-mem, or shorten the prompt",
                param="prompt",
            )
        return ContextLengthExceeded(
            f"the prompt has {used} tokens; the context holds {limit}, the answer included",
            hint="shorten the prompt",
            param="prompt",
        )

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        for token in ids:
            if not 0 <= token < self.facts.vocab:
                raise BadRequest(f"{name}: no token {token}, the vocabulary ends at {self.facts.vocab - 1}", param=name)

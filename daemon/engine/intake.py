"""From a `Submit` to a `Request`: template, tokens, limits, defaults. What cannot run is refused here, with the reason.

Threading: one thread (the tokenizer's); it may be another than the step thread. `compile` on any other.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import msgspec

from tierd.daemon.engine import beams, turns
from tierd.daemon.engine.answer_stream import AnswerStream
from tierd.daemon.engine.beams import Beams
from tierd.daemon.engine.chat import ChatTemplate, Prompt
from tierd.daemon.engine.embed import EmbedArgs, Embedding, Pooling
from tierd.daemon.engine.fill_in import fill_in
from tierd.daemon.engine.guide import Guides
from tierd.daemon.engine.guide_grammar import chosen, grammar_of
from tierd.daemon.engine.ladder import Rungs, checked, page_salt
from tierd.daemon.engine.logprobs import Logprobs
from tierd.daemon.engine.request import Request, Times
from tierd.daemon.engine.sampler import Params, Sampler, settle
from tierd.daemon.engine.tokens import Vocabulary
from tierd.daemon.engine.tool_formats import Dialect
from tierd.daemon.engine.turns import Turn, Turns
from tierd.daemon.errors import BadRequest, ContextLengthExceeded, Unsupported
from tierd.daemon.kv_mode import EXACT, Kind, KvMode
from tierd.daemon.kv_mode import parse as parse_mode
from tierd.daemon.protocol import Message, Sampling, Submit, Tool, ToolCall
from tierd.kernels.rows import Ladder

_NEVER = -1e9  # a bias that no logit outweighs


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
    pooling: Pooling = Pooling.MEAN  # what the model makes embeddings of
    modes: Set[Kind] = frozenset(Kind)  # what it is computed on has these memory modes
    windows: Sequence[int] = ()  # of its layers, 0 for none
    ladder: Ladder | None = None  # the longest that there is memory for

    def __post_init__(self) -> None:
        if min(self.vocab, self.context, self.capacity_tokens) < 1:
            raise ValueError("vocab, context and capacity must be positive")


class Intake:
    """Makes requests. Every refusal is a `BadRequest` of some kind. `close` when the engine ends."""

    def __init__(
        self, facts: Facts, vocabulary: Vocabulary, template: ChatTemplate | None, turns: Turns | None = None
    ) -> None:
        self.facts = facts
        self.turns = Turns(None) if turns is None else turns
        self._vocabulary = vocabulary
        self._template = template
        self._dialect = template.dialect if template is not None else Dialect()
        self.guides = Guides(vocabulary, facts.vocab, tuple(facts.end_ids | self._dialect.end_ids))
        self._fim = fill_in(vocabulary.added)
        self._serials = itertools.count()

    def close(self) -> None:
        """End threads, write what is to be remembered."""
        self.guides.close()
        self.turns.flush()
        self.turns.close()

    def tokens_of(
        self,
        *,
        messages: Sequence[Message] | None = None,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
        tools: Sequence[Tool] = (),
        thinking: bool | None = None,
    ) -> list[int]:
        """Token ids of exactly one of the three. Raises BadRequest when it is not one, or cannot be tokens."""
        submit = Submit(
            "",
            messages=None if messages is None else tuple(messages),
            prompt=prompt,
            tokens=None if tokens is None else tuple(tokens),
            tools=tuple(tools),
            thinking=thinking,
        )
        return self._prompt(submit, b"").tokens

    def compile(self, submit: Submit) -> None:
        """Make ready what an answer is held to, which may take seconds. Raises BadRequest."""
        if (grammar := self._grammar(submit)) is not None:
            self.guides.compile(grammar, _held_by(submit), submit.tenant.encode(), _salt(submit))

    def needs_compiling(self, submit: Submit) -> bool:
        """Whether `compile` has anything to do."""
        return submit.format is not None or (bool(submit.tools) and submit.tool_choice != "none")

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones left out."""
        return self._vocabulary.text(tokens)

    def request(self, request_id: int, submit: Submit, arrived_s: float) -> Request:
        """A request ready to be queued. `arrived_s`: on the step loop's clock."""
        sampling, facts = submit.sampling, self.facts
        tenant, salt = submit.tenant.encode(), _salt(submit)
        grammar = self._grammar(submit)
        if grammar is not None and submit.beam_width:
            raise Unsupported("beam search is for free answers", hint="leave beam_width out", param="beam_width")
        if submit.beam_width:
            beams.check(submit)
        found = self._prompt(submit, salt)
        prompt = found.tokens
        mode, ladder = self._mode(submit)
        limit = self._limit(submit.ctx, mode)
        if not prompt:
            raise BadRequest("the prompt is empty", hint="send at least one token", param="prompt")
        if mode is not None and mode.endless:
            limit += len(prompt)  # a context for the answer, unless it is said how long that may be
            limit = max(limit, len(prompt) + (sampling.max_tokens or 0))
        # Of a resumed request the answer so far counts as answer: it may fill the context, the prompt may not.
        if len(prompt) >= (longest := self._prompt_limit(limit, mode)):
            raise self._too_long(len(prompt), longest, submit)
        self._check_ids(submit.resume, "resume")
        self._check_ids(tuple(sampling.logit_bias), "sampling.logit_bias")
        params = settle(self._without_calls(submit), facts.sampling, secrets.randbits(63))
        wanted = limit if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        guide = None
        if grammar is not None:
            guide = self.guides.guide(grammar, _held_by(submit), submit.resume, tenant=tenant, salt=salt)
        return Request(
            id=request_id,
            serial=next(self._serials),
            priority=submit.priority,
            salt=page_salt(salt, ladder),
            prompt_tokens=len(prompt),
            tokens=[*prompt, *submit.resume],
            max_total_tokens=min(wanted, limit),
            end_ids=frozenset() if sampling.ignore_eos else self._end_ids(submit),
            sampler=Sampler(params, facts.vocab, prompt, submit.resume, guide),
            stream=self._stream(submit, found),
            times=Times(arrived_s),
            resumed=len(submit.resume),
            tenant=tenant,
            quota_pages=submit.quota_pages,
            logprobs=None if submit.logprobs is None else Logprobs(self._vocabulary, submit.logprobs),
            beams=self._beams(submit),
            mode=mode,
            rungs=None if ladder is None else Rungs.of(ladder, len(prompt)),
            keep=self._keep(submit, found, salt),
            remember=None
            if submit.messages is None or submit.before
            else self._memory(submit, submit.messages, salt, found.tail),
            tell_prompt=submit.tell_prompt,
        )

    def embedding(self, request_id: int, given: str | Sequence[int], args: EmbedArgs, arrived_s: float) -> Request:
        """A request for the vector of a text, or of tokens. The context may be full to its end: nothing is drawn."""
        submit = Submit("", prompt=given) if isinstance(given, str) else Submit("", tokens=tuple(given))
        tokens, limit = self._prompt(submit, b"").tokens, self._limit(None)
        if not tokens:
            raise BadRequest("it is empty", hint="send at least one token")
        if len(tokens) > limit and not args.truncate:
            raise ContextLengthExceeded(
                f"it has {len(tokens)} tokens, at most {limit} are possible", hint="it is too long: shorten it"
            )
        tokens = tokens[:limit]
        return Request(
            id=request_id,
            serial=next(self._serials),
            priority=args.priority,
            salt=args.tenant.encode(),
            prompt_tokens=len(tokens),
            tokens=tokens,
            max_total_tokens=len(tokens) + 1,  # never reached
            end_ids=frozenset(),
            sampler=Sampler(Params(), self.facts.vocab, ()),
            stream=AnswerStream(self._vocabulary),
            times=Times(arrived_s),
            tenant=args.tenant.encode(),
            quota_pages=args.quota_pages,
            embedding=Embedding(self.facts.pooling),
        )

    def _prompt(self, submit: Submit, salt: bytes) -> Prompt:
        """The tokens of exactly one of messages, prompt and tokens."""
        if sum(one is not None for one in (submit.messages, submit.prompt, submit.tokens)) != 1:
            raise BadRequest("give exactly one of messages, prompt and tokens")
        if submit.suffix is not None and submit.prompt is None:
            raise BadRequest("suffix goes with prompt", param="suffix")
        if submit.messages is not None:
            found = self._chat(submit, submit.messages, salt)
            self._check_ids(submit.before, "before")
            return replace(found, tokens=[*submit.before, *found.tokens])
        if submit.tools:
            raise BadRequest("tools go with messages", param="tools")
        if submit.tokens is not None:
            self._check_ids(submit.tokens, "tokens")
            return Prompt(list(submit.tokens), "", False)
        assert submit.prompt is not None
        if submit.suffix is None:
            ids = self._vocabulary.encode(submit.prompt)
        elif self._fim is None:
            raise Unsupported(
                "this model cannot fill in text before a suffix", hint="choose a model for code", param="suffix"
            )
        else:
            ids = self._fim.tokens(self._vocabulary.encode_as_text, submit.prompt, submit.suffix)
        if self.facts.add_bos and self.facts.bos_id is not None and ids[:1] != [self.facts.bos_id]:
            ids.insert(0, self.facts.bos_id)
        return Prompt(ids, "", False)

    def _chat(self, submit: Submit, messages: Sequence[Message], salt: bytes) -> Prompt:
        if self._template is None:
            raise Unsupported(
                "this model has no chat template",
                hint="send a prompt instead of messages, or choose an instruct model",
                param="messages",
            )
        return self._template.encode(
            messages, self._shown(submit), submit.thinking, self._known(messages, submit.tools, salt)
        )

    def _shown(self, submit: Submit) -> Sequence[Tool]:
        """The tools that the prompt tells of. They stay when none may be called: the prompt's pages then fit."""
        known = self._template is not None and self._template.knows_tools
        return submit.tools if known or submit.tool_choice != "none" else ()

    def _known(self, messages: Sequence[Message], tools: Sequence[Tool], salt: bytes) -> dict[int, Turn]:
        """Turns of the conversation whose tokens are remembered, by their place."""
        if not len(self.turns):
            return {}
        known, digest = {}, turns.start(salt, tools)
        for place, message in enumerate(messages):
            digest = turns.after(digest, message)
            if message.role == "assistant" and (turn := self.turns.get(digest)) is not None:
                known[place] = turn
        return known

    def _memory(
        self, submit: Submit, messages: Sequence[Message], salt: bytes, tail: str
    ) -> Callable[[Request], None]:
        """Remembers the turn of a request that has ended well. It runs on the step thread."""
        digest, tenant = turns.start(salt, submit.tools), submit.tenant.encode()
        for message in messages:
            digest = turns.after(digest, message)

        def remember(request: Request) -> None:
            told = request.stream.told
            said = request.tokens[request.prompt_tokens :]
            while said and said[-1] in request.end_ids:
                said.pop()  # the template writes the end of a turn
            if not said or request.stream.stop is not None:
                return  # what stands behind a stop string was never told
            calls = tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in told.calls)
            answer = Message("assistant", told.text, tool_calls=calls)
            self.turns.put(turns.after(digest, answer), Turn(tuple(said), tail, bool(told.thinking)), tenant)

        return remember

    def _beams(self, submit: Submit) -> Beams | None:
        """A beam search. One of a single beam is greedy, which is what the sampler does then."""
        if submit.beam_width < 2:
            return None
        return Beams(submit.beam_width, submit.n, lambda: AnswerStream(self._vocabulary))

    def _keep(self, submit: Submit, prompt: Prompt, salt: bytes) -> tuple[tuple[int, float], ...]:
        """Wishes that the beginning of the prompt stay, in tokens. One that a template cannot show alone is not met."""
        messages, kept = submit.messages or (), []
        for wish in submit.keep:
            part = messages[: wish.messages] or (Message("user", ""),)
            with contextlib.suppress(BadRequest):
                end = self._chat(submit, part, salt).tokens
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(end, prompt.tokens, strict=False))
                kept.append((sum(1 for _ in same), wish.ttl_s))
        return tuple(kept)

    def _grammar(self, submit: Submit) -> str | None:
        """What the answer is held to."""
        if submit.messages is None or self._template is None:
            return grammar_of(submit, Dialect(), {}, thinking=False)
        thinking = submit.thinking if submit.thinking is False else self._template.begins_thinking(submit.thinking)
        return grammar_of(submit, self._dialect, self._vocabulary.added, thinking=thinking)

    def _stream(self, submit: Submit, prompt: Prompt) -> AnswerStream:
        """The answer's stream, behind what the client has of it already."""
        stop, dialect = submit.sampling.stop, self._dialect
        if submit.messages is None:
            stream = AnswerStream(self._vocabulary, stop)
        else:
            names = frozenset(tool.name for tool in chosen(submit))
            stream = AnswerStream(
                self._vocabulary,
                stop,
                parser=dialect.parser(names, begun=prompt.thinking),
                controls=dialect.controls,
                call_id=dialect.call_id,
                one_call=not submit.parallel_tool_calls,
            )
        for token in submit.resume:
            stream.push(token)
        return stream

    def _without_calls(self, submit: Submit) -> Sampling:
        """The sampling of a request; where no tool may be called, the token that begins a call is ruled out."""
        sampling, opening = submit.sampling, self._dialect.opening_id
        if submit.beam_width:
            sampling = msgspec.structs.replace(sampling, temperature=0.0)
        if not submit.tools or submit.tool_choice != "none" or opening is None:
            return sampling
        return msgspec.structs.replace(sampling, logit_bias={**sampling.logit_bias, opening: _NEVER})

    def _end_ids(self, submit: Submit) -> frozenset[int]:
        ends = self.facts.end_ids | self._dialect.end_ids
        return ends | self._fim.end_ids if submit.suffix is not None and self._fim is not None else ends

    def _mode(self, submit: Submit) -> tuple[KvMode | None, Ladder | None]:
        """The memory mode of a request, a bounded one or a ladder. Raises BadRequest for one that cannot be."""
        mode = parse_mode(submit.kv_mode or EXACT)
        if mode is None:
            return None, None
        if mode.exact_last:
            return None, checked(mode, self.facts.ladder, submit.beam_width)
        if mode.kind not in self.facts.modes:
            raise Unsupported(
                f"kv_mode {mode} is not there on the card yet", hint='leave it out, or "exact"', param="kv_mode"
            )
        if submit.beam_width:
            raise Unsupported("beam search keeps the whole context", hint="leave kv_mode out", param="kv_mode")
        if mode.endless and mode.exact_tokens > self.facts.context:
            raise BadRequest(
                f"kv_mode {mode} sees {mode.exact_tokens} tokens, the model's context holds {self.facts.context}",
                hint="choose a smaller window", param="kv_mode",
            )  # fmt: skip
        return mode.fitted(self.facts.windows), None

    def _limit(self, ctx: int | None, mode: KvMode | None = None) -> int:
        if ctx is not None and ctx > self.facts.context:
            raise ContextLengthExceeded(
                f"a context of {ctx} tokens was asked for, this model's is {self.facts.context}", param="ctx"
            )
        if ctx is not None and ctx < 2:
            raise BadRequest("ctx must hold at least a token of prompt and one of answer", param="ctx")
        longest = ctx or self.facts.context
        return min(longest, self.facts.capacity_tokens) if mode is None or mode.selects else longest

    def _prompt_limit(self, limit: int, mode: KvMode | None) -> int:
        """Where the prompt ends at the latest: all of it has to be there once, whatever is kept of it then."""
        return min(limit, self.facts.capacity_tokens) if mode is not None and mode.thins else limit

    def _too_long(self, used: int, limit: int, submit: Submit) -> ContextLengthExceeded:
        param = "prompt" if submit.messages is None else "messages"
        what = f"the prompt is too long: {used} tokens"  # words by which clients know what to do
        if limit < (submit.ctx or self.facts.context):
            return ContextLengthExceeded(
                f"{what}; the memory given to tierd holds {limit} of one sequence, the answer included",
                hint="shorten it, or give more memory with --device-mem, --host-mem or --nvme-mem",
                param=param,
            )
        more = ", or ask for more context with ctx (num_ctx for Ollama)" if limit < self.facts.context else ""
        return ContextLengthExceeded(
            f"{what}; the context holds {limit}, the answer included", hint=f"shorten it{more}", param=param
        )

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        for token in ids:
            if not 0 <= token < self.facts.vocab:
                raise BadRequest(f"{name}: no token {token}, the vocabulary ends at {self.facts.vocab - 1}", param=name)


def _salt(submit: Submit) -> bytes:
    """What pages, turns and grammars are told apart by: nobody finds those of another tenant."""
    return submit.tenant.encode() + (b"\0" + submit.salt.encode() if submit.salt else b"")


def _held_by(submit: Submit) -> str:
    """The field that an answer is held to."""
    return "format" if submit.format is not None else "tools"

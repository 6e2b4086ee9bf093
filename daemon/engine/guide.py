"""Holds answers to grammars: which tokens may come next, computed while the model computes how likely they are.

A grammar is compiled in a process of its own first, to see whether it can be done (`guide_check`), then here, on a
thread of its own; the result is kept for the next request with the same grammar. A stream gets a copy of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tierd.daemon.engine import guide_check
from tierd.daemon.engine.fair import Fair
from tierd.daemon.engine.tokens import Vocabulary
from tierd.daemon.errors import BadRequest, Unsupported

log = logging.getLogger(__name__)

MAX_COMPILED = 32  # grammars kept; one is some hundred kB, at its limits some tens of MB
# Of the step loop with one stream, while a mask of that stream is computed and was not ready when the logits were. They
# nearly always are.
PATIENCE_S = 2.0
PATIENCE_PER_TOKEN_S = 0.005
MAX_WAIT_S = 20.0  # for one mask, whatever is computed before it: the compiler's limits end each of those sooner
MAX_ENDED = 1024  # more than streams

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


class _Tokens:
    """The vocabulary as llguidance wants it. Tokens that stand for a text of their own are special: no text has them.

    It is asked for the tokens of a text where the grammar leaves no choice, so that the answer is split as the model
    splits it.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, size: int, end_id: int) -> None:
        self.eos_token_id = end_id
        added = set(vocabulary.added.values())
        known = range(min(vocabulary.size, size))
        self.tokens = [
            (vocabulary.token_text(token) or f"<[{token}]>").encode() if token in added
            else vocabulary.token_bytes(token) or f"<[{token}]>".encode()
            for token in known
        ] + [f"<[{token}]>".encode() for token in range(len(known), size)]  # fmt: skip
        empty = [token for token in known if token not in added and not vocabulary.token_bytes(token)]
        self.special_token_ids = sorted({*added, *empty, *range(len(known), size)} & set(range(size)))
        self._bytes = {text[0]: token for token, text in enumerate(self.tokens) if len(text) == 1}
        self._vocabulary = vocabulary
        spelled = sorted(vocabulary.added, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, spelled)) if spelled else r"(?!)")

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids that make exactly this text, none of them special. Called on the thread of masks."""
        data = text if isinstance(text, bytes) else text.encode()
        ids: list[int] = []
        start, whole = 0, data.decode()
        for found in self._spelled.finditer(whole):
            # Cut behind its first character, it is not seen as one token.
            ids += self._split(whole[start : found.start() + 1])
            start = found.start() + 1
        ids += self._split(whole[start:])
        if b"".join(self.tokens[token] for token in ids) == data:
            return ids
        return [self._bytes[byte] for byte in data]  # a tokenizer that normalizes texts

    def _split(self, text: str) -> list[int]:
        vocabulary = self._vocabulary
        if not vocabulary.strips_first_space or not text:
            return vocabulary.encode(text)
        # It puts a space before a text, where the answer has none: before a line end, which joins with nothing.
        ids = vocabulary.encode("\n" + text)
        end = next((place for place, token in enumerate(ids) if self.tokens[token].endswith(b"\n")), -1)
        return ids[end + 1 :]


class Guides:
    """Compiled grammars of one model. `close` ends its threads.

    Threading: `compile` on `compiler` or any one thread; `guide` on any thread.
    """

    def __init__(self, vocabulary: Vocabulary, size: int, end_ids: Sequence[int]) -> None:
        """`size`: ids the model knows; `end_ids`: what may come when an answer is whole."""
        self._vocabulary = vocabulary
        self._size = size
        self._end_ids = sorted(end_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: Fair[bytes, LLMatcher] = Fair(MAX_COMPILED)
        # Owners hear of their failures through futures. One thread each: a grammar that takes seconds holds up other
        # new grammars, and no mask.
        self.compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masks = Masks()

    def compile(self, grammar: str, param: str, tenant: bytes = b"", salt: bytes = b"") -> LLMatcher:
        """A matcher at the beginning of a grammar. Raises BadRequest that names `param` when it is none.

        One that others with another salt have compiled is compiled once more: the time it takes must not tell of it.
        """
        key = hashlib.blake2b(hashlib.sha256(salt).digest() + grammar.encode(), digest_size=16).digest()
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                return known
        if not self._end_ids:
            raise Unsupported(f"this model names no end token, which {param} needs", param=param)
        guide_check.check(grammar, param)
        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=guide_check.limits())
        if matcher.is_error():
            raise BadRequest(f"{param}: {matcher.get_error()[: guide_check.MAX_SAID_CHARS]}", param=param)
        with self._lock:
            self._compiled.put(key, matcher, tenant)
        return matcher

    def guide(
        self, grammar: str, param: str, said: Sequence[int] = (), *, tenant: bytes = b"", salt: bytes = b""
    ) -> Guide:
        """A guide for one stream that has said these tokens. Raises BadRequest."""
        matcher = self.compile(grammar, param, tenant, salt).deep_copy()
        if said and not matcher.consume_tokens(list(said)):
            raise BadRequest(f"the answer so far does not fit {param}", param="resume")
        return Guide(matcher, self._size, self._end_ids, self._masks)

    def close(self) -> None:
        """End the threads."""
        self.compiler.shutdown(wait=True, cancel_futures=True)
        self._masks.close()

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                tokens = TokenizerWrapper(_Tokens(self._vocabulary, self._size, self._end_ids[0]))
                self._tokenizer = LLTokenizer(
                    tokens, n_vocab=self._size, eos_token=self._end_ids, slices=LLTokenizer.json_slices()
                )
            return self._tokenizer


@dataclass(slots=True)
class Patience:
    """Seconds that others may still wait for the masks of one stream."""

    left_s: float = PATIENCE_S


class Masks:
    """The thread on which the masks of all streams are computed, one after the other. `close` ends it.

    A wait is put down to the streams whose masks were computed meanwhile, whosever mask was waited for: one that is
    much work does not use up the patience with those behind it. Threading: `begin` any thread, `wait` one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._clock = clock
        self._running: tuple[Patience, float] | None = None  # whose mask is computed, and since when
        # Computed, and when; emptied by every wait. What ended before it costs nobody anything.
        self._ended: deque[tuple[Patience, float, float]] = deque(maxlen=MAX_ENDED)

    def begin(self, whose: Patience, work: Callable[[], Mask]) -> Future[Mask]:
        """Compute a mask of a stream."""
        return self._pool.submit(self._compute, whose, work)

    def _compute(self, whose: Patience, work: Callable[[], Mask]) -> Mask:
        begun_s = self._clock()
        self._running = (whose, begun_s)
        try:
            return work()
        finally:
            self._running = None
            self._ended.append((whose, begun_s, self._clock()))

    def wait(self, whose: Patience, mask: Future[Mask]) -> Mask:
        """A mask that was begun. Raises TimeoutError when the stream's own computing has used up its patience."""
        since_s = self._clock()
        try:
            while whose.left_s > 0.0:
                running = self._running
                own_s = self._clock() - max(running[1], since_s) if running and running[0] is whose else 0.0
                if own_s >= whose.left_s or self._clock() - since_s >= MAX_WAIT_S:
                    break
                with contextlib.suppress(TimeoutError):
                    return mask.result(whose.left_s - own_s)
            raise TimeoutError
        finally:
            self._charge(since_s)
            whose.left_s += PATIENCE_PER_TOKEN_S

    def _charge(self, since_s: float) -> None:
        for _ in range(len(self._ended)):
            whose, begun_s, ended_s = self._ended.popleft()
            whose.left_s -= max(ended_s - max(begun_s, since_s), 0.0)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Guide:
    """The grammar of one stream, at the place where the stream is.

    Threading: one owner. Only the thread of `masks` uses the matcher.
    """

    def __init__(self, matcher: LLMatcher, size: int, end_ids: Sequence[int], masks: Masks) -> None:
        self._matcher = matcher
        self._size = size
        self._end_ids = list(end_ids)
        self._masks = masks
        self._patience = Patience()
        self._next = masks.begin(self._patience, self._mask)

    def masked(self, logits: Floats) -> Floats:  # [vocab] -> [vocab]
        """The logits with all tokens ruled out that cannot come next.

        Raises BadRequest when the grammar is too much work: the others' streams wait meanwhile.
        """
        try:
            allowed = self._masks.wait(self._patience, self._next)
        except TimeoutError:
            raise self._failure("took too long") from None
        return np.where(allowed[: logits.size], logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Go on behind a token that was drawn."""
        self._next = self._masks.begin(self._patience, lambda: self._advance(token))

    def _advance(self, token: int) -> Mask:
        if not self._matcher.consume_token(token):
            raise self._failure(self._matcher.get_error())
        return self._mask()

    def _mask(self) -> Mask:
        """What may come next, bit by bit. Where the answer is whole, an end is all that may."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            mask = np.zeros(self._size, np.bool_)
            mask[self._end_ids] = True
            return mask
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._failure(self._matcher.get_error())
        return np.unpackbits(packed, count=self._size, bitorder="little").view(np.bool_)

    def _failure(self, why: str) -> BadRequest:
        log.warning("a grammar failed: %s", why[:500])
        return BadRequest(
            "the grammar is too much work at this place of the answer", hint="make it less ambiguous", param="format"
        )

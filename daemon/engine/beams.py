"""Beam search: the hypotheses of one request, and the pages that they share.

Scores are those of transformers' `generate(num_beams=width)` with its defaults (length_penalty 1, early_stopping
False): the sum of log probabilities, divided by the number of generated tokens, an end token included, when a
hypothesis ends. The search is over when the likeliest running hypothesis can't become better than the worst of `width`
ended ones, by its score so far; or when no more tokens may be generated: then the likeliest running ones end, too.
Differences: sums are kept in double precision, and equal scores go to the earlier hypothesis and the smaller token.

Every running hypothesis has a lease. Those that continue the same one share its full pages; the page that is being
written is copied (`Pager.fork`). All have the same length, so that one step computes one row of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierd.daemon.engine.answer_stream import AnswerStream
from tierd.daemon.engine.logprobs import log_softmax
from tierd.daemon.engine.sampler import BadLogits, largest
from tierd.daemon.engine.scheduler import Phase, Stream
from tierd.daemon.errors import Unsupported
from tierd.daemon.protocol import Sampling, Submit
from tierd.tiers.lease import Lease
from tierd.tiers.pager import Pager

if TYPE_CHECKING:
    from tierd.daemon.engine.request import Request

Floats = npt.NDArray[np.float32]

# Searches that begin again because a page could not be copied; more is a fault that does not pass.
MAX_RESTARTS = 8


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A continuation of the prompt. `score`: the sum of log probabilities; of an ended one, per token."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    ended: bool = False  # by an end token, which is the last of `tokens`


class BeamSearch:
    """The search alone, without pages. Pure.

    Args:
        width: hypotheses that are kept.
        end_ids: tokens that end one.
        most_tokens: of an answer.
    """

    def __init__(self, width: int, end_ids: frozenset[int], most_tokens: int) -> None:
        self.width = width
        self.running = [Hypothesis()]
        self.ended: list[Hypothesis] = []  # the best first, at most `width`
        self.over = False
        self._end_ids = end_ids
        self._most_tokens = most_tokens

    def advance(self, logits: Floats) -> list[int]:  # [running, vocab]
        """One token more for each. Returns, for each hypothesis that runs now, the place of the one it continues."""
        candidates = self._candidates(logits)
        length = len(self.running[0].tokens) + 1
        last = length >= self._most_tokens
        kept: list[Hypothesis] = []
        parents: list[int] = []
        for order, (score, parent, token) in enumerate(candidates):
            tokens = (*self.running[parent].tokens, token)
            ended = token in self._end_ids
            if ended or last:
                # The others only exist so that enough are left to go on with.
                if order < self.width:
                    self.ended.append(Hypothesis(tokens, score / length, ended))
            elif len(kept) < self.width:
                kept.append(Hypothesis(tokens, score))
                parents.append(parent)
        self.ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self.ended[self.width :]
        self.over = not kept or self._is_hopeless(kept[0].score / length)
        self.running = kept
        return parents

    def _candidates(self, logits: Floats) -> list[tuple[float, int, int]]:
        """(score, parent, token), the best first: enough that `width` remain when all end tokens are among them."""
        count = max(2, 1 + len(self._end_ids)) * self.width
        found: list[tuple[float, int, int]] = []
        for parent, (hypothesis, row) in enumerate(zip(self.running, logits, strict=True)):
            values = log_softmax(row)
            if not np.isfinite(values[int(np.argmax(values))]):  # NaN wins an argmax
                raise BadLogits()
            found += [
                (hypothesis.score + float(values[token]), parent, int(token))
                for token in largest(row, min(count, row.size))
            ]
        found.sort(key=lambda one: (-one[0], one[1], one[2]))
        return found[:count]

    def _is_hopeless(self, best: float) -> bool:
        return len(self.ended) == self.width and best <= self.ended[-1].score


@dataclass(slots=True)
class _Branch:
    """A running hypothesis's pages. `tokens`: what was generated and computed in them."""

    lease: Lease
    tokens: tuple[int, ...]
    is_copy: bool = False  # a page of it was copied, or was to be: `is_broken` has to look


@dataclass(slots=True)
class Beams:
    """The beam search of one request. Threading: step thread only.

    Args:
        width, answers: hypotheses that run; how many of the best are told.
        stream: makes what turns the tokens of one answer into text.
    """

    width: int
    answers: int
    stream: Callable[[], AnswerStream]
    search: BeamSearch | None = None
    restarts: int = 0
    _branches: list[_Branch] = field(default_factory=list)
    _parents: list[int] | None = None  # of the running hypotheses, until they have leases

    @property
    def forked(self) -> bool:
        """Whether hypotheses have leases of their own."""
        return bool(self._branches)

    @property
    def leases(self) -> list[Lease]:
        """Those of the running hypotheses, in order."""
        return [branch.lease for branch in self._branches]

    @property
    def newest(self) -> list[int]:
        """The last token of each running hypothesis: the row that is to be computed."""
        assert self.search is not None
        return [hypothesis.tokens[-1] for hypothesis in self.search.running]

    @property
    def ready(self) -> bool:
        """Whether every running hypothesis has all its pages."""
        return self._parents is None and all(
            branch.lease.ready and not branch.is_copy for branch in self._branches
        )

    def take(self, pager: Pager, request: Request, logits: Floats) -> None:  # [running, vocab]
        """One token more for every hypothesis, after their rows were computed. `search.over` may be true then."""
        size = pager.page_tokens
        if self.search is None:
            most = request.max_total_tokens - request.prompt_tokens
            self.search = BeamSearch(self.width, request.end_ids, most)
            assert request.lease is not None
            self._branches = [_Branch(request.lease, ())]
        else:
            for branch, hypothesis in zip(self._branches, self.search.running, strict=True):
                branch.tokens = hypothesis.tokens
                if request.computed % size == 0:
                    pager.commit(branch.lease, _whole(request, branch))
        self._parents = self.search.advance(logits)

    def settle(self, pager: Pager, request: Request) -> None:
        """Gives every running hypothesis its pages, once the device has room for those that are copied."""
        if self._parents is None:
            return
        children = set(self._parents)
        for place, branch in enumerate(self._branches):
            if place not in children:
                self._release(pager, request, branch)
        self._branches = [self._branches[place] for place in sorted(children)]
        request.lease = self._branches[0].lease
        places = {place: number for number, place in enumerate(sorted(children))}
        self._parents = [places[place] for place in self._parents]
        is_copied = request.computed % pager.page_tokens > 0
        if not pager.make_room(len(self._parents) - len(children) if is_copied else 0):
            return
        taken: set[int] = set()
        branches = []
        for place in self._parents:
            branch = self._branches[place]
            if place in taken:
                twin = pager.fork(branch.lease, _whole(request, branch))
                branch = replace(branch, lease=twin, is_copy=is_copied)
            taken.add(place)
            branches.append(branch)
        self._branches, self._parents = branches, None
        request.lease = branches[0].lease

    def is_broken(self, computed: int) -> bool:
        """Whether a page is gone, or the copy of one never came: the search has to begin again."""
        for branch in self._branches:
            lease = branch.lease
            if lease.absent or (branch.is_copy and lease.ready and lease.reached < computed):
                return True
            branch.is_copy &= not lease.ready
        return False

    def release(self, pager: Pager, request: Request) -> None:
        """Gives all pages back, and forgets the search."""
        branches, self._branches, self._parents, self.search = self._branches, [], None, None
        for branch in branches:
            self._release(pager, request, branch)

    def seen(self, stream: Stream, request: Request, page_tokens: int) -> Stream:
        """What the scheduler sees of the request."""
        if not self._branches:
            return replace(stream, width=self.width)
        shared = request.prompt_tokens // page_tokens
        leases = self.leases
        return replace(
            stream,
            width=len(self._parents or leases),
            phase=stream.phase if self.ready else Phase.FETCHING,
            pages=shared + sum(max(lease.num_pages - shared, 0) for lease in leases),
            missing=sum(not lease.has_slot(request.computed // page_tokens) for lease in leases),
        )

    def best(self) -> list[Hypothesis]:
        """The answers, the best first."""
        assert self.search is not None
        return self.search.ended[: self.answers]

    def _release(self, pager: Pager, request: Request, branch: _Branch) -> None:
        # Full pages only: the beginning of a page that no answer goes on with is of no use to anybody.
        full = len(branch.lease.nodes) * pager.page_tokens
        pager.release(branch.lease, _whole(request, branch)[:full])


def check(submit: Submit) -> None:
    """Raises Unsupported for what beams can't be asked for: they draw nothing, and are told at the end."""
    if submit.messages is not None:
        raise Unsupported("beam search is for completions", hint="send a prompt, not messages", param="beam_width")
    if submit.logprobs is not None:
        raise Unsupported("beam search tells no log probabilities", param="logprobs")
    plain, asked = Sampling(), submit.sampling
    for name in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
                 "logit_bias"):  # fmt: skip
        if getattr(asked, name) != getattr(plain, name):
            raise Unsupported(f"beam search takes no {name}", hint="leave it out", param=name)
    if asked.temperature:
        raise Unsupported("beam search draws nothing", hint="leave temperature out", param="temperature")


def _whole(request: Request, branch: _Branch) -> Sequence[int]:
    """Every token that is computed in a branch's pages."""
    return [*request.tokens[: request.prompt_tokens], *branch.tokens]

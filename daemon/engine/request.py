"""One request on its way through the engine: its life, its tokens, its counters and its times.

    WAITING -> FETCHING -> PREFILL -> DECODE -> FINISHED
       ^___________|__________|_________|          preempted: the lease is given back, everything else stays

A request ends once, with one terminal event. Threading: made on the io side, then owned by the step thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from msgspec import UNSET

from tierd.daemon.engine.answer import Said
from tierd.daemon.engine.answer_stream import AnswerStream
from tierd.daemon.engine.beams import Beams
from tierd.daemon.engine.embed import Embedding
from tierd.daemon.engine.heavy import OBSERVED_TOKENS, Heavy
from tierd.daemon.engine.ladder import Rungs
from tierd.daemon.engine.loading import rows_meanwhile
from tierd.daemon.engine.logprobs import Logprobs
from tierd.daemon.engine.pace import Pace
from tierd.daemon.engine.sampler import Sampler
from tierd.daemon.engine.scheduler import Limits, Phase, Stream, pages_for
from tierd.daemon.engine.selection import Selection
from tierd.daemon.engine.speculate import Draft
from tierd.daemon.kv_mode import KvMode
from tierd.daemon.protocol import Timings, Usage
from tierd.tiers.lease import Lease
from tierd.tiers.page import PageKey

AGING_S = 60.0  # one step of priority is worth this much waiting, so that no priority starves another for ever


class Finish(enum.StrEnum):
    """Why a generation that went well ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    TOOL_CALLS = "tool_calls"  # as `STOP`, and tools were called


@dataclass(slots=True)
class Times:
    """Moments on the engine's monotonic clock, in seconds; 0 where it has not happened."""

    arrived_s: float
    admitted_s: float = 0.0
    restored_s: float = 0.0  # pages that were found and had to be moved have come, or are computed after all
    started_s: float = 0.0  # its first row was computed
    first_token_s: float = 0.0
    last_token_s: float = 0.0


@dataclass(slots=True)
class Totals:
    """Counters over all requests since the engine started."""

    requests: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_rows: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    failures: int = 0
    step_s: float = 0.0
    drafted_tokens: int = 0  # computed
    right_drafts: int = 0  # of those, drawn
    lost_steps: int = 0  # void, because streamed pages could not be read
    dropped_steps: int = 0  # void, because somebody new was not to wait for them
    pace: Pace = field(default_factory=Pace)


@dataclass(slots=True)
class Request:
    """State of one generation. `tokens` is the prompt and all that was generated, resumed tokens included."""

    id: int
    serial: int  # order of arrival
    priority: int
    salt: bytes  # keeps the pages of one tenant from another
    prompt_tokens: int
    tokens: list[int]
    max_total_tokens: int  # prompt and answer together: the smaller of max_tokens' and the context's end
    end_ids: frozenset[int]
    sampler: Sampler
    stream: AnswerStream
    times: Times
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    computed: int = 0  # the next row to compute: keys and values of all tokens before it stand in the lease's pages
    fetched_s: float = 0.0  # when the pages of this lease began to load
    fetched_pages: int = 0  # how many
    guessed_row_s: float = 0.0  # of a row, where computing beside the loads is a guess; 0: it is known to help
    settled: bool = False  # what the lease spares is booked
    farthest: int = 0  # rows that it has computed itself at any time are before this one
    keys: list[PageKey] = field(default_factory=list)  # of the pages that its tokens fill, until they are computed
    accepted: bool = False
    cached_tokens: int = 0  # prompt tokens that were never computed here
    hits: tuple[int, int, int] = (0, 0, 0)  # of those, by the tier they came from: device, host, nvme
    unsent: list[int] = field(default_factory=list)  # tokens that the client has not got
    said: Said = field(default_factory=Said)  # what they say; that of the newest may be held back by `stream`
    told_s: float = float("-inf")  # when the client last got text
    progress_s: float = 0.0  # when it was last told how much of its prompt is computed
    resumed: int = 0
    tenant: bytes = b""  # whose cached pages the quota bounds
    quota_pages: int = 0  # 0: no bound
    logprobs: Logprobs | None = None  # when they were asked for
    beams: Beams | None = None  # a beam search instead of draws
    embedding: Embedding | None = None  # the vector of the prompt instead of an answer
    draft: Draft = field(default_factory=Draft)
    drafted: int = 0  # tokens of the draft that the next step should compute
    mode: KvMode | None = None  # what a row sees, if it is not all before it
    selection: Selection | None = None  # what its rows choose pages by, with its lease, where a mode wants that
    rungs: Rungs | None = None  # the exact copies of its pages, under a ladder
    heavy: Heavy | None = None  # what it keeps of its pages, with its lease, where a mode wants that
    keep: tuple[tuple[int, float], ...] = ()  # wishes that so many first tokens stay cached, for so many seconds
    remember: Callable[[Request], None] | None = None  # keeps the turn, once it is whole
    tell_prompt: bool = False  # its end has the tokens of the prompt

    @property
    def rank(self) -> tuple[float, int]:
        """The smaller one comes first. It never changes, so that two requests cannot preempt each other in turn."""
        return (self.times.arrived_s + self.priority * AGING_S, self.serial)

    @property
    def private(self) -> bool:
        """Whether every row has to be computed here: no known page is of use to it, and none of its own to others."""
        return self.embedding is not None and self.embedding.needs_every_row

    @property
    def exact_end(self) -> int:
        """So many of its first tokens have the keys and values that they have without a mode."""
        if self.mode is None:
            return len(self.tokens)
        return max(self.mode.exact_tokens, self.prompt_tokens if self.mode.spares_prompt else 0)

    @property
    def findable(self) -> list[int]:
        """The tokens whose pages may be looked up, and one more: all, unless a mode changes what they hold. The last
        exact row of a selecting one has to be computed here, it learns of the pages before it; and those that are
        observed."""
        if self.mode is None:
            return self.tokens
        computed = 1 if self.mode.selects else OBSERVED_TOKENS if self.mode.thins else 0
        return self.tokens[: self.exact_end + 1 - computed]

    @property
    def exact(self) -> list[int]:
        """The tokens whose computed pages may be known to others."""
        return self.tokens[: min(self.computed, self.exact_end)]

    @property
    def keeps_all(self) -> bool:
        """Whether its pages are as many as those of all its tokens."""
        return self.mode is None or self.mode.selects

    @property
    def thinned(self) -> bool:
        """Whether what it sees of its pages is less than all of them."""
        return self.heavy is not None and self.heavy.thinned

    def most_pages(self, limits: Limits) -> int | None:
        """Pages that it has, or gets, at once at most, where a mode bounds them."""
        if self.mode is None or self.mode.selects:
            return None
        if self.mode.thins:
            tokens = self.mode.kept if self.computed >= self.exact_end else self.exact_end
            return pages_for(tokens, limits.page_tokens) + 2
        return pages_for(self.mode.most_tokens(limits.max_rows), limits.page_tokens) + 2

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def over(self) -> Finish | None:
        """Set when nothing more may be generated: for a resumed request perhaps from the start."""
        if self.stream.stopped:
            return self._stop()
        if len(self.tokens) >= self.max_total_tokens:
            return Finish.LENGTH
        return None

    def covered(self, lease: Lease) -> None:
        """Note what a ready lease spares. After a preemption or a loss a prompt token may be computed after all."""
        if self.rungs is not None:
            self.hits = _trim((lease.hit_device, lease.hit_host, lease.hit_nvme), self.rungs.find(lease))
            return
        found = min(lease.num_tokens, self.prompt_tokens)
        if not self.accepted:
            self.cached_tokens = found
            self.hits = _trim((lease.hit_device, lease.hit_host, lease.hit_nvme), found)
        elif found < self.cached_tokens:
            self.cached_tokens = found
            self.hits = _trim(self.hits, found)

    def recount(self) -> int:
        """Count its cached tokens anew, after what became of its exact copies. Returns by how many more they are."""
        if self.rungs is None:
            return 0
        before, self.cached_tokens = self.cached_tokens, self.rungs.cached_tokens
        return self.cached_tokens - before

    def spare(self, tokens: int, end: int) -> int:
        """Book the last `tokens` before `end`, which somebody else computed since. Returns the newly spared ones.

        Before it was accepted nothing is counted here: `covered` will count all of the lease.
        """
        start = end - tokens if self.rungs is not None else max(end - tokens, self.farthest)
        self.computed = max(self.computed, end)
        spared = max(min(end, self.prompt_tokens) - start, 0) if self.accepted else 0
        self.hits = (self.hits[0] + spared, *self.hits[1:])
        if self.rungs is not None and spared:
            self.rungs.found[start:end] = True
            return self.recount()
        self.cached_tokens += spared
        return spared

    def append(self, token: int, now_s: float) -> tuple[Said, Finish | None]:
        """Add a drawn token. Returns what may be told and, if this was the end, why."""
        self.tokens.append(token)
        self.times.first_token_s = self.times.first_token_s or now_s
        self.times.last_token_s = now_s
        if token in self.end_ids:
            said = self.stream.finish()
            return said, self._stop()
        self.sampler.accept(token)
        self.unsent.append(token)
        said = self.stream.push(token)
        if (over := self.over) is not None:
            said.add(self.stream.finish())
            # What was held back until the end may hold the last part of a stop string, or a call.
            over = self._stop() if self.stream.stopped else over
        return said, over

    def _stop(self) -> Finish:
        return Finish.TOOL_CALLS if self.stream.told.calls else Finish.STOP

    def seen(self, now_s: float, limits: Limits, shared: int = 0) -> Stream:
        """What the scheduler sees of it. `shared`: pages of live requests that it needs as well."""
        seen = Stream(
            id=self.id,
            rank=self.rank,
            phase=self.phase,
            known_tokens=len(self.tokens),
            computed_tokens=self.computed,
            shared=shared,
            drafted=self.drafted,
            waited_s=now_s - self.times.arrived_s,
            background=self.priority > 0,
            restarts=self.private,
            again=self.rungs.lacks if self.rungs is not None else 0,
        )
        if (most := self.most_pages(limits)) is not None:
            seen = replace(seen, most_pages=most)
        lease = self.lease
        if lease is None:
            return seen
        limit = lease.limit(self.computed)
        if self.mode is not None and self.mode.spares_prompt:
            # An answer that is computed again comes a page at a time: what fills meanwhile no row chooses yet, and
            # what rows keep is decided where a page begins.
            page = lease.page_tokens
            last = self.computed if self.mode.selects else self.computed // page * page
            limit = min(limit, self.exact_end if self.computed < self.exact_end else last + page)
        if lease.absent and lease.loading:
            # Pages come from the other end: a short chunk does not compute many that are about to arrive.
            rows = rows_meanwhile(now_s - self.fetched_s, self.guessed_row_s, lease.page_tokens)
            limit = min(limit, self.computed + rows)
        return replace(
            seen,
            pages=lease.num_pages + len(lease.filling) - len(lease.absent) - lease.streamed,
            held_until=lease.held_until(self.computed),
            limit=limit,
        )

    def usage(self, completion_tokens: int | None = None) -> Usage:
        """Token counts up to now. `completion_tokens`: of several answers together."""
        said = self.generated if completion_tokens is None else completion_tokens
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=said,
            cached_tokens=self.cached_tokens,
            kv_mode=UNSET if self.mode is None and self.rungs is None else str(self.mode or self.rungs),
        )

    def timings(self) -> Timings:
        """Measured times up to now. Rates count what this engine did, not what it resumed."""
        times = self.times
        recomputed = self.prompt_tokens - self.cached_tokens
        prefill_s = times.first_token_s - times.started_s
        decode_s = times.last_token_s - times.first_token_s
        drawn = self.generated - self.resumed
        device, host, nvme = _trim(self.hits, self.cached_tokens)
        return Timings(
            ttft_ms=_ms(times.first_token_s - times.arrived_s) if times.first_token_s else 0.0,
            prefill_tokens_per_s=recomputed / prefill_s if times.first_token_s and prefill_s > 0 else 0.0,
            decode_tokens_per_s=(drawn - 1) / decode_s if drawn > 1 and decode_s > 0 else 0.0,
            hit_device=device,
            hit_host=host,
            hit_nvme=nvme,
            recomputed=recomputed,
            queue_ms=_ms(times.admitted_s - times.arrived_s) if times.admitted_s else 0.0,
            restore_ms=_ms(times.restored_s - times.admitted_s) if times.restored_s else 0.0,
            drafted=self.draft.drafted_tokens,
            accepted=self.draft.right_tokens,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)


def _trim(hits: tuple[int, int, int], total: int) -> tuple[int, int, int]:
    """Hits by tier, cut down to `total`. A run's end lies in the lowest tier it touches, so that is cut first."""
    device, host, nvme = hits
    excess = max(device + host + nvme - total, 0)
    cut_nvme = min(nvme, excess)
    cut_host = min(host, excess - cut_nvme)
    return (device - (excess - cut_nvme - cut_host), host - cut_host, nvme - cut_nvme)

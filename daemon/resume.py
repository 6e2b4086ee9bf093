"""One generation as the front knows it: enough to go on with it on another engine.

An engine that dies takes its step with it, not the streams: the front has the request and every token the client got.
It submits the same request again with these tokens as `resume`. Since sampling is keyed by (seed, position) and text is
a function of the tokens, the new engine says exactly what the dead one would have said next.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from tierd.daemon.protocol import Event, Submit

_SEED_BITS = 31


class Live:
    """A generation that has not ended. Times are seconds of a monotonic clock, given by the caller.

    Threading: for one event loop.
    """

    def __init__(self, live_id: int, submit: Submit, now_s: float) -> None:
        self.id = live_id
        self.submit = with_seed(submit)
        self.tokens: list[int] = []  # what the client has
        self.started_s = now_s
        self.sent_s: float | None = None  # when an engine first got it
        self.first_text_s: float | None = None
        self.deaths = 0  # engines that died under it
        self.barren_deaths = 0  # of those, in a row, without one new token before
        self._tokens_at_death = 0
        self._logprob = self._logprob_at_death = 0.0  # of the tokens that the client has, where it was asked for
        self.accepted: dict[str, Any] | None = None

    def send(self, now_s: float) -> Submit:
        """What to submit now: the request, and the tokens that are already out."""
        if self.sent_s is None:
            self.sent_s = now_s
        return msgspec.structs.replace(self.submit, resume=tuple(self.tokens))

    def lost(self) -> None:
        """The engine died under it."""
        self.deaths += 1
        self.barren_deaths = self.barren_deaths + 1 if len(self.tokens) == self._tokens_at_death else 1
        self._tokens_at_death = len(self.tokens)
        self._logprob_at_death = self._logprob

    def take(self, event: Event, now_s: float) -> Event | None:
        """Account for an event of the engine; None when the client must not see it (a second `accepted`)."""
        match event.ev:
            case "accepted":
                if self.accepted is not None:
                    return None
                self.accepted = event.data
                return event
            case "text":
                if self.first_text_s is None:
                    self.first_text_s = now_s
                self.tokens.extend(event.data["tokens"])
                self._logprob += sum(entry["logprob"] for entry in event.data.get("logprobs", ()))
                return event
            case "done":
                return Event(event.id, "done", self._measured(event.data))
            case "refused" if self.accepted is not None:
                # The client was told that it is accepted: from there on a stream fails, it is not refused.
                return Event(event.id, "failed", event.data)
            case _:
                return event

    def usage(self) -> dict[str, int]:
        """Token counts of a stream that the front ends itself."""
        accepted = self.accepted or {}
        return {
            "prompt_tokens": accepted.get("prompt_tokens", 0),
            "completion_tokens": len(self.tokens),
            "cached_tokens": accepted.get("cached_tokens", 0),
        }

    @property
    def load_s(self) -> float:
        """How long it waited for an engine to come up."""
        return 0.0 if self.sent_s is None else self.sent_s - self.started_s

    def _measured(self, data: dict[str, Any]) -> dict[str, Any]:
        """The data of `done`, with what only the front can know.

        After a death the time to the first token is the client's, from the first engine that got the request; the
        remaining timings are those of the last engine.
        """
        timings = {**data.get("timings", {}), "load_ms": round(self.load_s * 1e3, 3)}
        usage = dict(data.get("usage", {}))
        if self.deaths and self.accepted is not None:
            # The last engine found cached what the first one computed for this very request: that is not a hit.
            found = usage.get("cached_tokens", 0)
            usage["cached_tokens"] = min(found, self.accepted.get("cached_tokens", 0))
            _book_as_computed(timings, found - usage["cached_tokens"])
            if self.first_text_s is not None and self.sent_s is not None:
                timings["ttft_ms"] = round((self.first_text_s - self.sent_s) * 1e3, 3)
        if "logprob_sum" in data:  # the last engine counted what it drew itself
            data = {**data, "logprob_sum": data["logprob_sum"] + self._logprob_at_death}
        return {**data, "usage": usage, "timings": timings}


def _book_as_computed(timings: dict[str, Any], tokens: int) -> None:
    """Take the last `tokens` that were found for computed. A run's end lies in the lowest tier that it touches."""
    timings["recomputed"] = timings.get("recomputed", 0) + tokens
    for hit in ("hit_nvme", "hit_host", "hit_device"):
        cut = min(tokens, timings.get(hit, 0))
        if cut:
            timings[hit] -= cut
            tokens -= cut


def with_seed(submit: Submit) -> Submit:
    """The request with a seed of its own: a second engine must draw as the first one did."""
    if submit.sampling.seed is not None:
        return submit
    sampling = msgspec.structs.replace(submit.sampling, seed=secrets.randbits(_SEED_BITS))
    return msgspec.structs.replace(submit, sampling=sampling)

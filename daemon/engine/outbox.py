"""What requests tell: the events of a turn, text in pieces that are worth an event.

Threading: step thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tierd.daemon.engine.answer import Said
from tierd.daemon.engine.request import Finish, Request
from tierd.daemon.engine.scheduler import Phase
from tierd.daemon.protocol import PROMPT, Event

# An event costs io thread, front and client a millisecond together, a tenth of a decode step on two cores that have to
# compute as well. 20 pieces of text a second look as smooth as 100.
TELL_EVERY_S = 0.05
# A person who waits for a long prompt wants to see that it goes on; prompts that take less say nothing.
PROGRESS_EVERY_S = 0.5


class Outbox:
    """Collects events and hands them out once per turn, so that the io thread wakes once."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """The events collected since the last call, in order."""
        events, self._events = self._events, []
        return events

    def accepted(self, request: Request) -> None:
        """How much of the prompt was found."""
        data: dict[str, object] = {"prompt_tokens": request.prompt_tokens, "cached_tokens": request.cached_tokens}
        if request.keep:
            data["keep_tokens"] = [tokens for tokens, _ in request.keep]
        self._events.append(Event(request.id, "accepted", data))

    def due(self, requests: Iterable[Request], now_s: float) -> None:
        """Text: the first of a stream at once, more of it when it had none for a while. Before it, how far it is."""
        for request in requests:
            if request.said and now_s - request.told_s >= TELL_EVERY_S:
                request.told_s = now_s
                self._text(request)
            elif request.phase is Phase.PREFILL and request.accepted and not request.generated:
                self._progress(request, now_s)

    def done(self, request: Request, finish: Finish) -> None:
        """The end of an answer that is complete. The client gets all of its tokens, with text or without.

        Raises what the answer can't be made of; then nothing is told.
        """
        data: dict[str, object] = {"finish": finish.value, "usage": request.usage(), "timings": request.timings()}
        if request.stream.stop is not None:
            data["stop"] = request.stream.stop
        if request.logprobs is not None:
            data["logprob_sum"] = request.logprobs.total
        if request.embedding is not None:
            data["embedding"] = request.embedding.vector()
        if request.tell_prompt:
            data["prompt"] = request.tokens[: request.prompt_tokens]
        if request.unsent or request.said:
            self._text(request)
        self._events.append(Event(request.id, "done", data))

    def beams(self, request: Request) -> None:
        """The end of a beam search: the text of each answer; of several the end of each as well."""
        assert request.beams is not None
        events: list[Event] = []  # told together, when no more can fail
        told, completion_tokens = request.beams.best(), 0
        data: dict[str, object]
        for choice, answer in enumerate(told):
            tokens = list(answer.tokens[:-1] if answer.ended else answer.tokens)
            completion_tokens += len(answer.tokens)
            stream, said = request.beams.stream(), Said()
            for token in tokens:
                said.add(stream.push(token))
            said.add(stream.finish())
            which: dict[str, object] = {"choice": choice} if request.beams.answers > 1 else {}
            events.append(Event(request.id, "text", {**said.data(), "tokens": tokens, **which}))
            if which:
                data = {**which, "finish": _finish(answer.ended), "stop": None}
                events.append(Event(request.id, "choice", data))
        usage = request.usage(completion_tokens)
        data = {"finish": _finish(told[0].ended), "usage": usage, "timings": request.timings()}
        self._events += [*events, Event(request.id, "done", data)]

    def end(self, request: Request, event: str, data: Mapping[str, object]) -> None:
        """Any other end, after the text that there is."""
        if request.said:
            self._text(request)
        self._events.append(Event(request.id, event, dict(data)))

    def _progress(self, request: Request, now_s: float) -> None:
        if now_s - max(request.progress_s, request.times.admitted_s) >= PROGRESS_EVERY_S:
            request.progress_s = now_s
            data = {"stage": PROMPT, "done": request.computed, "total": request.prompt_tokens}
            self._events.append(Event(request.id, "progress", data))

    def _text(self, request: Request) -> None:
        # Tokens travel with the text they made, so that whoever resumes holds exactly the tokens of its text.
        data: dict[str, object] = {**request.said.data(), "tokens": request.unsent}
        if request.logprobs is not None:
            data["logprobs"] = request.logprobs.take(len(request.unsent))
        self._events.append(Event(request.id, "text", data))
        request.unsent, request.said = [], Said()


def _finish(ended: bool) -> str:
    return (Finish.STOP if ended else Finish.LENGTH).value

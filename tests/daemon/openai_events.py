"""Events of an engine, for tests of what the OpenAI dialects make of them."""

from __future__ import annotations

from tierd.daemon.protocol import Event

USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "cached_tokens": 3}
DONE = Event(1, "done", {"finish": "stop", "usage": USAGE, "timings": {"ttft_ms": 2.0}})


def said(text="", *tokens, **more):
    return Event(1, "text", {"text": text, "tokens": list(tokens), **more})


def entry(text, logprob, *others):
    def one(text, logprob):
        return {"token": 1, "text": text, "bytes": text.encode(), "logprob": logprob}

    return {**one(text, logprob), "top": [one(*other) for other in others]}


CALLS = [
    said(calls=[{"index": 0, "id": "a", "name": "look", "arguments": ""}]),
    said(calls=[{"index": 0, "arguments": '{"x"'}]),
    said(calls=[{"index": 0, "arguments": ": 1}"}, {"index": 1, "id": "b", "name": "wait", "arguments": "{}"}]),
]

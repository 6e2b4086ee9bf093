"""What the front remembers of a stream."""

from __future__ import annotations

import pytest

from tierd.daemon.protocol import Event, Sampling, Submit
from tierd.daemon.resume import Live, with_seed


def live():
    return Live(1, Submit("m", prompt="p"), 10.0)


def text(*tokens):
    return Event(1, "text", {"text": "t" * len(tokens), "tokens": list(tokens)})


def test_a_seed_is_fixed_once():
    assert live().submit.sampling.seed is not None
    assert with_seed(Submit("m", sampling=Sampling(seed=0))).sampling.seed == 0


def test_what_the_client_has_goes_along():
    one = live()
    assert one.send(12.0).resume == ()
    for event in (Event(1, "accepted", {"prompt_tokens": 9, "cached_tokens": 4}), text(5, 6), text(7)):
        assert one.take(event, 13.0) is event
    one.lost()
    again = one.send(20.0)
    assert again.resume == (5, 6, 7) and again.sampling == one.submit.sampling
    assert one.take(Event(1, "accepted", {"prompt_tokens": 9, "cached_tokens": 12}), 21.0) is None
    assert one.usage() == {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 4}
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 12}
    timings = {"ttft_ms": 1.0, "hit_host": 8}
    done = one.take(Event(1, "done", {"finish": "stop", "usage": usage, "timings": timings}), 22.0)
    assert done is not None and done.data["usage"]["cached_tokens"] == 4
    assert done.data["timings"]["ttft_ms"] == 1000.0 and done.data["timings"]["load_ms"] == 2000.0


@pytest.mark.parametrize(
    ("first", "last", "hits"),
    [
        (0, (0, 0, 1040), (0, 0, 0)),  # the second engine read back what the first one had computed
        (300, (200, 300, 540), (200, 100, 0)),
        (600, (200, 300, 540), (200, 300, 100)),
        (1040, (0, 0, 1040), (0, 0, 1040)),
        (1500, (0, 16, 1024), (0, 16, 1024)),  # pages were lost with the first engine
    ],
)
def test_counts_of_an_answer_that_two_engines_gave_add_up(first, last, hits):
    one = live()
    one.send(10.0)
    one.take(Event(1, "accepted", {"prompt_tokens": 2724, "cached_tokens": first}), 11.0)
    one.lost()
    one.take(Event(1, "accepted", {"prompt_tokens": 2724, "cached_tokens": sum(last)}), 21.0)
    names = ("hit_device", "hit_host", "hit_nvme")
    timings = {**dict(zip(names, last, strict=True)), "recomputed": 2724 - sum(last)}
    usage = {"prompt_tokens": 2724, "completion_tokens": 3, "cached_tokens": sum(last)}
    done = one.take(Event(1, "done", {"finish": "stop", "usage": usage, "timings": timings}), 22.0)
    assert done is not None and tuple(done.data["timings"][name] for name in names) == hits
    assert done.data["usage"]["cached_tokens"] == sum(hits)
    assert done.data["timings"]["recomputed"] == 2724 - sum(hits)


def test_an_undisturbed_stream_keeps_the_engines_figures():
    one = live()
    one.send(10.5)
    one.take(Event(1, "accepted", {"prompt_tokens": 9, "cached_tokens": 4}), 11.0)
    done = one.take(Event(1, "done", {"usage": {"cached_tokens": 3}, "timings": {"ttft_ms": 7.0}}), 12.0)
    assert done is not None and done.data["usage"]["cached_tokens"] == 3
    assert done.data["timings"] == {"ttft_ms": 7.0, "load_ms": 500.0}


def test_deaths_without_a_token_in_between_are_counted():
    one = live()
    one.lost()
    one.lost()
    assert one.barren_deaths == 2
    one.take(text(1), 1.0)
    one.lost()
    assert (one.deaths, one.barren_deaths) == (3, 1)


def test_a_refusal_after_accepted_is_a_failure():
    one = live()
    refusal = Event(1, "refused", {"code": "loading", "message": "x"})
    assert one.take(refusal, 1.0) is refusal
    one.take(Event(1, "accepted", {}), 1.0)
    failed = one.take(refusal, 1.0)
    assert failed is not None and failed.ev == "failed" and failed.data == refusal.data


def test_the_log_probability_of_an_answer_counts_what_dead_engines_said():
    one = live()
    one.send(10.5)
    said = Event(1, "text", {"text": "a", "tokens": [1, 2], "logprobs": [{"logprob": -0.5}, {"logprob": -0.25}]})
    one.take(said, 11.0)
    one.lost()
    one.take(Event(1, "text", {"text": "b", "tokens": [3], "logprobs": [{"logprob": -1.0}]}), 12.0)
    done = one.take(Event(1, "done", {"usage": {}, "timings": {}, "logprob_sum": -1.125}), 13.0)
    assert done is not None and done.data["logprob_sum"] == -1.875

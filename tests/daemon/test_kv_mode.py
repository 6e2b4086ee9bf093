"""kv_mode: what the words mean, and what is told of those that mean nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.daemon.errors import BadRequest
from tierd.daemon.kv_mode import BASE_TOKENS, MAX_TOKENS, Kind, KvMode, parse
from tierd.kernels import rows


@pytest.mark.parametrize("text", ["", "exact", "none"])
def test_the_whole_context(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("window=16", KvMode(16)),
        ("window=4096", KvMode(4096)),
        ("sinks=4,window=2048", KvMode(2048, 4)),
        ("window=2048, sinks=4", KvMode(2048, 4)),
        ("select=32", KvMode(read=512)),
        ("exact_last=128", KvMode(exact_last=128)),
        ("exact_first=4,exact_last=100", KvMode(exact_first=32, exact_last=128)),
        ("h2o=64", KvMode(kept=64, recent=32)),
        ("h2o=1024", KvMode(kept=1024, recent=512)),
    ],
)
def test_a_mode(text: str, mode: KvMode) -> None:
    assert parse(text) == mode == parse(str(mode))
    assert mode.kind in text and (mode.kind is not Kind.WINDOW or not mode.sinks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("windw=64", "knows no 'windw'"),
        ("h20=64", "knows no 'h20'"),
        ("h2o=63", "needs 64 .4 pages. to"),
        (f"h2o={MAX_TOKENS + 1}", f"to {MAX_TOKENS} tokens to keep"),
        ("h2o=-64", "needs a number of tokens after h2o=, not '-64'"),
        ("h2o=64,sinks=4", "takes h2o alone, without sinks"),
        ("select=8,h2o=64", "takes select alone, without h2o"),
        ("selec=64", "knows no 'selec'"),
        ("select=", "needs a number of pages after select=, not ''"),
        ("select=3", "needs 4 to 1048576 pages of 16 tokens, not 3"),
        ("select=1048577", "needs 4 to 1048576 pages"),
        ("select=8,window=64", "takes select alone, without window"),
        ("sinks=4,window=64,select=8", "takes select alone, without sinks and window"),
        ("select=8,select=8", "says select twice"),
        ("exact_first=4", "needs an exact_last of 1 to 65536 tokens"),
        ("exact_last=0", "needs an exact_last of 1 to 65536 tokens"),
        ("exact_last=65537", "needs an exact_last of 1 to 65536 tokens"),
        ("exact_last=64,window=512", "takes exact_first and exact_last alone, without window"),
        ("sliding", "knows no 'sliding'"),
        ("Exact", "knows no 'Exact'"),
        ("window", "needs a number of tokens after window=, not ''"),
        ("window=", "needs a number"),
        ("window=-5", "needs a number of tokens after window=, not '-5'"),
        ("window=1e3", "needs a number"),
        ("window=1.5", "needs a number"),
        ("window=\u0661\u0666", "needs a number"),
        ("window=12345678901", "needs a number"),
        ("window=0", "needs a window of 16"),
        ("window=15", "needs a window of 16"),
        (f"window={MAX_TOKENS + 1}", "needs a window of 16"),
        ("sinks=4", "needs a window beside the sinks"),
        ("sinks=0,window=64", "needs 1 to"),
        ("window=64,window=64", "says window twice"),
        ("window=64,", "knows no ''"),
        ("window=64" * 20, "has 180 characters"),
    ],
)
def test_what_means_nothing(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as refused:
        parse(text)
    assert refused.value.param == "kv_mode" and refused.value.hint


def test_a_slip_is_guessed() -> None:
    with pytest.raises(BadRequest) as refused:
        parse("windw=64")
    assert refused.value.hint == "did you mean 'window'?"


def test_the_kernels_begin_their_sums_where_the_mode_says() -> None:
    assert BASE_TOKENS == rows.BASE_TOKENS


@given(st.builds(KvMode, st.integers(16, 900), st.integers(0, 60)), st.integers(0, 5000))
def test_pages_given_hold_all_that_is_seen(mode: KvMode, start: int) -> None:
    window, sinks, lead, base = mode.bound(start, 16)
    assert (window, sinks) == (mode.window, mode.sinks)
    assert base <= mode.first_seen(start) <= start and lead * 16 >= sinks > lead * 16 - 16
    assert mode.first_seen(start) - base < BASE_TOKENS


@given(st.builds(KvMode, st.integers(16, 900), st.integers(0, 60)))
def test_the_exact_part_sees_everything(mode: KvMode) -> None:
    assert mode.first_seen(mode.exact_tokens - 1) == 0 < mode.first_seen(mode.exact_tokens)
    assert mode.first_seen(mode.exact_tokens) > mode.sinks


def test_kept_tokens_are_whole_pages() -> None:
    assert str(parse("h2o=100")) == "h2o=96"


def test_a_window_that_layers_were_trained_with_lies_within_the_newest_pages() -> None:
    mode = KvMode(kept=256, recent=128)
    assert mode.fitted(()) == mode.fitted((0, 0)) == mode.fitted((0, 113, 0)) == mode
    assert mode.fitted((0, 114)) == KvMode(kept=256, recent=144)
    assert KvMode(64).fitted((32, 32)) == KvMode(64)
    with pytest.raises(BadRequest, match="h2o=256 is too little for layers with windows of 256") as refused:
        mode.fitted((0, 256))
    assert refused.value.hint == "h2o=304 or more" and KvMode(kept=304, recent=144).fitted((0, 256)).recent == 272
    with pytest.raises(BadRequest, match="each layer of this model has a window"):
        mode.fitted((64, 64))

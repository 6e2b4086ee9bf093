from __future__ import annotations

from typing import Any

import pytest

from tests.daemon.engine.vocabularies import SPECIAL, byte_level
from tierd.daemon.engine.chat import ChatTemplate
from tierd.daemon.engine.intake import Facts, Intake
from tierd.daemon.engine.request import Finish
from tierd.daemon.errors import BadRequest, ContextLengthExceeded, Unsupported
from tierd.daemon.protocol import Message, Sampling, Submit

VOCAB = 270


def intake(*, template: bool = True, **facts: Any) -> Intake:
    defaults: dict[str, Any] = {
        "vocab": VOCAB, "context": 64, "capacity_tokens": 1000, "end_ids": frozenset({2}), "bos_id": 1,
        "add_bos": False, "sampling": {"temperature": 0.3},
    }  # fmt: skip
    source = "{% for m in messages %}" + SPECIAL[0] + "{{ m.content }}{% endfor %}"
    chat = ChatTemplate(source, byte_level(), {}) if template else None
    return Intake(Facts(**defaults | facts), byte_level(), chat)


def made(submit: dict[str, Any], **facts: Any) -> Any:
    return intake(**facts).request(7, Submit(model="m", **submit), 12.0)


def test_a_prompt() -> None:
    request = made({"prompt": "hi", "tenant": "user", "priority": 3})
    assert request.tokens == [ord("h"), ord("i")] and request.prompt_tokens == 2 and request.salt == b"user"
    assert request.max_total_tokens == 64 and request.end_ids == {2} and request.times.arrived_s == 12.0
    assert request.sampler.params.temperature == 0.3 and request.priority == 3


def test_bos_is_added_once() -> None:
    assert made({"prompt": "hi"}, add_bos=True).tokens[0] == 1
    assert made({"tokens": (1, 5)}, add_bos=True).tokens == [1, 5]


def test_messages() -> None:
    request = made({"messages": (Message("user", "hi"),)})
    assert request.tokens == [byte_level().special[SPECIAL[0]], ord("h"), ord("i")]
    with pytest.raises(Unsupported, match="no chat template") as caught:
        intake(template=False).tokens_of(messages=(Message("user", "hi"),))
    assert "instruct" in str(caught.value.hint)


def test_seeds_differ_unless_given() -> None:
    one, two = made({"prompt": "a"}), made({"prompt": "a"})
    assert one.sampler.params.seed != two.sampler.params.seed
    assert made({"prompt": "a", "sampling": Sampling(seed=5)}).sampler.params.seed == 5


def test_resumed() -> None:
    request = made({"prompt": "hi", "resume": (40, 41), "sampling": Sampling(max_tokens=5)})
    assert request.tokens == [ord("h"), ord("i"), 40, 41] and request.prompt_tokens == 2 and request.generated == 2
    assert request.max_total_tokens == 7 and request.over is None
    # An answer that filled the context is over, not too long.
    full = made({"prompt": "hi", "resume": (40,) * 62})
    assert full.over is Finish.LENGTH


@pytest.mark.parametrize(
    ("submit", "error", "words"),
    [
        ({}, BadRequest, "exactly one"),
        ({"prompt": "a", "tokens": (1,)}, BadRequest, "exactly one"),
        ({"prompt": ""}, BadRequest, "empty"),
        ({"tokens": ()}, BadRequest, "empty"),
        ({"messages": ()}, BadRequest, "empty"),
        ({"tokens": (VOCAB,)}, BadRequest, "no token 270"),
        ({"tokens": (-1,)}, BadRequest, "no token -1"),
        ({"prompt": "a", "resume": (999,)}, BadRequest, "resume"),
        ({"prompt": "a", "sampling": Sampling(logit_bias={999: 1.0})}, BadRequest, "logit_bias"),
        ({"prompt": "a" * 64}, ContextLengthExceeded, "64 tokens; the context holds 64"),
        ({"prompt": "a" * 20, "ctx": 10}, ContextLengthExceeded, "20 tokens; the context holds 10"),
        ({"prompt": "a", "ctx": 65}, ContextLengthExceeded, "65 tokens was asked for, this model's is 64"),
        ({"prompt": "a", "ctx": 1}, BadRequest, "ctx"),
    ],
    ids=str,
)
def test_refused(submit: dict[str, Any], error: type[BadRequest], words: str) -> None:
    with pytest.raises(error, match=words):
        made(submit)


def test_what_the_device_cannot_hold_is_refused_with_its_size() -> None:
    with pytest.raises(ContextLengthExceeded, match="33 tokens; the memory given to tierd holds 32") as caught:
        made({"prompt": "a" * 33}, capacity_tokens=32)
    assert "--device-mem" in str(caught.value.hint)
    assert made({"prompt": "a" * 20}, capacity_tokens=32).max_total_tokens == 32


def test_facts_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="positive"):
        intake(context=0)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.daemon.engine.vocabularies import SPECIAL, byte_level
from tierd.daemon.engine.chat import ChatTemplate
from tierd.daemon.engine.fill_in import FillIn
from tierd.daemon.engine.intake import Facts, Intake
from tierd.daemon.engine.request import Finish, Request
from tierd.daemon.errors import BadRequest, ContextLengthExceeded, Unsupported
from tierd.daemon.protocol import Format, Keep, Message, Sampling, Submit, Tool, ToolCall

VOCAB = 270
END = byte_level().special[SPECIAL[1]]


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


TOOLS = (
    "{% if tools %}" + SPECIAL[0] + "{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}" + SPECIAL[0] +
    "{{ m.role }} {{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}" +
    SPECIAL[1] + "{% endfor %}" + SPECIAL[0] + "assistant "
)  # fmt: skip
F = Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
ASKED = (Message("user", "the"),)


@pytest.fixture
def chat() -> Iterator[Intake]:
    defaults: dict[str, Any] = {
        "vocab": VOCAB, "context": 4000, "capacity_tokens": 4000, "end_ids": frozenset({END}), "bos_id": 1,
        "add_bos": False, "sampling": {},
    }  # fmt: skip
    one = Intake(Facts(**defaults), byte_level(), ChatTemplate(TOOLS, byte_level(), {}))
    yield one
    one.close()


def ask(chat: Intake, messages: tuple[Message, ...] = ASKED, **more: Any) -> Request:
    return chat.request(7, Submit(model="m", messages=messages, **more), 12.0)


def say(request: Request, text: str) -> None:
    """Let the answer be this text in tokens of single bytes, and end well."""
    for token in [*text.encode(), END]:
        request.append(token, 13.0)
    assert request.remember is not None
    request.remember(request)


def test_calls_are_told_and_end_the_answer(chat: Intake) -> None:
    request = ask(chat, tools=(F,))
    for token in b'So.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>':
        said, over = request.append(token, 13.0)
        request.said.add(said)
        assert over is None
    said, over = request.append(END, 13.0)
    assert over is Finish.TOOL_CALLS and request.said.text == "So."
    assert [(call["name"], call["arguments"]) for call in request.said.calls] == [("f", '{"a": 1}')]


def test_calls_of_a_raw_prompt_are_text(chat: Intake) -> None:
    request = chat.request(7, Submit("m", prompt="x"), 12.0)
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert "".join(request.append(token, 13.0)[0].text for token in text.encode()) == text


def test_a_turn_is_found_again_by_what_was_told(chat: Intake) -> None:
    request = ask(chat, tools=(F,))
    sampled = list(b'the\n<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>')
    say(request, bytes(sampled).decode())
    call = ToolCall("other", "f", '{"a":  1}')
    again = ask(chat, (*ASKED, Message("assistant", "the", tool_calls=(call,)), Message("tool", "2")), tools=(F,))
    assert again.tokens[: request.prompt_tokens + len(sampled)] == request.tokens[:-1]
    assert again.tokens[request.prompt_tokens + len(sampled)] == byte_level().special[SPECIAL[1]]


def test_tokens_may_come_before_messages(chat: Intake) -> None:
    alone, before = ask(chat, tools=(F,)), (5, 6, 7)
    request = ask(chat, tools=(F,), before=before, tell_prompt=True)
    assert request.tokens == [*before, *alone.tokens] and request.prompt_tokens == 3 + alone.prompt_tokens
    assert request.tell_prompt and not alone.tell_prompt
    said = [request.append(token, 13.0)[0] for token in b'<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>']
    assert [call["name"] for one in said for call in one.calls] == ["f"]  # they are read as in any chat
    assert request.remember is None  # a turn is found by its conversation, which is not known here
    with pytest.raises(BadRequest, match="before: no token"):
        ask(chat, before=(VOCAB,))


@pytest.mark.parametrize("other", [{"salt": "x"}, {"tenant": "x"}, {"tools": ()}], ids=str)
def test_turns_are_not_shared(chat: Intake, other: dict[str, Any]) -> None:
    say(ask(chat, tools=(F,)), "the")
    history = (*ASKED, Message("assistant", "the"))
    known = ask(chat, history, tools=(F,)).tokens
    assert ask(chat, history, **{"tools": (F,)} | other).tokens != known


def test_a_turn_that_a_stop_string_ended_is_not_kept(chat: Intake) -> None:
    say(ask(chat, sampling=Sampling(stop=("x",))), "the x")
    assert len(chat.turns) == 0


def test_an_answer_is_held_to_its_format(chat: Intake) -> None:
    form = Format("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
    request = ask(chat, format=form, resume=tuple(b'{"a": '))
    logits = np.zeros(VOCAB, np.float32)
    logits[ord("x")] = 9.0
    assert chr(request.sampler.sample(logits, len(request.tokens))) in "-0123456789"


def test_a_tool_may_have_to_be_called(chat: Intake) -> None:
    request = ask(chat, tools=(F,), tool_choice="required")
    assert request.sampler.sample(np.zeros(VOCAB, np.float32), len(request.tokens)) == ord("<")


def test_tools_that_may_not_be_called_stay_in_the_prompt(chat: Intake) -> None:
    assert ask(chat, tools=(F,), tool_choice="none").tokens == ask(chat, tools=(F,)).tokens
    assert intake().request(7, Submit("m", messages=ASKED, tools=(F,), tool_choice="none"), 1.0).tokens


def test_the_token_of_a_call_is_ruled_out_where_none_may_be(chat: Intake) -> None:
    opening = byte_level().special[SPECIAL[0]]
    chat._dialect = replace(chat._dialect, opening_id=opening)
    logits = np.zeros(VOCAB, np.float32)
    logits[opening] = 99.0
    greedy = Sampling(temperature=0.0)
    assert ask(chat, tools=(F,), sampling=greedy).sampler.sample(logits, 9) == opening
    assert ask(chat, tools=(F,), tool_choice="none", sampling=greedy).sampler.sample(logits, 9) != opening


def test_wishes_to_keep_the_beginning_are_told_in_tokens(chat: Intake) -> None:
    messages = (Message("system", "be"), Message("user", "the"), Message("user", "x"))
    request = ask(chat, messages, tools=(F,), keep=(Keep(0, 60.0), Keep(2, 300.0)))
    texts = [byte_level().text(request.tokens[:end]) for end, _ in request.keep]
    assert texts[0].endswith("<tool_call>") and texts[1].endswith("user the") and request.keep[1][1] == 300.0


def test_an_answer_with_one_call_at_most(chat: Intake) -> None:
    request = ask(chat, tools=(F,), parallel_tool_calls=False)
    overs = [request.append(token, 13.0)[1] for token in b'<tool_call>{"name": "f"}</tool_call>']
    assert overs[-1] is Finish.TOOL_CALLS and not any(overs[:-1])


def test_what_has_to_be_compiled_is_known_before(chat: Intake) -> None:
    asked = Submit("m", messages=ASKED, tools=(F,), tool_choice="required")
    assert chat.needs_compiling(asked) and not chat.needs_compiling(Submit("m", messages=ASKED))
    chat.compile(asked)
    chat.compile(Submit("m", messages=ASKED, tools=(F,)))  # nothing to do
    assert len(chat.guides._compiled) == 1


def test_a_suffix_is_for_models_that_learned_it() -> None:
    with pytest.raises(Unsupported, match="fill in") as caught:
        made({"prompt": "a", "suffix": "b"})
    assert caught.value.param == "suffix"
    with pytest.raises(BadRequest, match="goes with prompt"):
        made({"messages": ASKED, "suffix": "b"})
    one = intake()
    one._fim = FillIn(200, 201, 202, frozenset({203}))
    request = one.request(7, Submit("m", prompt="a" + SPECIAL[1], suffix="b"), 1.0)
    assert request.tokens == [200, ord("a"), *SPECIAL[1].encode(), 201, ord("b"), 202] and 203 in request.end_ids


def test_refused_with_tools(chat: Intake) -> None:
    for more, words in (
        ({"beam_width": 2, "format": Format("json_object")}, "beam search"),
        ({"format": Format("json_schema", '{"uniqueItems": true}')}, "uniqueItems"),
    ):
        with pytest.raises(BadRequest, match=words):
            ask(chat, **more)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="go with messages"):
        chat.request(7, Submit("m", prompt="x", tools=(F,)), 1.0)
    with pytest.raises(Unsupported, match="call tools"):
        made({"messages": ASKED, "tools": (F,)})

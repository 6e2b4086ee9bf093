from __future__ import annotations

import pytest
from llguidance import LLMatcher

from tierd.daemon.engine import guide_check
from tierd.daemon.engine.guide_check import check
from tierd.daemon.errors import BadRequest


def test_a_sound_grammar_passes() -> None:
    check(LLMatcher.grammar_from_json_schema('{"type": "object"}'), "format")


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(BadRequest, match="uniqueItems") as caught:
        check(LLMatcher.grammar_from_json_schema('{"type": "array", "uniqueItems": true}'), "format")
    assert caught.value.param == "format" and len(str(caught.value)) < 300


def test_one_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_check, "COMMAND", [*guide_check.COMMAND[:1], "-c", "import time; time.sleep(60)"])
    with pytest.raises(BadRequest, match=r"more than 0\.2 s") as caught:
        check("{}", "tools", timeout_s=0.2)
    assert caught.value.param == "tools" and "simpler" in str(caught.value.hint)


def test_one_that_takes_too_much_memory_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide_check, "COMMAND", [*guide_check.COMMAND[:1], "-c", _GREEDY])
    with pytest.raises(BadRequest, match="too large"):
        check("{}", "format")


def test_large_ones_are_refused_by_the_compilers_limits() -> None:
    many = ", ".join(f'"p{number}": {{"type": "string"}}' for number in range(40_000))
    with pytest.raises(BadRequest, match="large|compile"):
        check(LLMatcher.grammar_from_json_schema(f'{{"type": "object", "properties": {{{many}}}}}'), "tools")


_GREEDY = """
from tierd.daemon.engine import guide_check
guide_check.LLMatcher = type("M", (), {"validate_grammar": lambda *_, **__: str(len(bytearray(2 << 30)))})
raise SystemExit(guide_check.main())
"""

"""Built-in shapes against the parameter counts that their publishers state."""

from __future__ import annotations

import re

import pytest

from tierd.daemon.plan.known import KNOWN, known_name, known_shape

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-2-70b": 68_976_648_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "deepseek-v2-lite": 15_706_484_224,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    assert known_shape(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", KNOWN)
def test_every_shape_has_a_source_and_sizes_near_its_name(name: str) -> None:
    assert KNOWN[name].source.count("/") == 1
    shape = known_shape(name)
    if found := re.fullmatch(r"[a-z0-9.-]*-(\d+(?:\.\d+)?)b", name):
        assert 0.8 * float(found[1]) < shape.parameters / 1e9 < 1.25 * float(found[1])


@pytest.mark.parametrize("text", ["llama-3-70b", "Llama-3-70B", "llama-3-70b-shape"])
def test_names(text: str) -> None:
    assert known_name(text) == "llama-3-70b"


def test_a_name_with_a_colon_is_that_of_a_pulled_model() -> None:
    assert known_name("smollm2:135m") == "smollm2-135m"
    assert known_name("llama-4") is None


def test_experts_count_as_those_that_a_token_goes_through() -> None:
    shape = known_shape("mixtral-8x7b")
    used = shape.layer_elements + 2 * shape.vocab * shape.hidden
    assert used / 1e9 == pytest.approx(12.9, rel=0.01)  # "13B active"

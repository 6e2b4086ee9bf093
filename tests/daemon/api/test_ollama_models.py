"""Ollama's views of models."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tierd.daemon.api import ollama_models

NOW = datetime(2026, 11, 30, tzinfo=UTC)
ITEM = {
    "name": "alpha", "problem": None, "loaded": False, "source": "hf:o/alpha", "family": "llama", "format": "int4-g32",
    "parameters": 134_479_872, "context": 8192, "bytes": 1000, "digest": "ab" * 16, "created_s": 0.0,
}  # fmt: skip
SPEC = {"hidden": 576, "intermediate": 1536, "num_layers": 30, "heads": 9, "kv_heads": 3, "vocab": 49152}
ENGINE = {"model": "alpha", "rss_bytes": 5000, "expires_in_s": 60.0}


def test_tags_leave_broken_models_out():
    (found,) = ollama_models.tags([ITEM, ITEM | {"name": "broken", "problem": "no weights"}])["models"]
    assert found["name"] == found["model"] == "alpha:latest" and found["size"] == 1000
    assert found["modified_at"] == "1970-01-01T00:00:00Z" and found["digest"] == "ab" * 16
    assert found["details"]["parameter_size"] == "134.5M" and found["details"]["quantization_level"] == "int4-g32"


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (1_500, "1.5K"), (7_240_000_000, "7.2B")])
def test_sizes_are_short(count, text):
    assert ollama_models.details(ITEM | {"parameters": count})["parameter_size"] == text


def test_one_model():
    shown = ITEM | {"spec": SPEC, "sampling": {"temperature": 0.2, "top_k": None, "repetition_penalty": 1.1}}
    found = ollama_models.show(shown, "{{ tools }}", ["completion"])
    assert [line.split() for line in found["parameters"].splitlines()] == [
        ["num_ctx", "8192"], ["temperature", "0.2"], ["repeat_penalty", "1.1"],
    ]  # fmt: skip
    assert found["model_info"]["llama.context_length"] == 8192 and found["model_info"]["llama.block_count"] == 30
    shown["source"] = "/home/someone/models/m.gguf"
    assert ollama_models.show(shown, "", [])["modelfile"].endswith("FROM m.gguf\n")
    assert found["template"] == "{{ tools }}" and found["capabilities"] == ["completion"]


def test_capabilities_are_read_off_the_template():
    assert ollama_models.capabilities("") == ["completion"]
    assert ollama_models.capabilities("{% if tools %}<think>") == ["completion", "tools", "thinking"]


def test_what_is_loaded_and_until_when():
    (found,) = ollama_models.ps([ENGINE], [ITEM], 0, NOW)["models"]
    assert found["expires_at"] == "2026-11-30T00:01:00Z" and found["context_length"] == 8192
    assert found["size"] == 5000 and found["size_vram"] == 0 and found["name"] == "alpha:latest"
    (found,) = ollama_models.ps([ENGINE | {"expires_in_s": None}], [ITEM], 2048, NOW)["models"]
    assert datetime.fromisoformat(found["expires_at"]) > NOW + timedelta(days=30_000)
    assert found["context_length"] == 2048


def test_an_engine_whose_model_is_gone_is_not_listed():
    assert ollama_models.ps([ENGINE], [], 0, NOW) == {"models": []}


def test_lines_of_a_pull():
    step = {"stage": "download", "done": 5, "total": 10}
    line = ollama_models.pulling(step, "smollm2:135m")
    assert line == {"status": "pulling smollm2:135m", "digest": "smollm2:135m", "total": 10, "completed": 5}
    assert ollama_models.pulling({"stage": "import", "done": 1, "total": 2}, "x")["status"] == "preparing"
    told = {"stage": "format", "done": 1, "total": 1, "text": "they become int8-g32"}
    assert ollama_models.pulling(told, "x")["status"] == "they become int8-g32"
    assert ollama_models.pulling({"name": "x"}, "x") == {"status": "success"}

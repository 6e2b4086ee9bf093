"""Reading any config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierd.daemon.errors import BadRequest
from tierd.daemon.plan.from_config import read_config, shape_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip


def test_what_tierd_runs_has_a_spec() -> None:
    shape = shape_from_config(LLAMA, "tiny")
    assert shape.spec is not None and shape.spec.kv_heads == 2 and shape.context == 512


def test_what_tierd_does_not_run_has_figures_all_the_same() -> None:
    shape = shape_from_config(LLAMA | {"model_type": "falcon_h9"}, "tiny")
    assert shape.spec is None
    assert shape.layers == shape_from_config(LLAMA, "tiny").layers


def test_the_language_half_of_a_model_that_sees() -> None:
    outer = {"model_type": "llava", "vision_config": {}, "text_config": LLAMA}
    assert shape_from_config(outer, "seeing").layers == shape_from_config(LLAMA, "tiny").layers


def test_mamba_layers_of_jamba() -> None:
    config = LLAMA | {
        "model_type": "jamba", "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 16, "num_experts_per_tok": 2,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4,
    }  # fmt: skip
    layers = shape_from_config(config, "jamba").layers
    assert [bool(layer.cache.key_elements) for layer in layers] == [False] * 4 + [True] + [False] * 3
    assert layers[0].cache.state_elements == 128 * 16 + 128 * 3
    assert [any(matrix.copies == 16 for matrix in layer.matrices) for layer in layers] == [False, True] * 4


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": None}, {"num_hidden_layers": "two"}, {"vocab_size": -1}, {"hidden_size": 1 << 40},
     {"sliding_window": None, "layer_types": ["sliding_attention"] * 2, "model_type": "x"},
     {"layer_types": ["full_attention"], "model_type": "x"}, {"num_experts": 4, "model_type": "x"}],
)  # fmt: skip
def test_what_the_figures_need_and_is_not_there_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        shape_from_config(LLAMA | change, "tiny")
    assert caught.value.hint


def test_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == LLAMA
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "large.json").write_bytes(b" " * (5 << 20))
    for name in ("list.json", "large.json", "absent.json"):
        with pytest.raises(BadRequest):
            read_config(tmp_path / name)

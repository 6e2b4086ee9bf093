"""Bytes of weights are those that an import writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.config_json import spec_from_config
from tierd.daemon.models.ggml_types import GgmlType
from tierd.daemon.models.records import PlannedTensor, expert_names, plan_records
from tierd.daemon.models.weights import place
from tierd.daemon.plan.known import KNOWN, known_shape
from tierd.daemon.plan.shape import shape_from_spec
from tierd.daemon.plan.weights import prepared_bytes, weight_bytes
from tierd.kernels.packing import WeightFormat

ODD: dict[str, Any] = {  # columns that groups of 32 don't fill, rows that panels of 16 don't, biases everywhere
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 72, "intermediate_size": 104,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "attention_bias": True,
    "mlp_bias": True, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int8-g32", "int4-g32"])
@pytest.mark.parametrize("name", ["odd", "smollm2-135m", "qwen2.5-0.5b", "qwen3-8b", "mixtral-8x7b", "gpt-oss-20b"])
def test_records_are_as_large_as_an_import_makes_them(name: str, format: str) -> None:
    spec = spec_from_config(ODD if name == "odd" else KNOWN[name].config)

    def source(planned: PlannedTensor) -> tuple[Any, ...]:
        return (SimpleNamespace(kind=GgmlType.F32),)

    placed = {record.name: record.bytes for record in place(plan_records(spec), source, WeightFormat(format))}
    found = weight_bytes(shape_from_spec(spec), format)
    names = expert_names(spec)
    assert found.layers == tuple(
        placed[f"layer.{index}"] + sum(placed[name] for name in names.get(index, ()))
        for index in range(spec.num_layers)
    )
    assert (found.embed, found.final, found.head) == (placed["embed"], placed["final"], placed.get("head", 0))
    assert found.total == sum(placed.values())


def test_a_prepared_model(model_dir: Path) -> None:
    manifest = load_manifest(model_dir)
    assert prepared_bytes(manifest).total == manifest.bytes


def test_experts_all_count() -> None:
    shape = known_shape("mixtral-8x7b")
    assert weight_bytes(shape, "bf16").total == pytest.approx(2 * shape.parameters, rel=0.001)


def test_parameters_are_those_of_the_names() -> None:
    for name, total, active in (("qwen3-30b-a3b", 30.5e9, 3.3e9), ("mixtral-8x7b", 46.7e9, 12.9e9)):
        shape = known_shape(name)
        assert shape.spec is not None and shape.spec.experts is not None
        assert shape.parameters == pytest.approx(total, rel=0.01)
        assert shape.spec.active_parameters == pytest.approx(active, rel=0.03)
    assert shape.spec.experts.total == 32 * 8

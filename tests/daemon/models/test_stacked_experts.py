"""gpt-oss as transformers saves it, as it is published, and as GGUF: the same numbers in the records, unrounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tierd.daemon.models import catalog
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.importer import import_model
from tierd.kernels.packing import WeightFormat, unpack

from . import gpt_oss_files
from .gpt_oss_files import EXPERTS, HEADS, HIDDEN, LAYERS, WIDTH


@pytest.fixture(scope="module")
def model() -> Any:
    return gpt_oss_files.random_model()


def imported(source: Path, work: Path, name: str, weights: str | None = None) -> Manifest:
    return import_model(source, work / "models", name, weights, lambda _stage, _done, _total: None)


def values(manifest: Manifest, work: Path) -> dict[str, np.ndarray]:
    data = np.fromfile(work / "models" / manifest.name / catalog.WEIGHTS, np.uint8)
    found = {}
    for record in manifest.records:
        for t in record.tensors:
            raw = data[t.offset : t.offset + t.bytes]
            vector = t.rows == 1 and t.bytes == 4 * t.cols
            found[f"{record.name}/{t.name}"] = (
                raw.view(np.float32)[None] if vector else unpack(WeightFormat(t.format), raw, t.rows, t.cols)
            )
    return found


def test_all_three_forms_give_the_same_numbers(model: Any, tmp_path: Path) -> None:
    plain = imported(gpt_oss_files.save(model, tmp_path / "plain"), tmp_path, "plain")
    hub = imported(gpt_oss_files.publish(model, tmp_path / "hub"), tmp_path, "hub")
    file = imported(gpt_oss_files.write(model, tmp_path / "m.gguf"), tmp_path, "gguf")
    wanted = values(plain, tmp_path)
    for other in (hub, file):
        assert msgspec.structs.replace(other.spec, dtype=plain.spec.dtype) == plain.spec
        formats = {t.format for r in other.records if r.name.startswith("expert.") for t in r.tensors}
        assert formats == {"int8-g32", "fp32"}  # matrices, biases
        found = values(other, tmp_path)
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=name)
    state = model.state_dict()
    for layer in range(LAYERS):
        stacked = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"].numpy()
        biases = state[f"model.layers.{layer}.mlp.experts.gate_up_proj_bias"].numpy()
        for expert in range(EXPERTS):
            rows = stacked[expert].T
            gate_up = wanted[f"expert.{layer}.{expert}/gate_up"]
            np.testing.assert_array_equal(gate_up, np.concatenate([rows[::2], rows[1::2]]))
            bias = wanted[f"expert.{layer}.{expert}/gate_up_bias"][0]
            np.testing.assert_array_equal(bias, np.concatenate([biases[expert, ::2], biases[expert, 1::2]]))
        assert wanted[f"layer.{layer}/sink_logits"].shape == (1, HEADS)
        assert wanted[f"layer.{layer}/router_bias"].shape == (1, EXPERTS)


def test_bf16_holds_every_number_and_half_a_file_of_bf16_is_read_too(model: Any, tmp_path: Path) -> None:
    import torch

    source = gpt_oss_files.publish(model, tmp_path / "hub")
    exact = values(imported(source, tmp_path, "exact"), tmp_path)
    wide = imported(source, tmp_path, "wide", "bf16")
    found = values(wide, tmp_path)
    for name, value in exact.items():
        if name.startswith("expert."):
            np.testing.assert_array_equal(found[name], value)
    half = imported(gpt_oss_files.save(model.to(torch.bfloat16), tmp_path / "half"), tmp_path, "half")
    model.float()
    assert {t.format for r in half.records if r.name == "expert.0.1" for t in r.tensors} == {"bf16", "fp32"}
    np.testing.assert_array_equal(values(half, tmp_path)["expert.0.1/down"], exact["expert.0.1/down"])


@pytest.mark.parametrize(
    ("tensor", "change", "match"),
    [
        ("gate_up_proj_scales", lambda t: t[:, :-2], "gate_up_proj_scales has 760 x 2 elements of U8"),
        ("down_proj_blocks", lambda t: t.astype(np.int8), "down_proj_blocks .* of I8"),
        ("down_proj_bias", lambda t: t[:, :8], "down_proj_bias has 4 x 8 elements"),
        ("down_proj_scales", None, "down_proj_scales is missing"),
        ("down_proj_scales", lambda t: t - np.uint8(60), "MXFP4 with a scale that int8-g32 can't hold; .* bf16"),
        ("more", None, "has no place in a model of family gpt_oss"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, tmp_path: Path, tensor: str, change: Any, match: str) -> None:
    source = gpt_oss_files.publish(model, tmp_path / "hub")
    state = load_file(source / "model.safetensors")
    name = f"model.layers.1.mlp.experts.{tensor}"
    if change is not None:
        state[name] = np.ascontiguousarray(change(state[name]))
    elif name in state:
        del state[name]
    else:
        state[name] = np.zeros(1, np.float32)
    save_file(state, source / "model.safetensors")
    with pytest.raises(ModelFileError, match=match):
        imported(source, tmp_path, "m")


def test_other_quantized_files_are_refused(model: Any, tmp_path: Path) -> None:
    source = gpt_oss_files.publish(model, tmp_path / "hub")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="quantized safetensors"):
        imported(source, tmp_path, "m")
    assert HIDDEN % 32 == WIDTH % 32 == 0

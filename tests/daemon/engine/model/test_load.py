from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.daemon.engine.families import prepare, reference
from tierd.daemon.engine.model.load import load_weights, shape_of
from tierd.daemon.errors import ModelInvalid
from tierd.daemon.models.catalog import Manifest, load_manifest
from tierd.kernels.packing import unpack


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(reference("llama, dynamic rope, biases"), tmp_path_factory.mktemp("load"))


@pytest.fixture
def manifest(prepared: Path) -> Manifest:
    return load_manifest(prepared)


def changed(manifest: Manifest, record: str, name: str, **change: object) -> Manifest:
    """The manifest with one tensor described otherwise; `drop` leaves it out."""

    def tensors(entry: object) -> tuple:
        kept = [t for t in entry.tensors if not (change.get("drop") and t.name == name)]  # type: ignore[attr-defined]
        rest = {key: value for key, value in change.items() if key != "drop"}
        return tuple(msgspec.structs.replace(t, **rest) if t.name == name else t for t in kept)

    records = tuple(
        msgspec.structs.replace(entry, tensors=tensors(entry)) if entry.name == record else entry
        for entry in manifest.records
    )
    return msgspec.structs.replace(manifest, records=records)


def test_tensors_are_those_of_the_source(prepared: Path, manifest: Manifest) -> None:
    model = reference("llama, dynamic rope, biases")
    steps: list[tuple[int, int]] = []
    weights = load_weights(prepared, manifest, lambda done, total: steps.append((done, total)))
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}

    def values(matrix: object) -> np.ndarray:
        return unpack(matrix.format, matrix.data, matrix.rows, matrix.cols)  # type: ignore[attr-defined]

    np.testing.assert_array_equal(values(weights.embed), state["model.embed_tokens.weight"])
    np.testing.assert_array_equal(values(weights.head), state["lm_head.weight"])
    base = "model.layers.1."
    qkv = np.concatenate([state[f"{base}self_attn.{part}_proj.weight"] for part in "qkv"])
    np.testing.assert_array_equal(values(weights.layers[1].qkv), qkv)
    gate_up = np.concatenate([state[f"{base}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    np.testing.assert_array_equal(values(weights.layers[1].gate_up), gate_up)
    np.testing.assert_array_equal(weights.layers[1].down_bias, state[f"{base}mlp.down_proj.bias"])
    np.testing.assert_array_equal(weights.final_norm, state["model.norm.weight"])
    assert weights.layers[0].q_norm is None
    assert steps[-1] == (4, 4) and [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_writing_to_a_weight_does_not_reach_the_file(prepared: Path, manifest: Manifest) -> None:
    before = (prepared / "weights.bin").read_bytes()
    weights = load_weights(prepared, manifest, lambda _done, _total: None)
    weights.embed.data[:] = 0
    assert (prepared / "weights.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("record", "name", "change", "words"),
    [
        ("layer.1", "qkv", {"drop": True}, "no layer.1/qkv"),
        ("layer.0", "o", {"rows": 63}, "63 x 64"),
        ("layer.0", "o", {"format": "int9"}, "int9"),
        ("layer.0", "o", {"format": "bf16"}, "bytes"),
        ("layer.0", "attn_norm", {"format": "bf16"}, "no plain vector"),
        ("layer.0", "qkv_bias", {"cols": 64}, "1 x 64"),
        ("final", "final_norm", {"bytes": 8}, "no plain vector"),
    ],
)
def test_what_does_not_fit_is_refused(
    prepared: Path, manifest: Manifest, record: str, name: str, change: dict, words: str
) -> None:
    with pytest.raises(ModelInvalid, match=words) as caught:
        load_weights(prepared, changed(manifest, record, name, **change), lambda _done, _total: None)
    assert caught.value.hint


def test_a_file_of_another_size_is_refused(prepared: Path, manifest: Manifest, tmp_path: Path) -> None:
    data = (prepared / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(data[:-4096])
    with pytest.raises(ModelInvalid, match="bytes, the manifest says"):
        load_weights(tmp_path, manifest, lambda _done, _total: None)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelInvalid, match="mapped"):
        load_weights(tmp_path, manifest, lambda _done, _total: None)


def test_a_spec_without_windows_is_full_everywhere(manifest: Manifest) -> None:
    assert shape_of(manifest.spec).windows == (0, 0)

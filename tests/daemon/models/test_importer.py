"""Every family and format through a whole import, and what a failing one leaves behind: nothing."""

import errno
import fcntl
import json
import os
import shutil

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from tierd.daemon.errors import BadRequest, Conflict, OutOfSpace
from tierd.daemon.models import catalog, digests, importer
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.importer import import_model, open_source
from tierd.daemon.models.spec import ExpertsSpec
from tierd.kernels import packing
from tierd.kernels.packing import WeightFormat

from .conftest import EXPERTS, USED, with_experts

HF_PARTS = {
    "embed": ["model.embed_tokens.weight"],
    "final_norm": ["model.norm.weight"],
    "head": ["lm_head.weight"],
    "attn_norm": ["input_layernorm.weight"],
    "qkv": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "qkv_bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "q_norm": ["self_attn.q_norm.weight"],
    "k_norm": ["self_attn.k_norm.weight"],
    "o": ["self_attn.o_proj.weight"],
    "o_bias": ["self_attn.o_proj.bias"],
    "mlp_norm": ["post_attention_layernorm.weight"],
    "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "gate_up_bias": ["mlp.gate_proj.bias", "mlp.up_proj.bias"],
    "down": ["mlp.down_proj.weight"],
    "down_bias": ["mlp.down_proj.bias"],
}


def tensors(directory, manifest):
    """(record, tensor entry, its values as the engine will compute with them) of a prepared model."""
    data = np.fromfile(directory / catalog.WEIGHTS, np.uint8)
    for record in manifest.records:
        for t in record.tensors:
            block = data[t.offset : t.offset + t.bytes]
            if t.rows == 1:
                yield record, t, block.view("<f4").reshape(1, -1)
            else:
                yield record, t, packing.unpack(WeightFormat(t.format), block, t.rows, t.cols)


@pytest.mark.parametrize("family", ["llama", "llama-bias", "mistral", "qwen2", "qwen3", "qwen3-bias"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_safetensors_equal_the_state_dict(tmp_path, hf_model, quiet, family, dtype):
    source, state = hf_model(family, dtype)
    manifest = import_model(source, tmp_path / "models", "m", None, quiet)
    assert manifest.format == ("fp32" if dtype == "float32" else "bf16")
    assert manifest.spec.family == family.removesuffix("-bias")
    seen = set()
    for record, t, values in tensors(tmp_path / "models/m", manifest):
        prefix = f"model.layers.{record.name[6:]}." if record.name.startswith("layer.") else ""
        names = [prefix + n for n in HF_PARTS[t.name]]
        expected = np.concatenate([np.atleast_1d(state[n].float().numpy()) for n in names])
        np.testing.assert_array_equal(values, np.atleast_2d(expected))
        seen |= set(names)
    assert seen == set(state) - ({"lm_head.weight"} if manifest.spec.tied else set())
    assert digests.verify(tmp_path / "models/m", manifest) == []


MOE_PARTS = {
    "mixtral": {
        "router": ["block_sparse_moe.gate.weight"],
        "gate_up": ["block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"],
        "down": ["block_sparse_moe.experts.{}.w2.weight"],
    },
    "qwen3_moe": {
        "router": ["mlp.gate.weight"],
        "gate_up": ["mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"],
        "down": ["mlp.experts.{}.down_proj.weight"],
    },
}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("weights", [None, "int4-g32"])
def test_safetensors_of_mixtures(tmp_path, hf_model, quiet, family, weights):
    source, state = hf_model(family, "bfloat16")
    manifest = import_model(source, tmp_path / "models", "m", weights, quiet)
    assert manifest.spec.family == family and manifest.format == (weights or "bf16")
    assert sum(r.name.startswith("expert.") for r in manifest.records) == manifest.spec.experts.total
    seen = set()
    for record, t, values in tensors(tmp_path / "models/m", manifest):
        kind, *numbers = record.name.split(".")
        prefix = f"model.layers.{numbers[0]}." if numbers else ""
        parts = MOE_PARTS[family] if kind == "expert" or t.name == "router" else HF_PARTS
        names = [prefix + n.format(numbers[-1] if numbers else "") for n in parts[t.name]]
        expected = np.concatenate([np.atleast_1d(state[n].float().numpy()) for n in names])
        exact = weights is None or t.rows == 1 or t.name == "router"
        np.testing.assert_allclose(values, np.atleast_2d(expected), atol=0 if exact else 0.02)
        assert t.format == "fp32" or t.name != "router"
        seen |= set(names)
    assert seen == set(state)
    assert digests.verify(tmp_path / "models/m", manifest) == []


@pytest.mark.parametrize(("arch", "merged"), [("llama", True), ("llama", False), ("qwen3moe", True)])
def test_gguf_of_mixtures_is_lossless(tmp_path, make_gguf, tiny, quiet, arch, merged):
    import gguf

    width, layers = (96, range(2)) if arch == "llama" else (32, range(1, 2))
    originals = with_experts(tiny(arch), width, layers, merged=merged)

    def edit(writer):
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(USED)
        if arch == "qwen3moe":
            writer.add_expert_feed_forward_length(width)

    make_gguf(tmp_path / "m.gguf", arch, "Q8_0", weights=originals, edit=edit)
    manifest = import_model(tmp_path / "m.gguf", tmp_path / "models", "m", None, quiet)
    assert manifest.spec.family == ("mixtral" if arch == "llama" else "qwen3_moe")
    assert manifest.spec.experts == ExpertsSpec(EXPERTS, USED, width, True, tuple(layers))
    number = gguf.GGMLQuantizationType.Q8_0
    for record, t, values in tensors(tmp_path / "models/m", manifest):
        kind, *numbers = record.name.split(".")
        if t.name == "router":
            np.testing.assert_array_equal(values, originals[f"blk.{numbers[0]}.ffn_gate_inp.weight"])
        if kind == "expert":
            expected = []
            for part in ("gate", "up") if t.name == "gate_up" else ("down",):
                name = f"blk.{numbers[0]}.ffn_{part}"
                one = originals.get(f"{name}.{numbers[1]}.weight")
                one = originals[f"{name}_exps.weight"][int(numbers[1])] if one is None else one
                expected.append(gguf.quants.dequantize(gguf.quants.quantize(one, number), number))
            np.testing.assert_array_equal(values, np.concatenate(expected))
            assert t.format == "int8-g32"


def test_a_dense_model_has_the_digest_that_it_had_before_there_were_experts(tmp_path, make_gguf, quiet):
    make_gguf(tmp_path / "m.gguf")
    manifest = import_model(tmp_path / "m.gguf", tmp_path / "models", "m", None, quiet)
    fields = msgspec.to_builtins(manifest.spec)
    assert fields.pop("experts") is None and fields.pop("sink_logits") is False
    assert fields["rope"].pop("truncate") is True
    digest = digests.new_digest()
    whole = digests.file_digest(tmp_path / "models/m" / catalog.WEIGHTS)
    for part in (msgspec.json.encode(fields), msgspec.json.encode(manifest.records), whole,
                 manifest.tokenizer_digest.encode()):  # fmt: skip
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(manifest.template_digest.encode())
    assert manifest.digest == digest.hexdigest()


def test_shards_equal_the_single_file(tmp_path, hf_model, quiet):
    source, _ = hf_model("qwen3")
    whole = import_model(source, tmp_path / "models", "whole", None, quiet)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="60KB")
    assert len(list(source.glob("model-*.safetensors"))) > 1
    sharded = import_model(source, tmp_path / "models", "sharded", None, quiet)
    assert sharded.digest == whole.digest and sharded.source_digest != whole.source_digest


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("kind", "format"), [("Q4_1", "int4-g32"), ("Q8_0", "int8-g32"), ("BF16", "bf16")])
def test_gguf_is_lossless(tmp_path, make_gguf, tiny, quiet, arch, kind, format):
    make_gguf(tmp_path / "m.gguf", arch, kind)
    manifest = import_model(tmp_path / "m.gguf", tmp_path / "models", "m", None, quiet)
    assert manifest.format == format
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    names = {"qkv": ["attn_q", "attn_k", "attn_v"], "gate_up": ["ffn_gate", "ffn_up"], "down": ["ffn_down"]}
    for record, t, values in tensors(tmp_path / "models/m", manifest):
        if t.name in names:
            parts = [tiny(arch)[f"blk.{record.name[6:]}.{n}.weight"] for n in names[t.name]]
            expected = [gguf.quants.dequantize(gguf.quants.quantize(p, number), number) for p in parts]
            np.testing.assert_array_equal(values, np.concatenate(expected))
        if t.name == "qkv_bias":
            parts = [tiny(arch)[f"blk.{record.name[6:]}.{n}.bias"] for n in names["qkv"]]
            np.testing.assert_array_equal(values[0], np.concatenate(parts))


@pytest.mark.parametrize("format", packing.ROUNDED_FORMATS)
def test_a_format_that_is_asked_for(tmp_path, make_gguf, tiny, quiet, format):
    make_gguf(tmp_path / "m.gguf")
    manifest = import_model(tmp_path / "m.gguf", tmp_path / "models", "m", format.value, quiet)
    assert manifest.weights == manifest.format == format.value
    tolerance = {"fp32": 0, "bf16": 1e-3, "int8": 2e-3, "int8-g32": 2e-3, "int4-g32": 0.02, "int5-g32": 0.01}[format]
    for record, t, values in tensors(tmp_path / "models/m", manifest):
        assert t.format == ("fp32" if t.rows == 1 else format.value)
        if t.name == "down":
            np.testing.assert_allclose(values, tiny("llama")[f"blk.{record.name[6:]}.ffn_down.weight"], atol=tolerance)


def test_what_lies_in_the_directory(tmp_path, make_gguf, quiet):
    make_gguf(tmp_path / "m.gguf")
    seen = []
    models_dir = tmp_path / "models"
    manifest = import_model(tmp_path / "m.gguf", models_dir, "m", None, lambda *a: seen.append(a))
    assert {p.name for p in (models_dir / "m").iterdir()} == {
        "manifest.json", "weights.bin", "tokenizer.json", "chat_template.jinja",
    }  # fmt: skip
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in (models_dir / "m").iterdir())
    assert (models_dir / "m").stat().st_mode & 0o777 == 0o700
    assert catalog.load_manifest(models_dir / "m") == manifest
    assert (manifest.name, manifest.source, manifest.weights) == ("m", str(tmp_path / "m.gguf"), "auto")
    assert Tokenizer.from_file(str(models_dir / "m/tokenizer.json")).encode("hel").ids == [257]
    done = [d for stage, d, _ in seen if stage == "import"]
    assert done == sorted(done) and seen[-1] == ("import", manifest.bytes, manifest.bytes)


def test_the_digest_is_that_of_the_content(tmp_path, make_gguf, tiny, quiet):
    make_gguf(tmp_path / "a.gguf")
    weights = tiny("llama")
    weights["output_norm.weight"][5] += 1e-6
    make_gguf(tmp_path / "b.gguf", weights=weights)
    models_dir = tmp_path / "models"
    first = import_model(tmp_path / "a.gguf", models_dir, "a", None, quiet)
    again = import_model(tmp_path / "a.gguf", models_dir, "c", None, quiet)
    other = import_model(tmp_path / "b.gguf", models_dir, "b", None, quiet)
    packed = import_model(tmp_path / "a.gguf", models_dir, "d", "int8", quiet)
    assert first.digest == again.digest
    assert len({first.digest, other.digest, packed.digest}) == 3


class Stop(Exception):
    """Raised by a progress callback."""


def test_a_failure_leaves_nothing(tmp_path, make_gguf, quiet):
    make_gguf(tmp_path / "m.gguf")
    models_dir = tmp_path / "models"
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    import_model(tmp_path / "m.gguf", models_dir, "m", None, count)
    catalog.remove(models_dir, "m")
    for fatal in range(calls):
        left = fatal

        def stop(*_):
            nonlocal left
            left -= 1
            if left < 0:
                raise Stop

        with pytest.raises(Stop):
            import_model(tmp_path / "m.gguf", models_dir, "m", None, stop)
        assert [p.name for p in models_dir.iterdir()] == [".lock"]
    import_model(tmp_path / "m.gguf", models_dir, "m", None, quiet)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failing_system_call_keeps_the_old_model(tmp_path, make_gguf, quiet, monkeypatch, call):
    make_gguf(tmp_path / "m.gguf")
    models_dir = tmp_path / "models"
    old = import_model(tmp_path / "m.gguf", models_dir, "m", None, quiet)

    def fail(*_):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="broken"):
            import_model(tmp_path / "m.gguf", models_dir, "m", "int8", quiet, replace=True)
    assert catalog.find(models_dir, "m")[1] == old
    new = import_model(tmp_path / "m.gguf", models_dir, "m", "int8", quiet, replace=True)
    assert catalog.find(models_dir, "m")[1] == new


def test_what_a_killed_import_left_is_put_right(tmp_path, make_gguf, quiet):
    make_gguf(tmp_path / "m.gguf")
    models_dir = tmp_path / "models"
    old = import_model(tmp_path / "m.gguf", models_dir, "m", None, quiet)
    (models_dir / "m").rename(models_dir / ".old-m")  # killed between the two renames
    for name in (".import-x", ".trash-y"):
        (models_dir / name).mkdir()
        (models_dir / name / "weights.bin").write_bytes(b"half")
    assert catalog.list_models(models_dir) == []
    import_model(tmp_path / "m.gguf", models_dir, "n", None, quiet)
    assert sorted(p.name for p in models_dir.iterdir()) == [".lock", "m", "n"]
    assert catalog.find(models_dir, "m")[1] == old


def test_a_name_that_is_taken(tmp_path, make_gguf, quiet):
    make_gguf(tmp_path / "m.gguf")
    models_dir = tmp_path / "models"
    import_model(tmp_path / "m.gguf", models_dir, "m", None, quiet)
    with pytest.raises(Conflict, match="model 'm' exists"):
        import_model(tmp_path / "m.gguf", models_dir, "m", None, quiet)
    (models_dir / "mine").mkdir()
    (models_dir / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(Conflict, match=r"isn't a prepared model \(it holds 'notes.txt'\)"):
        import_model(tmp_path / "m.gguf", models_dir, "mine", None, quiet, replace=True)
    for name in ("", "..", "a/b", "/x", ".hidden", "A", "x" * 65, "a\0", "-x"):
        with pytest.raises(BadRequest, match="is no model name"):
            import_model(tmp_path / "m.gguf", models_dir, name, None, quiet)


def test_one_import_at_a_time(tmp_path, make_gguf, quiet):
    make_gguf(tmp_path / "m.gguf")
    models_dir = tmp_path / "models"
    models_dir.mkdir()
    with open(models_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Conflict, match="another import is running"):
            import_model(tmp_path / "m.gguf", models_dir, "m", None, quiet)


def test_a_full_disk(tmp_path, make_gguf, quiet, monkeypatch):
    make_gguf(tmp_path / "m.gguf")
    models_dir = tmp_path / "models"

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(OutOfSpace, match="No space left"):
            import_model(tmp_path / "m.gguf", models_dir, "m", None, quiet)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutOfSpace, match="1.0 kB are free"):
        import_model(tmp_path / "m.gguf", models_dir, "m", None, quiet)
    assert [p.name for p in models_dir.iterdir()] == [".lock"]


def test_tensors_without_a_place(tmp_path, make_gguf, tiny, quiet):
    make_gguf(tmp_path / "m.gguf", weights={**tiny("llama"), "blk.0.extra.weight": np.zeros(32, np.float32)})
    with pytest.raises(ModelFileError, match=r"'blk.0.extra.weight' has no place in a model of family llama"):
        import_model(tmp_path / "m.gguf", tmp_path / "models", "m", None, quiet)


def test_what_a_source_may_be(tmp_path, make_gguf):
    make_gguf(tmp_path / "m.gguf")
    shutil.copy(tmp_path / "m.gguf", tmp_path / "no-suffix")
    open_source(tmp_path / "no-suffix").close()
    (tmp_path / "w.safetensors").write_bytes(b"x")
    (tmp_path / "w.bin").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for path, match in (
        ("w.safetensors", "give the directory that holds it"),
        ("w.bin", r"isn't a GGUF file; .*never opened"),
        ("gone", "doesn't exist"),
        ("empty", "has no safetensors file"),
    ):
        with pytest.raises(ModelFileError, match=match):
            open_source(tmp_path / path)


def test_nothing_is_read_twice_over(tmp_path, make_gguf, quiet, monkeypatch):
    """A tensor is read a few rows at a time: no read is larger than the chunk, whatever the tensor."""
    from tierd.daemon.models import weights
    from tierd.daemon.models.file_reader import FileReader

    make_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(weights, "_CHUNK_ELEMENTS", 16 * 64)
    largest = 0
    real = FileReader.read

    def read(self, offset, count_bytes, what):
        nonlocal largest
        if what.startswith("tensor "):
            largest = max(largest, count_bytes)
        return real(self, offset, count_bytes, what)

    monkeypatch.setattr(FileReader, "read", read)
    import_model(tmp_path / "m.gguf", tmp_path / "models", "m", None, quiet)
    assert largest <= 16 * 96 * 4


def test_the_manifest_is_readable_json(tmp_path, make_gguf, quiet):
    make_gguf(tmp_path / "m.gguf")
    import_model(tmp_path / "m.gguf", tmp_path / "models", "m", None, quiet)
    data = json.loads((tmp_path / "models/m/manifest.json").read_text())
    assert data["version"] == 1 and [r["name"] for r in data["records"]] == [
        "embed", "layer.0", "layer.1", "final", "head",
    ]  # fmt: skip
    assert importer.catalog.MANIFEST_VERSION == 1

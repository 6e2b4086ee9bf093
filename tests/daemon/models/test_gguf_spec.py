import gguf
import numpy as np
import pytest

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.gguf_file import GgufFile
from tierd.daemon.models.gguf_spec import llama3_factors, spec_from_gguf
from tierd.daemon.models.spec import ModelSpec, RopeSpec


@pytest.fixture
def spec_of(tmp_path, make_gguf):
    """The spec of a tiny file; `edit` adds keys to its writer."""

    def read(arch: str = "llama", **kwargs) -> ModelSpec:
        make_gguf(tmp_path / "m.gguf", arch, **kwargs)
        with GgufFile(tmp_path / "m.gguf") as file:
            return spec_from_gguf(file)

    return read


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_sizes_and_features(spec_of, arch):
    spec = spec_of(arch)
    assert (spec.family, spec.num_layers, spec.hidden, spec.intermediate, spec.vocab) == (arch, 2, 64, 96, 320)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (4, 2, 32 if arch == "qwen3" else 16)
    assert (spec.context, spec.norm_eps, spec.rope) == (256, 1e-5, RopeSpec())
    assert (spec.qkv_bias, spec.qk_norm, spec.tied) == (arch == "qwen2", arch == "qwen3", False)


def test_a_head_that_is_missing_is_the_embedding(spec_of, tiny):
    weights = tiny("llama")
    del weights["output.weight"]
    assert spec_of(weights=weights).tied
    del weights["token_embd.weight"]
    with pytest.raises(ModelFileError, match=r"token_embd.weight is missing"):
        spec_of(weights=weights)


def test_counts_given_once_a_layer(tmp_path, spec_of, monkeypatch):
    monkeypatch.setattr(gguf.GGUFWriter, "add_head_count_kv", lambda self, n: self.add_array(
        "llama.attention.head_count_kv", [n, n]))  # fmt: skip
    assert spec_of().kv_heads == 2
    monkeypatch.setattr(gguf.GGUFWriter, "add_head_count_kv", lambda self, n: self.add_array(
        "llama.attention.head_count_kv", [n, 4]))  # fmt: skip
    with pytest.raises(ModelFileError, match="differs between layers"):
        spec_of()


def test_scaling(spec_of):
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    def longrope(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)

    assert spec_of(edit=linear).rope == RopeSpec(kind="linear", factor=4.0)
    assert spec_of("qwen2", edit=yarn).rope == RopeSpec(kind="yarn", factor=4.0, original_context=64)
    with pytest.raises(ModelFileError, match="'longrope' isn't supported"):
        spec_of(edit=longrope)


def test_windows(spec_of):
    assert spec_of(edit=lambda w: w.add_sliding_window(100)).windows == (100, 100)
    assert spec_of(edit=lambda w: w.add_sliding_window(256)).windows == ()
    with pytest.raises(ModelFileError, match="doesn't say which layers"):
        spec_of("qwen2", edit=lambda w: w.add_sliding_window(100))


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda w: (w.add_expert_count(8), w.add_expert_used_count(2)), "speaks of experts, and no layer has any"),
        (lambda w: (w.add_expert_count(8), w.add_expert_shared_count(1)), "every token goes through"),
        (lambda w: w.add_rope_dimension_count(8), "only a part of each head"),
        (lambda w: w.add_value_length(8), "keys and values of different length"),
    ],
)
def test_what_is_refused(spec_of, edit, match):
    with pytest.raises(ModelFileError, match=match):
        spec_of(edit=edit)


def test_experts_of_other_architectures_are_refused(spec_of):
    with pytest.raises(ModelFileError, match="mixtures of experts aren't supported for qwen2"):
        spec_of("qwen2", edit=lambda w: w.add_expert_count(8))


def test_other_architectures_are_refused(spec_of):
    with pytest.raises(ModelFileError, match="'gemma2' isn't supported; supported are llama, qwen2, qwen3, qwen3moe"):
        spec_of("gemma2")


def test_llama3_factors_equal_transformers():
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** -(np.arange(0, 128, 2) / 128)
    ours = llama3_factors(RopeSpec(5e5, "llama3", 32.0, 1.0, 4.0, 8192), 128)
    np.testing.assert_allclose(plain / ours, scaled.numpy(), rtol=2e-6)


def test_llama3_parameters_come_back_from_the_factors(spec_of, tiny):
    rope = RopeSpec(10000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    factors = llama3_factors(rope, 16).astype(np.float32)
    assert 1.0 < factors[6] < factors[7] == 8.0
    assert spec_of(weights={**tiny("llama"), "rope_freqs.weight": factors}).rope == rope
    ones = np.ones(8, np.float32)
    assert spec_of(weights={**tiny("llama"), "rope_freqs.weight": ones}).rope == RopeSpec()
    for wrong, match in ((factors[:4], "expected 8"), (factors * 1.1, "aren't those"), (-factors, "aren't those")):
        with pytest.raises(ModelFileError, match=match):
            spec_of(weights={**tiny("llama"), "rope_freqs.weight": wrong})

"""The spec says what transformers' configuration classes say, and refuses what the decoder can't compute."""

import json

import pytest

from tierd.daemon.models.config_json import check_spec, parse_object, spec_from_config
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.spec import ExpertsSpec, ModelSpec, RopeSpec

BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}


def spec(**extra) -> ModelSpec:
    return spec_from_config({**BASE, **extra})


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 100}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}),
        ("Qwen2", {}),
        ("Qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
        (
            "Qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}}),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        (
            "Qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
)
def test_agrees_with_transformers(tmp_path, name, extra):
    import transformers

    arguments = {k: v for k, v in BASE.items() if k != "model_type"}
    theirs = getattr(transformers, f"{name}Config")(**arguments, **extra)
    theirs.save_pretrained(tmp_path)
    ours = spec_from_config(json.loads((tmp_path / "config.json").read_bytes()))
    assert ours.family == theirs.model_type
    assert (ours.num_layers, ours.hidden, ours.intermediate) == (4, 64, 96)
    assert (ours.heads, ours.kv_heads, ours.vocab) == (4, 2, 320)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.norm_eps == theirs.rms_norm_eps and ours.tied == theirs.tie_word_embeddings
    rope = theirs.rope_parameters
    assert (ours.rope.kind, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    assert ours.rope.factor == rope.get("factor", 1.0)
    if "original_max_position_embeddings" in rope:
        assert ours.rope.original_context == rope["original_max_position_embeddings"]
    bias = getattr(theirs, "attention_bias", False)
    assert ours.qkv_bias == (bias or name == "Qwen2") and ours.o_bias == bias
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.qk_norm == (name == "Qwen3")
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 4
    expected = tuple(window if t == "sliding_attention" else 0 for t in types)
    assert ours.windows == (expected if any(expected) else ())


def test_old_spellings():
    scaling = {"type": "linear", "factor": 2}
    assert spec(rope_theta=7.0, rope_scaling=scaling).rope == RopeSpec(theta=7.0, kind="linear", factor=2.0)
    assert spec(rope_theta=7.0, rope_scaling=None).rope == RopeSpec(theta=7.0)
    assert spec(torch_dtype="float16").dtype == "float16"
    assert spec().rope == RopeSpec(theta=10000.0)


def test_yarn_stretches_the_context():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert spec(model_type="qwen2", rope_scaling=yarn).context == 1024
    assert spec(model_type="qwen2", rope_scaling=yarn, max_position_embeddings=2048).context == 2048
    assert spec(model_type="qwen2", rope_scaling={"rope_type": "yarn", "factor": 2}).rope.original_context == 256


def test_a_window_as_long_as_the_context_is_none():
    assert spec(model_type="mistral", sliding_window=256).windows == ()
    assert spec(model_type="mistral", sliding_window=255).windows == (255,) * 4


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "'gpt2' .GPT2LMHeadModel.*supported are llama"),
        ({"model_type": None}, "isn't supported"),
        ({"auto_map": {"AutoModel": "x--y.Z"}}, "never run"),
        ({"quantization_config": {"quant_method": "awq"}}, "take a GGUF file"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"no_rope_layers": [1, 0]}, "without rotary"),
        ({"num_local_experts": 8}, "mixtures of experts"),
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"hidden_size": -1}, "must lie in"),
        ({"num_hidden_layers": 10**9}, "must lie in"),
        ({"num_attention_heads": 3, "head_dim": 16}, "3 heads can't share 2"),
        ({"head_dim": 15}, "can't be rotated in pairs"),
        ({"rms_norm_eps": 0}, "positive number"),
        ({"rms_norm_eps": float("inf")}, "positive number"),
        ({"tie_word_embeddings": "no"}, "must be true or false"),
        ({"partial_rotary_factor": 0.5}, "only a part"),
        ({"rope_parameters": []}, None),
        ({"rope_parameters": [1]}, "must be an object"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' isn't supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "mscale": 1}}, "'mscale' isn't supported"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            "must be larger",
        ),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "must list 4 layers"),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 4}, "'linear_attention' isn't supported"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4}, "use_sliding_window is off"),
    ],
)
def test_what_is_refused(extra, match):
    if match is None:
        spec(**extra)
        return
    with pytest.raises(ModelFileError, match=match):
        spec(**extra)


MOE = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24}


def test_mixtral_has_experts_everywhere():
    found = spec(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert found.experts == ExpertsSpec(8, 2, 96, True, (0, 1, 2, 3))
    assert (found.rope.theta, found.norm_eps, found.windows) == (1e6, 1e-5, ())
    assert spec(model_type="mixtral", sliding_window=100).windows == (100,) * 4


def test_qwen3_moe_says_which_layers_are_mixtures():
    found = spec(**MOE, mlp_only_layers=[3], decoder_sparse_step=2)
    assert found.experts == ExpertsSpec(16, 4, 24, False, (1,))
    assert found.qk_norm and [found.has_experts(layer) for layer in range(4)] == [False, True, False, False]
    assert spec(**MOE, norm_topk_prob=True).experts == ExpertsSpec(16, 4, 24, True, (0, 1, 2, 3))
    assert spec(**MOE | {"num_experts": None, "num_local_experts": 8}).experts.count == 8
    assert spec(**MOE, decoder_sparse_step=5).experts is None
    assert spec(**MOE, use_sliding_window=True, sliding_window=64).windows == (64,) * 4


def test_gpt_oss_has_clamped_experts_sinks_and_a_window_in_every_other_layer():
    found = spec(model_type="gpt_oss", head_dim=32, max_position_embeddings=131072)
    assert found.experts == ExpertsSpec(128, 4, 96, True, (0, 1, 2, 3), True, 7.0, 1.702)
    assert found.sink_logits and found.qkv_bias and found.o_bias and not found.mlp_bias
    assert (found.windows, found.norm_eps) == ((128, 0, 128, 0), 1e-5)
    assert found.rope == RopeSpec(150000.0, "yarn", 32.0, original_context=4096, truncate=False)
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    other = spec(
        model_type="gpt_oss", rope_scaling=scaling, attention_bias=False, swiglu_limit=5, num_local_experts=8,
        layer_types=["full_attention"] * 4, quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip
    assert other.rope.truncate and not other.qkv_bias and other.windows == () and other.experts.limit == 5.0
    for method in ("awq", None):
        with pytest.raises(ModelFileError, match="quantization_config"):
            spec(model_type="gpt_oss", quantization_config={"quant_method": method})


def test_parameters_of_a_mixture():
    found, dense = spec(**MOE), spec()
    mlp = 4 * 64 * (16 + 16 * 3 * 24)
    assert found.parameters == dense.parameters - 4 * 3 * 64 * 96 + mlp
    assert found.parameters - found.active_parameters == 4 * 12 * 3 * 64 * 24
    assert dense.active_parameters == dense.parameters


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"num_experts_per_tok": 17}, "can't use 17 of 16 experts"),
        ({"num_experts": 1 << 20}, "num_experts is"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must be a list"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers must be a list"),
    ],
)
def test_mixtures_that_are_refused(extra, match):
    with pytest.raises(ModelFileError, match=match):
        spec(**MOE | extra)


def test_check_spec_returns_it():
    assert check_spec(spec(), "x") == spec()


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b"\xff", b'{"a":' * 100_000])
def test_parse_object_refuses(raw):
    with pytest.raises(ModelFileError, match=r"config.json isn't"):
        parse_object(raw, "config.json")

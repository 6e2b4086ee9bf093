"""`config.json` of a transformers model -> `ModelSpec`.

Field names, defaults and the meaning of RoPE and window settings are those of the classes of transformers 5 for Llama,
Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE and gpt-oss; its older spelling (`rope_scaling`, `rope_theta`) is read too.
What the decoder can't compute is refused here, by name: a model that loads but answers wrongly would be worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.spec import ExpertsSpec, ModelSpec, RopeSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss")
_MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # hidden, intermediate, heads
MAX_VOCAB = 1 << 21
MAX_CONTEXT = 1 << 24
MAX_EXPERTS = 1024

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_ROPE_KEYS = frozenset(
    "rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings beta_fast "
    "beta_slow attention_factor partial_rotary_factor finetuned truncate".split()
)
# Defaults of the configuration classes for keys that a file may leave out.
_CONTEXT_DEFAULTS = {
    "llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "mixtral": 131072, "qwen3_moe": 32768,
    "gpt_oss": 131072,
}  # fmt: skip
_KV_HEADS_DEFAULTS = {"mistral": 8, "mixtral": 8, "qwen3_moe": 4, "gpt_oss": 8}  # else as many as there are heads
_HEAD_DIM_DEFAULTS = {"qwen3": 128, "gpt_oss": 64}  # else the hidden size / heads
_THETA_DEFAULTS = {"mixtral": 1e6, "gpt_oss": 150000.0}  # else 1e4
_EPS_DEFAULTS = {"mixtral": 1e-5, "gpt_oss": 1e-5}  # else 1e-6
_ROPE_DEFAULTS = {
    "gpt_oss": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
_WINDOW_DEFAULTS = {"gpt_oss": 128}  # else 4096


class Fields:
    """Typed reads of a JSON object; each raises ModelFileError that names the key."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def error(self, problem: str) -> ModelFileError:
        """A ModelFileError that names the file."""
        return ModelFileError(f"{self.where}: {problem}")

    def integer(self, key: str, limit: int, default: int | None = None) -> int:
        """A whole number in 1..limit."""
        value = self.data.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key} must be a whole number, it is {value!r}")
        if not 1 <= value <= limit:
            raise self.error(f"{key} is {value}, it must lie in 1..{limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self.data.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.error(f"{key} must be a positive number, it is {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, it is {value!r}")
        return value


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object. Raises ModelFileError for anything else, duplicate-free or not as JSON allows."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelFileError(f"{where} isn't valid JSON ({exc}); is it a model's? then fetch the model again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where} isn't a JSON object; fetch the model again")
    return value


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a model. Raises ModelFileError for an architecture or a setting that isn't supported."""
    fields = Fields(config, "config.json")
    family = _family(fields)
    heads = fields.integer("num_attention_heads", MAX_WIDTH)
    hidden = fields.integer("hidden_size", MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", MAX_LAYERS)
    context = fields.integer("max_position_embeddings", MAX_CONTEXT, _CONTEXT_DEFAULTS[family])
    head_dim = fields.integer("head_dim", MAX_WIDTH, _HEAD_DIM_DEFAULTS.get(family, max(1, hidden // heads)))
    rope = _rope(fields, family, context)
    may_have_bias = family in ("llama", "qwen3", "qwen3_moe", "gpt_oss")
    attention_bias = fields.flag("attention_bias", family == "gpt_oss") if may_have_bias else False
    spec = ModelSpec(
        family=family,
        num_layers=num_layers,
        hidden=hidden,
        intermediate=fields.integer("intermediate_size", MAX_WIDTH),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", MAX_WIDTH, _KV_HEADS_DEFAULTS.get(family, heads)),
        head_dim=head_dim,
        vocab=fields.integer("vocab_size", MAX_VOCAB),
        context=_usable_context(context, rope),
        norm_eps=fields.number("rms_norm_eps", _EPS_DEFAULTS.get(family, 1e-6)),
        tied=fields.flag("tie_word_embeddings"),
        rope=rope,
        qkv_bias=True if family == "qwen2" else attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") if family == "llama" else False,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        windows=_windows(fields, family, num_layers, context),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        experts=_experts(fields, family, num_layers) if family in _MIXTURES else None,
        sink_logits=family == "gpt_oss",
    )
    return check_spec(spec, fields.where)


def check_spec(spec: ModelSpec, where: str) -> ModelSpec:
    """The spec itself, if its sizes fit together; ModelFileError otherwise."""
    if spec.heads % spec.kv_heads:
        raise ModelFileError(f"{where}: {spec.heads} heads can't share {spec.kv_heads} key/value heads evenly")
    if spec.head_dim % 2:
        raise ModelFileError(f"{where}: a head of {spec.head_dim} elements can't be rotated in pairs")
    if spec.experts is not None and spec.experts.used > spec.experts.count:
        raise ModelFileError(f"{where}: a token can't use {spec.experts.used} of {spec.experts.count} experts")
    return spec


def _family(fields: Fields) -> str:
    """The family, after refusing what would need code or kernels that don't exist here."""
    config = fields.data
    if "auto_map" in config:
        raise fields.error(
            "this model brings its own Python code (auto_map), which is never run; take a model of a supported "
            f"architecture: {', '.join(FAMILIES)}"
        )
    family = config.get("model_type")
    if family not in FAMILIES:
        names = ", ".join(map(str, config.get("architectures") or [])) or "unknown"
        raise fields.error(
            f"architecture {family!r} ({names}) isn't supported; supported are {', '.join(FAMILIES)} "
            "(SmolLM2, TinyLlama and many others are llama)"
        )
    quantized = config.get("quantization_config")
    is_mxfp4 = isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4"
    if quantized and not (family == "gpt_oss" and is_mxfp4):
        raise fields.error("quantized safetensors (quantization_config) aren't supported; take a GGUF file")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error(f"activation {config['hidden_act']!r} isn't supported, only silu is")
    if config.get("no_rope_layers"):
        raise fields.error("layers without rotary positions aren't supported")
    if family not in _MIXTURES and config.get("num_local_experts"):
        raise fields.error(f"mixtures of experts aren't supported for {family}")
    return str(family)


def _experts(fields: Fields, family: str, num_layers: int) -> ExpertsSpec | None:
    """Which layers are mixtures, and of what; None when none is."""
    if family == "mixtral":
        return ExpertsSpec(
            count=fields.integer("num_local_experts", MAX_EXPERTS, 8),
            used=fields.integer("num_experts_per_tok", MAX_EXPERTS, 2),
            intermediate=fields.integer("intermediate_size", MAX_WIDTH),
            renormalized=True,
            layers=tuple(range(num_layers)),
        )
    if family == "gpt_oss":
        return ExpertsSpec(
            count=fields.integer("num_local_experts", MAX_EXPERTS, 128),
            used=fields.integer("num_experts_per_tok", MAX_EXPERTS, 4),
            intermediate=fields.integer("intermediate_size", MAX_WIDTH),
            renormalized=True,  # a softmax over the chosen ones' logits
            layers=tuple(range(num_layers)),
            bias=True,
            limit=fields.number("swiglu_limit", 7.0),
            slope=fields.number("swiglu_alpha", 1.702),
        )
    dense = fields.data.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise fields.error("mlp_only_layers must be a list of layers")
    step = fields.integer("decoder_sparse_step", MAX_LAYERS, 1)
    layers = tuple(n for n in range(num_layers) if n not in dense and (n + 1) % step == 0)
    key = "num_experts" if fields.data.get("num_experts") else "num_local_experts"  # transformers 5 writes the other
    if not layers or fields.data.get(key) == 0:
        return None
    return ExpertsSpec(
        count=fields.integer(key, MAX_EXPERTS, 128),
        used=fields.integer("num_experts_per_tok", MAX_EXPERTS, 8),
        intermediate=fields.integer("moe_intermediate_size", MAX_WIDTH, 768),
        renormalized=fields.flag("norm_topk_prob"),
        layers=layers,
    )


def _rope(fields: Fields, family: str, context: int) -> RopeSpec:
    """RoPE parameters from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    config = fields.data
    raw = config.get("rope_parameters") or config.get("rope_scaling") or _ROPE_DEFAULTS.get(family, {})
    if not isinstance(raw, dict):
        raise fields.error("rope_parameters must be an object")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise fields.error(f"RoPE kind {kind!r} isn't supported; supported are {', '.join(_ROPE_KINDS)}")
    unknown = sorted(k for k, v in raw.items() if k not in _ROPE_KEYS and v is not None)
    if unknown:
        raise fields.error(f"RoPE setting {unknown[0]!r} isn't supported")
    partial = raw.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    if partial != 1:
        raise fields.error("rotating only a part of each head (partial_rotary_factor) isn't supported")
    rope = Fields(raw, "config.json, rope_parameters")
    theta = Fields(config, fields.where).number("rope_theta", _THETA_DEFAULTS.get(family, 1e4))
    theta = rope.number("rope_theta", theta)
    if kind == "default":
        return RopeSpec(theta=theta)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    if kind == "dynamic":
        # transformers starts to stretch past max_position_embeddings, whatever `original_...` says.
        return RopeSpec(theta=theta, kind=kind, factor=factor, original_context=context)
    original = Fields(config, fields.where).integer("original_max_position_embeddings", MAX_CONTEXT, context)
    original = rope.integer("original_max_position_embeddings", MAX_CONTEXT, original)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor must be larger than low_freq_factor")
        return RopeSpec(
            theta=theta, kind=kind, factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=original
        )
    attention = raw.get("attention_factor")
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=None if attention is None else rope.number("attention_factor"),
        truncate=rope.flag("truncate", True),
    )


def _usable_context(context: int, rope: RopeSpec) -> int:
    """Tokens the model can be used for: yarn files name the unstretched length in max_position_embeddings."""
    if rope.kind == "yarn":
        return min(MAX_CONTEXT, max(context, round(rope.original_context * rope.factor)))
    return context


def _windows(fields: Fields, family: str, num_layers: int, context: int) -> tuple[int, ...]:
    """Sliding window of each layer: how many tokens a token attends, itself included. Empty: all layers are full."""
    config = fields.data
    if family == "llama":
        return ()
    in_all = family in ("mistral", "mixtral")
    if in_all and config.get("sliding_window") is None and (family == "mixtral" or "sliding_window" in config):
        return ()
    used = in_all or family == "gpt_oss" or fields.flag("use_sliding_window")
    window = fields.integer("sliding_window", MAX_CONTEXT, _WINDOW_DEFAULTS.get(family, 4096)) if used else 0
    windows = (window,) * num_layers
    if not in_all and family != "qwen3_moe":  # whose max_window_layers and layer_types count for nothing
        types = config.get("layer_types")
        if types is None:
            first = fields.integer("max_window_layers", MAX_LAYERS, 28) if config.get("max_window_layers") != 0 else 0
            every_other = family == "gpt_oss"
            types = [
                "sliding_attention" if window and (i % 2 == 0 if every_other else i >= first) else "full_attention"
                for i in range(num_layers)
            ]
        if not isinstance(types, list) or len(types) != num_layers:
            raise fields.error(f"layer_types must list {num_layers} layers")
        unknown = {str(t) for t in types} - {"sliding_attention", "full_attention"}
        if unknown:
            raise fields.error(f"layer type {sorted(unknown)[0]!r} isn't supported")
        if "sliding_attention" in types and not window:
            raise fields.error("layer_types asks for sliding_attention, but use_sliding_window is off")
        windows = tuple(window if t == "sliding_attention" else 0 for t in types)
    # A window as long as the context masks nothing.
    windows = tuple(w if w < context else 0 for w in windows)
    return windows if any(windows) else ()

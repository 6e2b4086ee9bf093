"""Any `config.json` of a transformers model -> `Shape`: also of architectures that tierd does not run.

What is read are the names that configuration classes of transformers share: grouped heads, sliding windows, latent
attention (`kv_lora_rank`), experts, and the fixed states of Qwen3-Next and Jamba. A key that a figure depends on and
that isn't there is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierd.daemon.errors import BadRequest
from tierd.daemon.models.config_json import (
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    parse_object,
    spec_from_config,
)
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.plan.shape import Cache, Layer, Matrix, Shape, shape_from_spec

MAX_CONFIG_BYTES = 4 << 20
_WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")
_LINEAR = ("linear_attention", "mamba", "mamba2", "recurrent")
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3", "gemma3_text")


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json`, or that of a directory. Raises BadRequest when there is none that can be read."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise BadRequest(f"{file} is too large for a config.json", param="model")
        return parse_object(raw, str(file))
    except OSError as exc:
        raise BadRequest(f"cannot read {file}: {exc.strerror}", hint="give a config.json", param="model") from None
    except ModelFileError as exc:
        raise BadRequest(str(exc), param="model") from None


def shape_from_config(config: Mapping[str, Any], name: str) -> Shape:
    """The shape of a model. Raises BadRequest when the file doesn't say what the figures need."""
    if isinstance(inner := config.get("text_config"), dict):  # the language half of a model that also sees
        config = {**inner, "model_type": inner.get("model_type", config.get("model_type"))}
    try:
        return shape_from_spec(spec_from_config(config), name)
    except ModelFileError:
        pass  # not one that tierd runs: its figures can be told all the same
    try:
        return _foreign(Fields(config, f"the configuration of {name}"), name)
    except ModelFileError as exc:
        raise BadRequest(str(exc), hint="the planner needs a transformers config.json", param="model") from None


def _foreign(fields: Fields, name: str) -> Shape:
    config = fields.data
    family = str(config.get("model_type") or "unknown")
    heads = fields.integer("num_attention_heads", MAX_WIDTH)
    hidden = fields.integer("hidden_size", MAX_WIDTH)
    num_layers = fields.integer("num_hidden_layers", MAX_LAYERS)
    head_dim = fields.integer("head_dim", MAX_WIDTH, max(1, hidden // heads))
    if _latent(config):
        head_dim = fields.integer("qk_nope_head_dim", MAX_WIDTH) + fields.integer("qk_rope_head_dim", MAX_WIDTH)
    return Shape(
        name=name,
        family=family,
        layers=tuple(_layer(fields, index, heads, head_dim, hidden) for index in range(num_layers)),
        hidden=hidden,
        vocab=fields.integer("vocab_size", MAX_VOCAB),
        heads=heads,
        head_dim=head_dim,
        context=fields.integer("max_position_embeddings", MAX_CONTEXT, 4096),
        tied=fields.flag("tie_word_embeddings", family in _TIED_BY_DEFAULT),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
    )


def _latent(config: Mapping[str, Any]) -> bool:
    return bool(config.get("kv_lora_rank"))


def _layer(fields: Fields, index: int, heads: int, head_dim: int, hidden: int) -> Layer:
    kind = _kind(fields, index)
    matrices: tuple[Matrix, ...]
    if kind in _LINEAR:
        cache, matrices = _recurrent(fields, hidden)
    elif _latent(fields.data):
        cache, matrices = _mla(fields, heads, hidden)
    else:
        kv_heads = fields.integer("num_key_value_heads", MAX_WIDTH, 1 if fields.data.get("multi_query") else heads)
        window = fields.integer("sliding_window", MAX_CONTEXT) if kind in _WINDOWED else 0
        key, query = kv_heads * head_dim, heads * head_dim
        gate = query if fields.data.get("model_type") == "qwen3_next" else 0  # gated attention: q is twice as wide
        cache = Cache(key, key, window)
        matrices = (Matrix("qkv", query + gate + 2 * key, hidden), Matrix("o", hidden, query))
    vectors = [hidden, hidden]
    if fields.data.get("attention_bias") and kind not in _LINEAR:
        vectors += [matrices[0].rows, hidden]
    if _latent(fields.data):
        vectors += [int(fields.data["kv_lora_rank"])] + [int(rank) for rank in [fields.data.get("q_lora_rank")] if rank]
    if str(fields.data.get("model_type")).startswith(("gemma2", "gemma3")):
        vectors += [hidden, hidden]
    if fields.data.get("model_type") in ("qwen3_moe", "qwen3_next", "gemma3_text", "gemma3"):
        vectors += [head_dim, head_dim]
    return Layer(cache, matrices + _mlp(fields, index, hidden), tuple(vectors))


def _kind(fields: Fields, index: int) -> str:
    """How layer `index` attends, as `layer_types` would call it."""
    config = fields.data
    types = config.get("layer_types") or config.get("layers_block_type")
    if types is not None:
        if not isinstance(types, list) or index >= len(types):
            raise fields.error("layer_types must list every layer")
        return str(types[index])
    if (period := config.get("attn_layer_period")) is not None:  # Jamba
        period = fields.integer("attn_layer_period", MAX_LAYERS)
        offset = config.get("attn_layer_offset") or 0
        return "full_attention" if index % period == offset else "mamba"
    if (period := config.get("full_attention_interval")) is not None:  # Qwen3-Next
        period = fields.integer("full_attention_interval", MAX_LAYERS)
        return "full_attention" if (index + 1) % period == 0 else "linear_attention"
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return "full_attention"
    if (period := config.get("sliding_window_pattern")) is not None:  # Gemma 3: every so-manieth layer is full
        period = fields.integer("sliding_window_pattern", MAX_LAYERS)
        return "full_attention" if (index + 1) % period == 0 else "sliding_attention"
    if config.get("model_type") == "gemma2":
        return "sliding_attention" if index % 2 == 0 else "full_attention"
    return "sliding_attention"


def _mla(fields: Fields, heads: int, hidden: int) -> tuple[Cache, tuple[Matrix, ...]]:
    """Latent attention (DeepSeek-V2): one compressed vector and one rotated key for all heads."""
    rank, rope = fields.integer("kv_lora_rank", MAX_WIDTH), fields.integer("qk_rope_head_dim", MAX_WIDTH)
    nope, value = fields.integer("qk_nope_head_dim", MAX_WIDTH), fields.integer("v_head_dim", MAX_WIDTH)
    query = heads * (nope + rope)
    matrices: list[Matrix] = []
    if fields.data.get("q_lora_rank"):
        q_rank = fields.integer("q_lora_rank", MAX_WIDTH)
        matrices += [Matrix("q_a", q_rank, hidden), Matrix("q_b", query, q_rank)]
    else:
        matrices.append(Matrix("q", query, hidden))
    matrices += [
        Matrix("kv_a", rank + rope, hidden),
        Matrix("kv_b", heads * (nope + value), rank),
        Matrix("o", hidden, heads * value),
    ]
    return Cache(key_elements=rank + rope), tuple(matrices)


def _recurrent(fields: Fields, hidden: int) -> tuple[Cache, tuple[Matrix, ...]]:
    """A layer whose memory does not grow: gated delta rule (Qwen3-Next) or Mamba (Jamba)."""
    if fields.data.get("linear_num_value_heads") is not None:
        value_heads = fields.integer("linear_num_value_heads", MAX_WIDTH)
        key_heads = fields.integer("linear_num_key_heads", MAX_WIDTH)
        key_dim = fields.integer("linear_key_head_dim", MAX_WIDTH)
        value_dim = fields.integer("linear_value_head_dim", MAX_WIDTH)
        kernel = fields.integer("linear_conv_kernel_dim", 64, 4)
        keys, values = key_heads * key_dim, value_heads * value_dim
        state = value_heads * key_dim * value_dim + (2 * keys + values) * (kernel - 1)
        inputs = Matrix("in", 2 * keys + 2 * values + 2 * value_heads, hidden)
        return Cache(state_elements=state), (inputs, Matrix("out", hidden, values))
    inner = hidden * fields.integer("mamba_expand", 64, 2)
    width, kernel = fields.integer("mamba_d_state", MAX_WIDTH), fields.integer("mamba_d_conv", 64, 4)
    rank = fields.integer("mamba_dt_rank", MAX_WIDTH, -(-hidden // 16))
    matrices = (
        Matrix("in", 2 * inner, hidden),
        Matrix("x", rank + 2 * width, inner),
        Matrix("dt", inner, rank),
        Matrix("out", hidden, inner),
    )
    return Cache(state_elements=inner * width + inner * (kernel - 1)), matrices


def _mlp(fields: Fields, index: int, hidden: int) -> tuple[Matrix, ...]:
    """The matrices behind attention."""
    config = fields.data
    experts = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), None)
    if experts is None or not _has_experts(fields, index):
        inner = fields.integer("intermediate_size", MAX_WIDTH)
        return Matrix("gate_up", 2 * inner, hidden), Matrix("down", hidden, inner)
    count = fields.integer(experts, 4096)
    used_key = "num_experts_per_tok" if config.get("num_experts_per_tok") else "experts_per_token"
    used = fields.integer(used_key, count)
    inner = fields.integer("moe_intermediate_size", MAX_WIDTH, config.get("intermediate_size"))
    matrices = [
        Matrix("router", count, hidden, exact=True),
        Matrix("gate_up", 2 * inner, hidden, count, used),
        Matrix("down", hidden, inner, count, used),
    ]
    shared = int(config.get("n_shared_experts") or 0) * inner or int(config.get("shared_expert_intermediate_size") or 0)
    if shared:
        matrices += [Matrix("shared_gate_up", 2 * shared, hidden), Matrix("shared_down", hidden, shared)]
    return tuple(matrices)


def _has_experts(fields: Fields, index: int) -> bool:
    """Whether layer `index` is a mixture of experts."""
    config = fields.data
    if index < int(config.get("first_k_dense_replace") or 0) or index in (config.get("mlp_only_layers") or []):
        return False
    if config.get("expert_layer_period") is not None:  # Jamba
        period = fields.integer("expert_layer_period", MAX_LAYERS)
        return index % period == int(config.get("expert_layer_offset") or 0)
    step = fields.integer("decoder_sparse_step", MAX_LAYERS, 1)
    return (index + 1) % step == 0

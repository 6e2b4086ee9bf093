"""GGUF metadata -> `ModelSpec`: architectures `llama` (of Mistral and Mixtral, too), `qwen2`, `qwen3`, `qwen3moe`,
`gpt-oss`."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tierd.daemon.models.config_json import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    check_spec,
)
from tierd.daemon.models.dequant import dequantize
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import readable
from tierd.daemon.models.gguf_file import GgufFile
from tierd.daemon.models.spec import ExpertsSpec, ModelSpec, RopeSpec

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss")
_FAMILIES = {"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}  # where a name of transformers is another one

ROPE_FREQS = "rope_freqs.weight"

# Original contexts of llama3 scaling: Llama 3.1 to 3.3 stretch 8192 tokens. The file holds only the factors.
_LLAMA3_ORIGINAL_CONTEXTS = (8192, 4096, 2048, 16384, 32768)
# What files of gpt-oss don't say, as in its configuration.
_GPT_OSS_LIMIT, _GPT_OSS_SLOPE = 7.0, 1.702
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """The spec of a GGUF model. Raises ModelFileError for what isn't supported."""
    where = file.path.name
    meta = Fields(file.metadata, where)
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelFileError(
            f"{where}: architecture {arch!r} isn't supported; supported are {', '.join(ARCHITECTURES)} "
            "(SmolLM2, Mistral, Mixtral and TinyLlama files are llama)"
        )
    hidden = meta.integer(f"{arch}.embedding_length", MAX_WIDTH)
    heads = _uniform(meta, f"{arch}.attention.head_count", None)
    head_dim = meta.integer(f"{arch}.attention.key_length", MAX_WIDTH, max(1, hidden // heads))
    if meta.integer(f"{arch}.attention.value_length", MAX_WIDTH, head_dim) != head_dim:
        raise ModelFileError(f"{where}: keys and values of different length aren't supported")
    if meta.integer(f"{arch}.rope.dimension_count", MAX_WIDTH, head_dim) != head_dim:
        raise ModelFileError(f"{where}: rotating only a part of each head isn't supported")
    context = meta.integer(f"{arch}.context_length", MAX_CONTEXT)
    num_layers = meta.integer(f"{arch}.block_count", MAX_LAYERS)
    intermediate = _uniform(meta, f"{arch}.feed_forward_length", None)
    experts = _experts(file, meta, str(arch), num_layers, intermediate)
    spec = ModelSpec(
        family="mixtral" if experts is not None and arch == "llama" else _FAMILIES.get(str(arch), str(arch)),
        num_layers=num_layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=_uniform(meta, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=_vocab(file, meta),
        context=context,
        norm_eps=_short_decimal(meta.number(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)),
        tied="output.weight" not in file.tensors,
        rope=_rope(file, meta, str(arch), head_dim, context),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        windows=_windows(meta, str(arch), num_layers, context),
        dtype="float32",
        experts=experts,
        sink_logits=arch == "gpt-oss",
    )
    return check_spec(spec, where)


def _experts(file: GgufFile, meta: Fields, arch: str, num_layers: int, intermediate: int) -> ExpertsSpec | None:
    """The layers that have a router; None when the file speaks of no experts."""
    if not meta.data.get(f"{arch}.expert_count"):
        return None
    if arch not in ("llama", "qwen3moe", "gpt-oss"):
        raise meta.error(
            f"mixtures of experts aren't supported for {arch}, only for Mixtral (llama), qwen3moe and gpt-oss"
        )
    if meta.data.get(f"{arch}.expert_shared_count"):
        raise meta.error("experts that every token goes through aren't supported")
    layers = tuple(n for n in range(num_layers) if f"blk.{n}.ffn_gate_inp.weight" in file.tensors)
    if not layers:
        raise meta.error("it speaks of experts, and no layer has any; the file is incomplete, fetch it again")
    clamped = arch == "gpt-oss"
    return ExpertsSpec(
        count=meta.integer(f"{arch}.expert_count", MAX_EXPERTS),
        used=meta.integer(f"{arch}.expert_used_count", MAX_EXPERTS),
        intermediate=_uniform(meta, f"{arch}.expert_feed_forward_length", intermediate),
        # llama.cpp does so for both architectures when the file says nothing.
        renormalized=meta.flag(f"{arch}.expert_weights_norm", True),
        layers=layers,
        bias=clamped,
        limit=_GPT_OSS_LIMIT if clamped else 0.0,
        slope=_GPT_OSS_SLOPE if clamped else 0.0,
    )


def _uniform(meta: Fields, key: str, default: int | None) -> int:
    """A count that some files give once a layer; ModelFileError if it differs between layers."""
    value = meta.data.get(key)
    if isinstance(value, np.ndarray):
        items = sorted({int(v) for v in value.tolist()})
        if len(items) != 1:
            raise meta.error(f"{key} differs between layers, which isn't supported")
        return Fields({key: items[0]}, meta.where).integer(key, MAX_WIDTH)
    return meta.integer(key, MAX_WIDTH, default)


def _vocab(file: GgufFile, meta: Fields) -> int:
    """Rows of the embedding: what the logits are counted by."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise meta.error("tensor token_embd.weight is missing; the file is incomplete, fetch it again")
    if embedding.rows > MAX_VOCAB:
        raise meta.error(f"a vocabulary of {embedding.rows:,} isn't supported")
    return embedding.rows


def _short_decimal(value: float) -> float:
    """The shortest decimal that is the same fp32 number: files hold 1e-5 as 9.999999747e-06."""
    return float(str(np.float32(value)))


def _windows(meta: Fields, arch: str, num_layers: int, context: int) -> tuple[int, ...]:
    key = f"{arch}.attention.sliding_window"
    if not meta.data.get(key):
        return ()
    if arch not in ("llama", "gpt-oss"):
        raise meta.error(f"{key} doesn't say which layers it is for; take the safetensors form of this model")
    window = meta.integer(key, MAX_CONTEXT)
    if window >= context:
        return ()
    return tuple(0 if arch == "gpt-oss" and layer % 2 else window for layer in range(num_layers))


def _rope(file: GgufFile, meta: Fields, arch: str, head_dim: int, context: int) -> RopeSpec:
    theta = meta.number(f"{arch}.rope.freq_base", 10000.0)
    prefix = f"{arch}.rope.scaling."
    kind = meta.data.get(prefix + "type", "none")
    if ROPE_FREQS in file.tensors:
        if kind not in ("none", "linear") or meta.data.get(prefix + "factor", 1.0) != 1.0:
            raise meta.error(f"{ROPE_FREQS} together with {kind} scaling isn't supported")
        return _llama3(file, theta, head_dim)
    legacy = meta.data.get(f"{arch}.rope.scale_linear")
    if kind == "none" and legacy in (None, 1.0):
        return RopeSpec(theta=theta)
    factor = meta.number(prefix + "factor", float(legacy) if isinstance(legacy, float) else 1.0)
    if kind == "yarn":
        scale = meta.number(prefix + "attn_factor", 1.0)
        if prefix + "yarn_log_multiplier" in meta.data or prefix + "yarn_ext_factor" in meta.data:
            raise meta.error("this variant of yarn isn't supported")
        return RopeSpec(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_context=meta.integer(prefix + "original_context_length", MAX_CONTEXT, context),
            beta_fast=meta.number(prefix + "yarn_beta_fast", 32.0),
            beta_slow=meta.number(prefix + "yarn_beta_slow", 1.0),
            truncate=arch != "gpt-oss",  # as its configuration says
            attention_factor=None if scale == 1.0 else scale * (0.1 * math.log(max(1.0, factor)) + 1.0),
        )
    if kind not in ("none", "linear"):
        raise meta.error(f"RoPE scaling {kind!r} isn't supported; supported are none, linear, yarn and llama3")
    return RopeSpec(theta=theta) if factor == 1.0 else RopeSpec(theta=theta, kind="linear", factor=factor)


def llama3_factors(rope: RopeSpec, head_dim: int) -> npt.NDArray[np.float64]:  # [head_dim / 2]
    """What llama3 scaling divides each frequency by (the formula of transformers' `_compute_llama3_parameters`)."""
    frequency = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelength = 2 * math.pi / frequency
    smooth = rope.original_context / wavelength - rope.low_freq_factor
    smooth /= rope.high_freq_factor - rope.low_freq_factor
    middle = 1 / ((1 - smooth) / rope.factor + smooth)
    factors = np.where(wavelength > rope.original_context / rope.low_freq_factor, rope.factor, middle)
    return np.where(wavelength < rope.original_context / rope.high_freq_factor, 1.0, factors)


def _llama3(file: GgufFile, theta: float, head_dim: int) -> RopeSpec:
    """llama3 parameters from the factors in the file: the candidate that gives them back, or ModelFileError."""
    tensor = file.tensors[ROPE_FREQS]
    if tensor.rows * tensor.cols != head_dim // 2:
        raise ModelFileError(f"{file.path.name}: {ROPE_FREQS} has {tensor.cols} factors, expected {head_dim // 2}")
    wanted = dequantize(readable(tensor.type_id), file.read_rows(tensor, 0, tensor.rows)).reshape(-1)
    if np.isfinite(wanted).all() and wanted.min() > 0:
        if np.all(wanted == 1.0):
            return RopeSpec(theta=theta)
        for original in _LLAMA3_ORIGINAL_CONTEXTS:
            rope = RopeSpec(
                theta=theta,
                kind="llama3",
                factor=_short_decimal(float(wanted.max())),
                low_freq_factor=_LLAMA3_LOW,
                high_freq_factor=_LLAMA3_HIGH,
                original_context=original,
            )
            if np.allclose(llama3_factors(rope, head_dim), wanted, rtol=1e-4):
                return rope
    raise ModelFileError(
        f"{file.path.name}: the factors in {ROPE_FREQS} aren't those of llama3 scaling, and other ones aren't "
        "supported; take the safetensors form of this model"
    )

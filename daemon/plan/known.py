"""Shapes of well-known models, so that a plan needs neither weights nor network: `tierd plan llama-3-70b`.

Each entry is the part of the model's `config.json` that figures depend on; `SOURCES` names the file it is from. The
tests hold the parameter counts against those that the publishers state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tierd.daemon.plan.from_config import shape_from_config
from tierd.daemon.plan.shape import Shape


class Known(NamedTuple):
    """A configuration, and the repository on huggingface.co whose `config.json` it is from."""

    config: Mapping[str, Any]
    source: str


def _config(
    family: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, context: int,
    *, tied: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": context, "tie_word_embeddings": tied, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


_LLAMA_VOCAB, _QWEN_VOCAB, _SMOL_VOCAB = 128256, 151936, 49152
_SCALED: dict[str, Any] = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip

KNOWN: dict[str, Known] = {
    "smollm2-135m": Known(
        _config("llama", 30, 576, 1536, 9, 3, _SMOL_VOCAB, 8192, tied=True), "HuggingFaceTB/SmolLM2-135M-Instruct"
    ),
    "smollm2-360m": Known(
        _config("llama", 32, 960, 2560, 15, 5, _SMOL_VOCAB, 8192, tied=True), "HuggingFaceTB/SmolLM2-360M-Instruct"
    ),
    "smollm2-1.7b": Known(
        _config("llama", 24, 2048, 8192, 32, 32, _SMOL_VOCAB, 8192, tied=True), "HuggingFaceTB/SmolLM2-1.7B-Instruct"
    ),
    "llama-3-8b": Known(
        _config("llama", 32, 4096, 14336, 32, 8, _LLAMA_VOCAB, 8192, rope_theta=500000.0), "meta-llama/Meta-Llama-3-8B"
    ),
    "llama-3-70b": Known(
        _config("llama", 80, 8192, 28672, 64, 8, _LLAMA_VOCAB, 8192, rope_theta=500000.0), "meta-llama/Meta-Llama-3-70B"
    ),
    "llama-3.1-8b": Known(
        _config("llama", 32, 4096, 14336, 32, 8, _LLAMA_VOCAB, 131072, **_SCALED), "meta-llama/Llama-3.1-8B"
    ),
    "llama-3.1-70b": Known(
        _config("llama", 80, 8192, 28672, 64, 8, _LLAMA_VOCAB, 131072, **_SCALED), "meta-llama/Llama-3.1-70B"
    ),
    "llama-2-70b": Known(_config("llama", 80, 8192, 28672, 64, 8, 32000, 4096), "meta-llama/Llama-2-70b-hf"),
    "qwen2.5-0.5b": Known(_config("qwen2", 24, 896, 4864, 14, 2, _QWEN_VOCAB, 32768, tied=True), "Qwen/Qwen2.5-0.5B"),
    "qwen2.5-1.5b": Known(_config("qwen2", 28, 1536, 8960, 12, 2, _QWEN_VOCAB, 131072, tied=True), "Qwen/Qwen2.5-1.5B"),
    "qwen2.5-3b": Known(_config("qwen2", 36, 2048, 11008, 16, 2, _QWEN_VOCAB, 32768, tied=True), "Qwen/Qwen2.5-3B"),
    "qwen2.5-7b": Known(_config("qwen2", 28, 3584, 18944, 28, 4, 152064, 131072), "Qwen/Qwen2.5-7B"),
    "qwen2.5-14b": Known(_config("qwen2", 48, 5120, 13824, 40, 8, 152064, 131072), "Qwen/Qwen2.5-14B"),
    "qwen2.5-32b": Known(_config("qwen2", 64, 5120, 27648, 40, 8, 152064, 131072), "Qwen/Qwen2.5-32B"),
    "qwen2.5-72b": Known(_config("qwen2", 80, 8192, 29568, 64, 8, 152064, 131072), "Qwen/Qwen2.5-72B"),
    "qwen3-8b": Known(_config("qwen3", 36, 4096, 12288, 32, 8, _QWEN_VOCAB, 40960, head_dim=128), "Qwen/Qwen3-8B"),
    "qwen3-30b-a3b": Known(
        _config(
            "qwen3_moe", 48, 2048, 6144, 32, 4, _QWEN_VOCAB, 40960, head_dim=128, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1,
        ),  # fmt: skip
        "Qwen/Qwen3-30B-A3B",
    ),
    "mistral-7b": Known(
        _config("mistral", 32, 4096, 14336, 32, 8, 32000, 32768, sliding_window=4096), "mistralai/Mistral-7B-v0.1"
    ),
    "mixtral-8x7b": Known(
        _config(
            "mixtral", 32, 4096, 14336, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2,
            sliding_window=None,
        ),  # fmt: skip
        "mistralai/Mixtral-8x7B-v0.1",
    ),
    "gpt-oss-20b": Known(
        _config(
            "gpt_oss", 24, 2880, 2880, 64, 8, 201088, 131072, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
            sliding_window=128, attention_bias=True,
        ),  # fmt: skip
        "openai/gpt-oss-20b",
    ),
    "gpt-oss-120b": Known(
        _config(
            "gpt_oss", 36, 2880, 2880, 64, 8, 201088, 131072, head_dim=64, num_local_experts=128, num_experts_per_tok=4,
            sliding_window=128, attention_bias=True,
        ),  # fmt: skip
        "openai/gpt-oss-120b",
    ),
    "deepseek-v2-lite": Known(
        _config(
            "deepseek_v2", 27, 2048, 10944, 16, 16, 102400, 163840, kv_lora_rank=512, q_lora_rank=None,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, num_experts_per_tok=6,
            moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1,
        ),  # fmt: skip
        "deepseek-ai/DeepSeek-V2-Lite",
    ),
    "gemma-3-12b": Known(
        _config(
            "gemma3_text", 48, 3840, 15360, 16, 8, 262208, 131072, tied=True, head_dim=256, sliding_window=1024,
            sliding_window_pattern=6,
        ),  # fmt: skip
        "google/gemma-3-12b-pt",
    ),
}


def known_name(text: str) -> str | None:
    """The name of a built-in shape that `text` means (`Llama-3-8B`, `llama-3-8b-shape`, `smollm2:135m`), or None."""
    name = text.strip().lower().replace(":", "-").removesuffix("-shape")
    return name if name in KNOWN else None


def known_shape(name: str) -> Shape:
    """A built-in shape by its name in `KNOWN`."""
    return shape_from_config(KNOWN[name].config, name)

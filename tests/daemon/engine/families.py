"""Tiny random models of each family: transformers' own class on one side, the prepared model on the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import tqdm
import transformers

from tests.daemon.engine.vocabularies import byte_level
from tierd.daemon.engine.model import rope
from tierd.daemon.engine.model.load import load_weights
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.importer import import_model
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.layout import PAGE_TOKENS, PageLayout

tqdm.tqdm.monitor_interval = 0  # saving a model shows a bar, whose monitor would be a thread left over
VOCAB = 320
CONTEXT = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.2,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "tie_word_embeddings": True}
    ),
    "llama, llama3 rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama, linear rope": (
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}, "head_dim": 32}
    ),
    "llama, dynamic rope, biases": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            "attention_bias": True, "mlp_bias": True,
        },
    ),
    "mistral, sliding window": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn, half of the layers in a window": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32
            },
            "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "mixtral, sliding window": (
        "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 40, "head_dim": 32}
    ),
    "qwen3_moe, a dense layer": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 3, "num_experts": 20, "num_experts_per_tok": 4, "moe_intermediate_size": 40,
            "norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 32,
        },
    ),
    "qwen3_moe, shares of all, every second layer": (
        "Qwen3Moe",
        {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False,
            "decoder_sparse_step": 2, "attention_bias": True, "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 3, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32,
            "sliding_window": 24, "swiglu_limit": 2.0,
        },
    ),
    "gpt_oss, yarn with whole dimensions, no biases of attention": (
        "GptOss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 3, "attention_bias": False, "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
            },
            "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 30,
        },
    ),
}  # fmt: skip


def reference(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of transformers, biases and norms random too; `changes` to its configuration."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**COMMON | settings | changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=1.0 if name.endswith("sinks") else 0.2)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def prepare(model: Any, directory: Path, weights: str = "fp32") -> Path:
    """Save a model of transformers and import it; the directory of the prepared model."""
    source, models_dir = directory / "source", directory / "models"
    models_dir.mkdir(parents=True)
    model.save_pretrained(source)
    byte_level()._tokenizer.save(str(source / "tokenizer.json"))
    import_model(source, models_dir, "tiny", weights, lambda _stage, _done, _total: None)
    return models_dir / "tiny"


class Pass:
    """One sequence through a `CpuDecoder`, its pages scattered over an arena of stale memory."""

    def __init__(self, prepared: Path, context: int = CONTEXT) -> None:
        manifest = load_manifest(prepared)
        weights = load_weights(prepared, manifest, lambda _done, _total: None)
        spec = manifest.spec
        layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim)
        cos, sin = rope.tables(rope.frequencies(spec, context), context)
        self.decoder = CpuDecoder(
            weights.shape, weights.layers, weights.embed, weights.final_norm, weights.head, layout, cos, sin, context, 2
        )
        pages = context // PAGE_TOKENS
        self.arena = np.full((2 * pages, layout.record_bytes), 0xFF, np.uint8)
        slots = np.random.default_rng(1).permutation(2 * pages)[:pages]
        self.pages = self.arena.ctypes.data + slots * layout.record_bytes

    def __call__(self, tokens: list[int], start: int) -> np.ndarray:
        """Logits of every row [tokens, vocab]."""
        count = len(tokens)
        return self.decoder.forward(
            [self.arena],
            np.array(tokens, np.int32),
            np.arange(start, start + count, dtype=np.int32),
            np.zeros(count, np.int32),
            self.pages,
            np.array([0, len(self.pages)], np.int32),
            np.arange(count, dtype=np.int32),
        )

"""Tiny models of every kind: GGUF files by the `gguf` package, directories by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB = 320
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2

FAMILIES = ["llama", "llama-bias", "mistral", "qwen2", "qwen3", "qwen3-bias"]
EXPERTS, USED, EXPERT_WIDTH = 4, 2, 32


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with 256 bytes, two merges and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "he", "hel"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("he", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    return tokenizer


def tiny_config(family: str) -> dict[str, Any]:
    """Keyword arguments of a transformers configuration class."""
    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "tie_word_embeddings": family in ("qwen2", "llama-bias"),
    }
    if family.endswith("bias"):
        config["attention_bias"] = True
    if family == "llama-bias":
        config["mlp_bias"] = True
    if family.startswith("qwen3"):
        config["head_dim"] = 32
    if family == "mistral":
        config["sliding_window"] = 32
    if family == "mixtral":
        config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": USED}
    if family == "qwen3_moe":
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": USED, "moe_intermediate_size": EXPERT_WIDTH}
        config["mlp_only_layers"] = [0]
    return config


@pytest.fixture
def hf_model(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """`hf_model(family, dtype, **config)` saves a random model of that family: (its directory, its state dict)."""

    def make(family: str = "llama", dtype: str = "float32", **extra: Any) -> tuple[Path, Any]:
        import torch
        import transformers
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # saving shows a progress bar, whose monitor thread would outlive the test
        kind = family.removesuffix("-bias")
        names = {
            "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral",
            "qwen3_moe": "Qwen3Moe",
        }  # fmt: skip
        torch.manual_seed(7)
        config = getattr(transformers, f"{names[kind]}Config")(**{**tiny_config(family), **extra})
        model = getattr(transformers, f"{names[kind]}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.05)  # biases and norms too
        model = model.to(getattr(torch, dtype))
        directory = tmp_path / f"hf-{family}-{dtype}"
        model.save_pretrained(directory)
        state = model.state_dict()
        if kind in ("mixtral", "qwen3_moe"):  # whose files have other tensors than the modules
            from safetensors.torch import load_file

            state = load_file(directory / "model.safetensors")
        tiny_tokenizer().save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": "<|im_end|>", "chat_template": "{{ messages }}<|im_end|>"})
        )
        return directory, state

    return make


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order that llama.cpp's converter writes for the llama architecture."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def with_experts(
    weights: dict[str, np.ndarray], width: int, layers: range, *, merged: bool = True
) -> dict[str, np.ndarray]:
    """The same with experts in some layers, as one tensor of all or, as in early files, one tensor each."""
    rng = np.random.default_rng(3)
    found = dict(weights)
    for i in layers:
        for part in ("gate", "up", "down"):
            del found[f"blk.{i}.ffn_{part}.weight"]
            shape = (EXPERTS, HIDDEN, width) if part == "down" else (EXPERTS, width, HIDDEN)
            all_of_them = rng.standard_normal(shape).astype(np.float32) * 0.05
            if merged:
                found[f"blk.{i}.ffn_{part}_exps.weight"] = all_of_them
            else:
                found |= {f"blk.{i}.ffn_{part}.{n}.weight": one for n, one in enumerate(all_of_them)}
        found[f"blk.{i}.ffn_gate_inp.weight"] = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32) * 0.05
    return found


def tiny_weights(arch: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of a tiny model by GGUF name, in rotate-half order."""
    rng = np.random.default_rng(seed)
    head_dim = 32 if arch in ("qwen3", "qwen3moe") else HEAD_DIM
    query, key = HEADS * head_dim, KV_HEADS * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (query, HIDDEN),
            "attn_k.weight": (key, HIDDEN),
            "attn_v.weight": (key, HIDDEN),
            "attn_output.weight": (HIDDEN, query),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            "ffn_up.weight": (INTERMEDIATE, HIDDEN),
            "ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
        if arch == "qwen2":
            layer |= {"attn_q.bias": (query,), "attn_k.bias": (key,), "attn_v.bias": (key,)}
        if arch in ("qwen3", "qwen3moe"):
            layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.05 for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    arch: str = "llama",
    kind: str = "F32",
    *,
    weights: dict[str, np.ndarray] | None = None,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
) -> dict[str, np.ndarray]:
    """Write a tiny model, matrices quantized as `kind`; returns its dequantized tensors by name."""
    weights = tiny_weights(arch) if weights is None else weights
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if arch in ("qwen3", "qwen3moe"):
        writer.add_key_length(32)
        writer.add_value_length(32)
    add_tokenizer(writer)
    if edit:
        edit(writer)
    stored: dict[str, np.ndarray] = {}
    for name, value in weights.items():
        wanted = kind if value.ndim > 1 and "ffn_gate_inp" not in name else "F32"
        if arch == "llama" and ("attn_q." in name or "attn_k." in name):
            value = permuted(value, HEADS if "attn_q." in name else KV_HEADS)
        number = gguf.GGMLQuantizationType[wanted]
        data = gguf.quants.quantize(value, number)
        writer.add_tensor(name, data, raw_dtype=number)
        stored[name] = gguf.quants.dequantize(data, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def add_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    """The tiny byte-level tokenizer as GGUF metadata, its unused rest filled with normal tokens."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hel", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = [1] * 258 + [3] * 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e", "he l"])
    writer.add_eos_token_id(260)
    writer.add_bos_token_id(259)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")


@pytest.fixture
def make_gguf() -> Callable[..., dict[str, np.ndarray]]:
    """`write_gguf` as a fixture."""
    return write_gguf


@pytest.fixture
def quiet() -> Callable[[str, int, int], None]:
    """A progress callback that does nothing."""
    return lambda stage, done, total: None


@pytest.fixture
def tiny() -> Callable[..., dict[str, np.ndarray]]:
    """`tiny_weights` as a fixture."""
    return tiny_weights

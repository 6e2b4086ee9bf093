"""transformers' own decoder with the weights of a prepared model: the outside judge of greedy tokens and perplexity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.spec import ModelSpec
from tierd.kernels.packing import WeightFormat, unpack


def config_for(spec: ModelSpec) -> Any:
    """A transformers config that says what `spec` says; families llama and qwen2."""
    from transformers import LlamaConfig, Qwen2Config

    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[spec.family]
    return kind(
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=spec.intermediate,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim, max_position_embeddings=spec.context, rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied, rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
    )


def load_reference(model_dir: Path) -> Any:
    """transformers' model in fp32, its weights unpacked from the prepared records."""
    from transformers import AutoModelForCausalLM

    manifest = load_manifest(model_dir)
    spec = manifest.spec
    data = np.memmap(model_dir / "weights.bin", dtype=np.uint8, mode="r")
    state: dict[str, torch.Tensor] = {}

    def tensors(record: Any) -> dict[str, np.ndarray]:
        return {
            tensor.name: unpack(
                WeightFormat(tensor.format), np.asarray(data[tensor.offset : tensor.offset + tensor.bytes]),
                tensor.rows, tensor.cols,
            ) if tensor.rows > 1 else np.asarray(data[tensor.offset : tensor.offset + 4 * tensor.cols]).view(np.float32)
            for tensor in record.tensors
        }

    for record in manifest.records:
        parts = {name: torch.from_numpy(np.array(value)) for name, value in tensors(record).items()}
        if record.name == "embed":
            state["model.embed_tokens.weight"] = parts["embed"]
        elif record.name == "final":
            state["model.norm.weight"] = parts["final_norm"]
        elif record.name == "head":
            state["lm_head.weight"] = parts["head"]
        else:
            state.update(_layer(int(record.name.split(".")[1]), parts, spec))
    if spec.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = AutoModelForCausalLM.from_config(config_for(spec), dtype=torch.float32, attn_implementation="sdpa")
    model.load_state_dict(state)
    return model.eval()


def _layer(index: int, parts: dict[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    base = f"model.layers.{index}"
    sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
    state = {
        f"{base}.input_layernorm.weight": parts["attn_norm"],
        f"{base}.post_attention_layernorm.weight": parts["mlp_norm"],
        f"{base}.self_attn.o_proj.weight": parts["o"],
        f"{base}.mlp.down_proj.weight": parts["down"],
    }
    for name, part in zip("qkv", parts["qkv"].split(sizes), strict=True):
        state[f"{base}.self_attn.{name}_proj.weight"] = part
    if "qkv_bias" in parts:
        for name, part in zip("qkv", parts["qkv_bias"].reshape(-1).split(sizes), strict=True):
            state[f"{base}.self_attn.{name}_proj.bias"] = part
    gate, up = parts["gate_up"].chunk(2)
    state |= {f"{base}.mlp.gate_proj.weight": gate, f"{base}.mlp.up_proj.weight": up}
    return state

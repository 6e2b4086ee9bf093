"""A tiny random gpt-oss in its three forms: as transformers saves it, as it is published, and as GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import tqdm
import transformers
from safetensors.numpy import save_file

from .conftest import add_tokenizer, tiny_tokenizer

tqdm.tqdm.monitor_interval = 0  # saving a model shows a bar, whose monitor would be a thread left over
LAYERS, HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, USED, VOCAB = 2, 64, 96, 4, 2, 32, 4, 2, 320
MXFP4 = gguf.GGMLQuantizationType.MXFP4
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    **{f"self_attn.{ours}_proj.{kind}": f"attn_{theirs}.{kind}"
       for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")) for kind in ("weight", "bias")},
}  # fmt: skip


def random_model() -> Any:
    """transformers' own class; the weights of experts are numbers of MXFP4."""
    torch.manual_seed(3)
    config = transformers.GptOssConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, num_local_experts=EXPERTS,
        num_experts_per_tok=USED, sliding_window=24, max_position_embeddings=131072,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.GptOssForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.2)
            if name.endswith(("gate_up_proj", "down_proj")):
                rows = np.ascontiguousarray(parameter.swapaxes(1, 2).numpy())
                values = gguf.quants.dequantize(gguf.quants.quantize(rows, MXFP4), MXFP4)
                parameter.copy_(torch.from_numpy(values).swapaxes(1, 2))
    return model


def save(model: Any, directory: Path) -> Path:
    """As transformers does."""
    model.save_pretrained(directory)
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def publish(model: Any, directory: Path) -> Path:
    """As it is on the hub: experts in blocks and scales of MXFP4, and a configuration that says so."""
    save(model, directory)
    state = {}
    for name, value in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            state[name] = value.numpy()
            continue
        rows = np.ascontiguousarray(value.swapaxes(1, 2).numpy())
        blocks = gguf.quants.quantize(rows, MXFP4).reshape(*rows.shape[:2], -1, 17)
        low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
        order = np.concatenate([low, high], -1)  # [experts, rows, groups, 32]
        state[f"{name}_scales"] = np.ascontiguousarray(blocks[..., 0])
        state[f"{name}_blocks"] = order[..., ::2] | order[..., 1::2] << 4
    save_file(state, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write(model: Any, path: Path) -> Path:
    """As llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(LAYERS)
    writer.add_context_length(131072)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(150000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_sliding_window(24)
    add_tokenizer(writer, "gpt-4o")
    for name, value in model.state_dict().items():
        values = value.numpy()
        if "mlp.experts" not in name:
            writer.add_tensor(_gguf_name(name), values)
            continue
        layer, tensor = name.split(".")[2], name.split(".")[-1]
        is_bias = tensor.endswith("bias")
        rows = values if is_bias else np.ascontiguousarray(values.swapaxes(1, 2))
        parts = {"down": rows} if tensor.startswith("down") else {"gate": rows[:, ::2], "up": rows[:, 1::2]}
        for part, one in parts.items():
            target = f"blk.{layer}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}"
            if is_bias:
                writer.add_tensor(target, np.ascontiguousarray(one))
            else:
                writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(one), MXFP4), raw_dtype=MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}"

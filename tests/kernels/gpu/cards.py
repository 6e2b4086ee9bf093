"""Engines on a card that is made of CPU memory, and random models for them."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.daemon.engine.live import Live
from tests.daemon.engine.vocabularies import byte_level
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine import assemble
from tierd.daemon.engine.backend_cuda import CudaBackend
from tierd.daemon.engine.model.card_memory import Card
from tierd.daemon.engine.model.held import HeldWeights
from tierd.daemon.engine.model.weights_card import CardWeights
from tierd.daemon.engine.model.weights_status import WeightsStatus
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.models.catalog import Manifest
from tierd.daemon.models.importer import import_model
from tierd.tiers.blocks import Block
from tierd.tiers.cuda_memory import DeviceBlock, PinnedBlock
from tierd.tiers.mover import Disturbance, Mover

LAYERS, WIDTH, VOCAB, CONTEXT = 4, 32, 320, 64


class Memory:
    """What weights take of the card. `left`: allocations until it is full; None: it never is."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.live: dict[int, int] = {}  # bytes
        self._number = 0

    def __call__(self, size_bytes: int) -> torch.Tensor:
        if self.left is not None:
            if not self.left:
                raise torch.cuda.OutOfMemoryError("out of memory")
            self.left -= 1
        block = np.full(size_bytes, 0xAA, np.uint8)
        self._number += 1
        self.live[self._number] = size_bytes
        weakref.finalize(block, self.live.pop, self._number)
        return torch.from_numpy(block)


class FakeCard(CudaBackend):
    """Kernels under the interpreter; copies are late, in any order, and poison what they fill."""

    def __init__(
        self, gpu: FakeGpu, note: Callable[[str], None], memory: Memory | None = None, threads: int = 0
    ) -> None:
        super().__init__(
            gpu, note, threads=threads, device=torch.device("cpu"), capture=lambda _device: None, allocate=memory
        )

    def mover(self, wake: Callable[[], None]) -> Mover:
        before = Disturbance(1, 0.001, fill=self._copies.poison)
        return Mover(3, wake=wake, copy=self._copies.copy, crossing=self._copies, before=before)

    def device_block(self, size_bytes: int, max_bytes: int) -> Block:
        self._blocks.append(DeviceBlock(self._gpu, size_bytes, size_bytes, chunk_bytes=1 << 16))
        return self._blocks[-1]

    def host_block(self, size_bytes: int, max_bytes: int, record_bytes: int) -> Block:
        self._blocks.append(PinnedBlock(self._gpu, size_bytes, size_bytes, record_bytes))
        return self._blocks[-1]


class ExactCard(FakeCard):
    """Activations of 32 bits: what the CPU says, but for the order of sums."""

    copy_format = "fp32"

    def weights(
        self, config: EngineConfig, manifest: Manifest, max_rows: int, mover: Mover,
        progress: Callable[[int, int], None],
    ) -> HeldWeights:  # fmt: skip
        card = Card(self._gpu, self._compute, self._device, torch.float32, None)
        return CardWeights(Path(config.model_dir), manifest, config.weights_bytes, None, card, mover, progress)


def prepared(directory: Path, format: str, layers: int = LAYERS, context: int = CONTEXT, **more: Any) -> Path:
    """A random model as it was imported; `more`: of its config.json."""
    source, models = directory / "source", directory / "models"
    source.mkdir()
    models.mkdir()
    write_llama(source, {"num_hidden_layers": layers, "max_position_embeddings": context, **more})
    import_model(source, models, "tiny", format, lambda _stage, _done, _total: None)
    return models / "tiny"


def write_llama(directory: Path, more: dict[str, Any]) -> None:
    """It as transformers would save it, which is slow to import."""
    config: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": WIDTH,
        "intermediate_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "silu",
        **more,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    byte_level()._tokenizer.save(str(directory / "tokenizer.json"))
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)
    }  # fmt: skip
    size = config["head_dim"]
    attended = 2 * size
    for layer in range(config["num_hidden_layers"]):
        heads = (("q", attended, WIDTH), ("k", size, WIDTH), ("v", size, WIDTH), ("o", WIDTH, attended))
        for name, rows, cols in heads:
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (rows, cols)
            if config["attention_bias"]:
                shapes[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = (rows,)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in mlp_shapes(config, layer).items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (WIDTH,)
    tensors = {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")


def mlp_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """What follows attention in a layer: dense, or a mixture, by the names of each family."""
    count = config.get("num_local_experts", 0)
    if config["model_type"] == "mixtral":
        inside = "block_sparse_moe"
        experts = {
            f"{inside}.experts.{n}.{name}.weight": (WIDTH, WIDTH) for n in range(count) for name in ("w1", "w2", "w3")
        }
        return {f"{inside}.gate.weight": (count, WIDTH), **experts}
    if config["model_type"] == "gpt_oss":
        return {
            "self_attn.sinks": (2,), "mlp.router.weight": (count, WIDTH), "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, WIDTH, 2 * WIDTH), "mlp.experts.gate_up_proj_bias": (count, 2 * WIDTH),
            "mlp.experts.down_proj": (count, WIDTH, WIDTH), "mlp.experts.down_proj_bias": (count, WIDTH),
            "self_attn.o_proj.bias": (WIDTH,),
        }  # fmt: skip
    dense = {f"{name}_proj.weight": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
    norms: dict[str, tuple[int, ...]] = {}
    if config["model_type"] == "qwen3_moe":
        norms = {f"self_attn.{name}_norm.weight": (config["head_dim"],) for name in ("q", "k")}
        if layer not in config["mlp_only_layers"]:
            count = config["num_experts"]
            experts = {f"mlp.experts.{n}.{name}": shape for n in range(count) for name, shape in dense.items()}
            return {"mlp.gate.weight": (count, WIDTH), **experts, **norms}
    return {f"mlp.{name}": shape for name, shape in dense.items()} | norms


def live_on_card(
    monkeypatch: pytest.MonkeyPatch, work: Path, model: Path, memory: Memory | None = None, gpu: FakeGpu | None = None,
    processors: int = 0, **sizes: Any,
) -> Live:  # fmt: skip
    """A whole engine that computes on a `FakeCard`, which has this memory."""

    def card(_threads: int, note: Callable[[str], None], *_: object) -> FakeCard:
        return FakeCard(gpu or FakeGpu(3), note, memory, processors)

    monkeypatch.setattr(assemble, "choose", card)
    return Live(model, work, device=4, host=2, nvme=0, kv_format="bf16", max_batch_rows=8, max_streams=2, **sizes)


def weights_of(running: Live) -> WeightsStatus:
    """What an engine's weights say."""
    found: WeightsStatus = running.engine.loop.call(running.engine.weights.statistics).result(10)
    return found

"""A tiny model whose weights lie on a card made of CPU memory, and passes over them without an engine."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.daemon.engine.vocabularies import byte_level
from tests.kernels.gpu.cases import aligned
from tests.tiers.fake_gpu import FakeGpu
from tierd.daemon.engine.batch import Batch
from tierd.daemon.engine.model import rope
from tierd.daemon.engine.model.card_memory import Card
from tierd.daemon.engine.model.weights_card import CardWeights
from tierd.daemon.engine.runner import Runner
from tierd.daemon.models.catalog import load_manifest
from tierd.daemon.models.importer import import_model
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.models.placement_card import place_on_card
from tierd.kernels.gpu.decoder import GpuDecoder
from tierd.kernels.layout import PageLayout
from tierd.tiers.mover import Disturbance, Mover

LAYERS, WIDTH, VOCAB = 4, 32, 320


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


def prepared(directory: Path, format: str) -> Path:
    source, models = directory / "source", directory / "models"
    source.mkdir()
    models.mkdir()
    write_llama(source)
    import_model(source, models, "tiny", format, lambda _stage, _done, _total: None)
    return models / "tiny"


def write_llama(directory: Path) -> None:
    """A random model as transformers would save it, which is slow to import."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": WIDTH,
        "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    byte_level()._tokenizer.save(str(directory / "tokenizer.json"))
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)
    }  # fmt: skip
    for layer in range(LAYERS):
        for name, rows in (("q", 32), ("k", 16), ("v", 16), ("o", WIDTH)):
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (rows, WIDTH)
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = (rows,)
        for name in ("gate", "up", "down"):
            shapes[f"model.layers.{layer}.mlp.{name}_proj.weight"] = (WIDTH, WIDTH)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (WIDTH,)
    tensors = {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")


class Bench:
    """Passes of one row over weights of a card, without an engine around them."""

    def __init__(self, model: Path, device_bytes: int | None, host_bytes: int | None, seed: int = 5) -> None:
        self.gpu, self.memory = FakeGpu(seed), Memory()
        self.manifest = load_manifest(model)
        spec = self.manifest.spec
        self.mover = Mover(3, before=Disturbance(seed, 0.001))
        card = Card(self.gpu, self.gpu.new_stream(), torch.device("cpu"), torch.bfloat16, None, self.memory)
        self.weights = CardWeights(
            model, self.manifest, device_bytes, host_bytes, card, self.mover, lambda _done, _total: None
        )
        layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, "bf16")
        tables = rope.tables(rope.frequencies(spec, 16), 16)
        self.decoder = GpuDecoder(
            self.weights.shape, self.weights.layers, self.weights.ends, layout, *tables, 8, torch.bfloat16,
            embed_rows=self.weights.embed_rows if self.weights.ends.embed is None else None,
        )  # fmt: skip
        self.weights.attach(self.decoder)
        self.page = aligned(layout.record_bytes, torch.uint8).numpy()
        self.runner = Runner(self.decoder, layout, [self.page], weights=self.weights)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.weights.close()
        self.mover.close()
        # A real card has copies; this one, whose memory is the computer's, has views of what it was loaded from.
        del self.decoder, self.runner
        gc.collect()  # arrays that are registered as long as they live
        assert not self.gpu.registered and not self.memory.live
        assert not self.gpu.events and len(self.gpu.lanes) == 1  # that computes

    def step(self, token: int, position: int) -> np.ndarray:
        one, zero = np.array([token], np.int32), np.zeros(1, np.int32)
        where = np.array([self.page.ctypes.data], np.int64)
        return self.runner.run(
            Batch(one, np.array([position], np.int32), zero, where, np.array([0, 1], np.int32), zero)
        )


def least_bytes(model: Path, **more: bool) -> int:
    with pytest.raises(DoesNotFit) as caught:
        place_on_card(load_manifest(model), 1, None, **more)
    return caught.value.needed_bytes

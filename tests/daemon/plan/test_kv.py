"""The calculator of keys and values against figures that are known."""

from __future__ import annotations

import pytest

from tierd.daemon.plan.from_config import shape_from_config
from tierd.daemon.plan.known import known_shape
from tierd.daemon.plan.kv import (
    ENGINE_FORMATS,
    KV_FORMATS,
    context_bytes,
    page_bytes,
    paged_bytes,
    state_bytes,
    token_bytes,
)
from tierd.daemon.plan.shape import Cache, Layer, Shape
from tierd.kernels.layout import PageLayout

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def plain(layers: int, elements: int, window: int = 0) -> Shape:
    """Layers that keep `elements` numbers of keys and as many of values."""
    layer = Layer(Cache(elements, elements, window), (), ())
    return Shape("plain", "plain", (layer,) * layers, 64, 64, 1, 64, 8192, True)


def test_llama_3_8b() -> None:
    shape = known_shape("llama-3-8b")
    assert token_bytes(shape, "bf16") == 128 * KIB
    assert context_bytes(shape, 8192, "bf16") == GIB


def test_llama_3_70b() -> None:
    shape = known_shape("llama-3-70b")
    assert token_bytes(shape, "bf16") == 320 * KIB
    assert context_bytes(shape, 128 * 1024, "bf16") == 40 * GIB
    assert context_bytes(shape, 1500, "bf16") == 468.75 * MIB


def test_multi_head_attention_of_65b_size() -> None:
    # 80 layers of 64 heads of 128, in fp16 at 4,096 tokens: 10.7 GB.
    assert context_bytes(plain(80, 64 * 128), 4096, "fp16") == 10_737_418_240


def test_multi_query_attention_keeps_one_head() -> None:
    config = {
        "model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
        "intermediate_size": 18176, "vocab_size": 65024, "multi_query": True,
    }  # fmt: skip
    shape = shape_from_config(config, "falcon-7b")
    assert token_bytes(shape, "bf16") == 32 * 2 * 64 * 2


def test_latent_attention_keeps_one_vector_of_all_heads() -> None:
    # DeepSeek-V2-Lite: 512 + 64 numbers a token and layer, where 16 heads of 128 + 192 would be 5,120.
    assert token_bytes(known_shape("deepseek-v2-lite"), "bf16") == 27 * (512 + 64) * 2


def test_a_window_stays_constant() -> None:
    shape = plain(32, 1024, window=4096)
    full = context_bytes(shape, 4096, "bf16")
    assert context_bytes(shape, 4095, "bf16") < full
    assert context_bytes(shape, 131072, "bf16") == context_bytes(shape, 4097, "bf16") == full
    assert context_bytes(known_shape("mistral-7b"), 32768, "bf16") == 4096 * 128 * KIB


def test_hybrid_layers_grow_only_where_they_see_all() -> None:
    shape = known_shape("gpt-oss-20b")  # every other of 24 layers sees 128 tokens
    layer = 2 * 8 * 64 * 2
    assert context_bytes(shape, 131072, "bf16") == 12 * layer * 131072 + 12 * layer * 128
    gemma = known_shape("gemma-3-12b")
    assert [layer.cache.window for layer in gemma.layers[:7]] == [1024] * 5 + [0, 1024]


def test_layers_with_a_state_take_the_same_for_any_length() -> None:
    config = {
        "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, "vocab_size": 151936,
        "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
    }  # fmt: skip
    shape = shape_from_config(config, "qwen3-next-80b")
    assert token_bytes(shape, "bf16") == 12 * 2 * 2 * 256 * 2
    state = 36 * (32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 3)
    assert state_bytes(shape, "bf16") == state * 2
    assert context_bytes(shape, 1000, "bf16") == 1000 * token_bytes(shape, "bf16") + state * 2
    assert shape.parameters == pytest.approx(80e9, rel=0.02)


def test_int4_keys_with_int8_values_against_fp16() -> None:
    shape = plain(1, 1024)
    bits = KV_FORMATS["k4v8"]
    assert (bits.key_bits + bits.value_bits) / 32 == 0.375  # the numbers alone
    # With an fp16 scale for 32 numbers, a minimum for the 4-bit ones, and a 16th of an fp16 anchor for keys.
    assert token_bytes(shape, "k4v8") / token_bytes(shape, "fp16") == (6 + 8.5) / 32


@pytest.mark.parametrize("format", ENGINE_FORMATS)
def test_pages_are_those_of_the_engine(format: str) -> None:
    shape = known_shape("smollm2-135m")
    layout = PageLayout(30, 3, 64, format)
    assert page_bytes(shape, format) == layout.record_bytes
    assert paged_bytes(shape, 17, format) == 2 * layout.record_bytes


def test_pages_of_other_formats_follow_the_same_rule() -> None:
    assert page_bytes(plain(3, 1000), "fp16") == -(-16 * 3 * 2 * 1000 * 2 // 4096) * 4096

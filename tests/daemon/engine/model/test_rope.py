"""Tables against transformers' own rotary class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tierd.daemon.engine.model import rope
from tierd.daemon.models.spec import ModelSpec, RopeSpec

CONTEXT = 4096


def spec(rope_spec: RopeSpec, head_dim: int = 64, context: int = CONTEXT) -> ModelSpec:
    return ModelSpec(
        family="llama", num_layers=1, hidden=4 * head_dim, intermediate=8, heads=4, kv_heads=2, head_dim=head_dim,
        vocab=8, context=context, norm_eps=1e-5, tied=True, rope=rope_spec,
    )  # fmt: skip


def theirs(parameters: dict[str, Any], head_dim: int, context: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
        max_position_embeddings=context, rope_parameters=parameters,
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    half = head_dim // 2
    return cos[0, :, :half].numpy(), sin[0, :, :half].numpy()


KINDS = {
    "default": (RopeSpec(theta=100000.0), {"rope_type": "default", "rope_theta": 100000.0}),
    "linear": (RopeSpec(kind="linear", factor=4.0), {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "dynamic": (RopeSpec(kind="dynamic", factor=2.0), {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
    "llama3": (
        RopeSpec(
            theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=1024
        ),
        {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
        },
    ),
    "yarn": (
        RopeSpec(theta=1000000.0, kind="yarn", factor=4.0, original_context=1024),
        {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    "yarn with its own numbers": (
        RopeSpec(kind="yarn", factor=4.0, original_context=1024, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
        {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
            "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_transformers(kind: str, head_dim: int) -> None:
    ours, parameters = KINDS[kind]
    cos, sin = rope.tables(rope.frequencies(spec(ours, head_dim), CONTEXT), CONTEXT)
    their_cos, their_sin = theirs(parameters, head_dim, CONTEXT, CONTEXT)
    assert cos.dtype == np.float32 and cos.shape == (CONTEXT, head_dim // 2) and cos.flags.c_contiguous
    # One rounding of a frequency (6e-8) at position 4,095, and one of the result.
    np.testing.assert_allclose(cos, their_cos, atol=6e-4)
    np.testing.assert_allclose(sin, their_sin, atol=6e-4)
    np.testing.assert_allclose(cos[:256], their_cos[:256], atol=4e-5)
    assert np.mean(np.abs(cos - their_cos)) < 1e-5


def test_dynamic_beyond_the_trained_context() -> None:
    ours, parameters = KINDS["dynamic"]
    length = 2 * CONTEXT
    cos, _ = rope.tables(rope.frequencies(spec(ours), length), length)
    their_cos, _ = theirs(parameters, 64, CONTEXT, length)
    np.testing.assert_allclose(cos, their_cos, atol=2e-3)


def test_contexts_the_scaling_covers() -> None:
    assert rope.max_context(spec(RopeSpec())) == CONTEXT
    assert rope.max_context(spec(KINDS["yarn"][0])) == CONTEXT
    assert rope.max_context(spec(RopeSpec(kind="yarn", factor=4.0, original_context=CONTEXT))) == 4 * CONTEXT
    assert rope.max_context(spec(KINDS["dynamic"][0])) == 2 * CONTEXT


def test_other_frequencies_have_another_digest() -> None:
    digests = {rope.frequencies(spec(ours), CONTEXT).describe() for ours, _ in KINDS.values()}
    assert len(digests) == len(KINDS)  # dynamic inside its context differs from default here by theta


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="longrope"):
        rope.frequencies(spec(RopeSpec(kind="longrope")), CONTEXT)


def test_angles_of_any_position_are_those_of_the_tables() -> None:
    freqs = rope.frequencies(spec(RopeSpec(theta=10000.0)), CONTEXT)
    positions = np.array([0, 1, 77, CONTEXT - 1], np.int32)
    for table, angles in zip(rope.tables(freqs, CONTEXT), rope.angles(freqs, positions), strict=True):
        assert np.abs(table[positions] - angles).max() < 1e-3  # phases of tables are float32


def test_angles_far_out_differ_from_position_to_position() -> None:
    freqs = rope.frequencies(spec(RopeSpec(theta=10000.0)), CONTEXT)
    far = np.array([1 << 29, (1 << 29) + 1], np.int32)
    cos, sin = rope.angles(freqs, far)
    turned = np.arctan2(sin[1], cos[1]) - np.arctan2(sin[0], cos[0])
    assert np.abs((turned - freqs.inverse + np.pi) % (2 * np.pi) - np.pi).max() < 1e-5

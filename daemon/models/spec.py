"""What a decoder looks like: the frozen description every other room reads."""

from __future__ import annotations

import msgspec


class RopeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rotary position parameters. `kind`: default, linear, dynamic, llama3, yarn (names as in config.json)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder-only transformer of the Llama, Mistral, Qwen2 or Qwen3 kind."""

    family: str  # llama | mistral | qwen2 | qwen3
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int  # tokens the model was trained for
    norm_eps: float
    tied: bool  # the head is the embedding
    rope: RopeSpec = RopeSpec()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()  # sliding window per layer in tokens, 0 = full; empty = full everywhere
    dtype: str = "bfloat16"  # what the weights were published in

    @property
    def parameters(self) -> int:
        """Numbers in the weights: what the size in a model's name counts. Biases and norms are left out."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (2 * queries + 2 * keys) + 3 * self.hidden * self.intermediate
        return self.num_layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)

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
    truncate: bool = True  # yarn: its ramp begins and ends at whole dimensions


class ExpertsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers whose second half is a mixture: a router sends each token through `used` of `count` small MLPs.

    `renormalized`: the probabilities of those add up to one; otherwise they are those among all experts. `bias`:
    routers and experts have biases. `limit` and `slope`: of gpt-oss' gate, clamped (kernels/cpu/ops.py); 0 for silu.
    """

    count: int
    used: int
    intermediate: int  # of each expert
    renormalized: bool
    layers: tuple[int, ...]  # which ones, ascending; the others are dense
    bias: bool = False
    limit: float = 0.0
    slope: float = 0.0

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return self.count * len(self.layers)


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder-only transformer of the Llama, Mistral, Qwen2, Qwen3 or gpt-oss kind, dense or with experts."""

    family: str  # llama | mistral | qwen2 | qwen3 | mixtral | qwen3_moe | gpt_oss
    num_layers: int
    hidden: int
    intermediate: int  # of a dense layer
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
    experts: ExpertsSpec | None = None  # of a mixture
    sink_logits: bool = False  # one a head, learned: it counts in attention like a token without a value

    @property
    def parameters(self) -> int:
        """Numbers in the weights: what the size in a model's name counts. Biases and norms are left out."""
        return self._parameters(self.experts.count if self.experts is not None else 0)

    @property
    def active_parameters(self) -> int:
        """Those of them that one token goes through."""
        return self._parameters(self.experts.used if self.experts is not None else 0)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer is a mixture."""
        return self.experts is not None and layer in self.experts.layers

    def _parameters(self, experts: int) -> int:
        """With so many experts in each layer that has them."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        total = self.num_layers * self.hidden * (2 * queries + 2 * keys)
        total += self.vocab * self.hidden * (1 if self.tied else 2)
        if self.experts is None:
            return total + self.num_layers * 3 * self.hidden * self.intermediate
        mixtures, width = len(self.experts.layers), self.experts.intermediate
        total += (self.num_layers - mixtures) * 3 * self.hidden * self.intermediate
        return total + mixtures * self.hidden * (self.experts.count + experts * 3 * width)

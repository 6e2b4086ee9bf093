"""The shape of a model as the planner sees it: what each layer keeps of a token, and the matrices it multiplies with.

Wider than `ModelSpec`: it also describes models that tierd does not run (latent attention, experts, layers with a fixed
state), so that their figures can be told from a `config.json` alone. Counts are of elements; bytes are for `kv` and
`weights`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tierd.daemon.models.spec import ModelSpec


class Cache(msgspec.Struct, frozen=True):
    """What one layer keeps of a sequence.

    Args:
        key_elements: of each token. Multi-head, grouped and multi-query attention: kv_heads x head_dim. Latent
            attention (MLA, DeepSeek-V2, arXiv 2405.04434) keeps one vector: its rank and the rotated part.
        value_elements: of each token; 0 for latent attention, whose values come from the same vector.
        window: tokens that the layer looks back over, itself included; 0: all. Older ones need not be kept.
        state_elements: of the whole sequence, however long it is (state-space and linear attention layers).
    """

    key_elements: int = 0
    value_elements: int = 0
    window: int = 0
    state_elements: int = 0

    def tokens_kept(self, tokens: int) -> int:
        """Tokens of a sequence of `tokens` that this layer still needs."""
        return min(tokens, self.window) if self.window else tokens


class Matrix(msgspec.Struct, frozen=True):
    """A weight matrix. `copies`: how many of its kind the layer has (experts); `used`: those a token goes through.

    `exact`: fp32 in every weight format.
    """

    name: str
    rows: int
    cols: int
    copies: int = 1
    used: int = 1
    exact: bool = False

    @property
    def elements(self) -> int:
        """Of all copies."""
        return self.rows * self.cols * self.copies


class Layer(msgspec.Struct, frozen=True):
    """One decoder layer. `vectors`: lengths of its norms and biases; `expert_vectors`: of the biases of each expert."""

    cache: Cache
    matrices: tuple[Matrix, ...]
    vectors: tuple[int, ...]
    expert_vectors: tuple[int, ...] = ()

    @property
    def experts(self) -> int:
        """How many it has."""
        return max((matrix.copies for matrix in self.matrices if matrix.copies > 1), default=0)

    @property
    def elements(self) -> int:
        """Parameters of the layer."""
        vectors = sum(self.vectors) + self.experts * sum(self.expert_vectors)
        return sum(matrix.elements for matrix in self.matrices) + vectors

    @property
    def used_elements(self) -> int:
        """Matrix elements that one token is multiplied with."""
        return sum(matrix.rows * matrix.cols * matrix.used for matrix in self.matrices)


class Shape(msgspec.Struct, frozen=True):
    """A decoder-only model.

    `heads` and `head_dim` are those of the queries: attention computes with them, whatever it keeps. `spec` is there
    for the architectures that tierd runs.
    """

    name: str
    family: str
    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    heads: int
    head_dim: int
    context: int
    tied: bool
    dtype: str = "bfloat16"
    spec: ModelSpec | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def parameters(self) -> int:
        """All weights, embedding and head included; a tied head counts once."""
        return sum(layer.elements for layer in self.layers) + self.hidden + self.vocab * self.hidden * (2 - self.tied)

    @property
    def layer_elements(self) -> int:
        """Matrix elements that one token is multiplied with in all layers."""
        return sum(layer.used_elements for layer in self.layers)

    @property
    def head_elements(self) -> int:
        """Matrix elements of the head."""
        return self.vocab * self.hidden

    def attended_tokens(self, tokens: int) -> int:
        """Tokens that a token at position `tokens` looks at, summed over the layers."""
        return sum(layer.cache.tokens_kept(tokens) for layer in self.layers if layer.cache.key_elements)


def shape_from_spec(spec: ModelSpec, name: str = "") -> Shape:
    """The shape of a model that tierd runs."""
    windows = spec.windows or (0,) * spec.num_layers
    layers = tuple(_layer(spec, index, window) for index, window in enumerate(windows))
    return Shape(
        name=name or spec.family,
        family=spec.family,
        layers=layers,
        hidden=spec.hidden,
        vocab=spec.vocab,
        heads=spec.heads,
        head_dim=spec.head_dim,
        context=spec.context,
        tied=spec.tied,
        dtype=spec.dtype,
        spec=spec,
    )


def _layer(spec: ModelSpec, index: int, window: int) -> Layer:
    key, query = spec.kv_heads * spec.head_dim, spec.heads * spec.head_dim
    matrices = (Matrix("qkv", query + 2 * key, spec.hidden), Matrix("o", spec.hidden, query), *_mlp(spec, index))
    biases: tuple[int, ...] = ()
    if spec.experts is not None and spec.experts.bias and spec.has_experts(index):
        biases = (2 * spec.experts.intermediate, spec.hidden)
    return Layer(Cache(key, key, window), matrices, tuple(_vectors(spec, index, query + 2 * key)), biases)


def _mlp(spec: ModelSpec, index: int) -> tuple[Matrix, ...]:
    experts = spec.experts
    if experts is None or not spec.has_experts(index):
        return (
            Matrix("gate_up", 2 * spec.intermediate, spec.hidden), Matrix("down", spec.hidden, spec.intermediate),
        )  # fmt: skip
    return (
        Matrix("router", experts.count, spec.hidden, exact=True),
        Matrix("gate_up", 2 * experts.intermediate, spec.hidden, experts.count, experts.used),
        Matrix("down", spec.hidden, experts.intermediate, experts.count, experts.used),
    )


def _vectors(spec: ModelSpec, index: int, qkv_rows: int) -> Iterator[int]:
    yield spec.hidden
    yield spec.hidden
    if spec.qkv_bias:
        yield qkv_rows
    if spec.qk_norm:
        yield spec.head_dim
        yield spec.head_dim
    if spec.o_bias:
        yield spec.hidden
    if spec.sink_logits:
        yield spec.heads
    if spec.has_experts(index):
        if spec.experts is not None and spec.experts.bias:
            yield spec.experts.count
    elif spec.mlp_bias:
        yield 2 * spec.intermediate
        yield spec.hidden

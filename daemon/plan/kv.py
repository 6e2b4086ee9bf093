"""The memory calculator's half about keys and values: bytes per token, page and context, for any shape and format.

Two kinds of figures. What the numbers alone take (`token_bytes`, `context_bytes`): layers with a window keep no more
than the window, layers with a state keep the same for any length. And what tierd's pages take (`page_bytes`,
`paged_bytes`): whole records of 16 tokens of all layers, padded to 4096 bytes, `kernels.layout` being the authority.
"""

from __future__ import annotations

from typing import NamedTuple

from tierd.daemon.plan.shape import Shape
from tierd.kernels.layout import PAGE_FORMATS, PAGE_TOKENS, PageLayout


class KvFormat(NamedTuple):
    """Bits of an element of the keys and of the values, and of what each group of `group` elements has beside them:
    scale, minimum, and the share of a token in its page's anchor (see `kernels.layout`)."""

    key_bits: int
    value_bits: int
    key_scale_bits: int = 0
    value_scale_bits: int = 0
    group: int = 32

    def layer_bits(self, key_elements: int, value_elements: int) -> int:
        """Bits of one token in one layer; a group that is not full has its scales all the same."""
        bits = key_elements * self.key_bits + value_elements * self.value_bits
        bits += -(-key_elements // self.group) * self.key_scale_bits
        return bits + -(-value_elements // self.group) * self.value_scale_bits


_INT8_SCALE_BITS = 16  # fp16 scale
_INT4_SCALE_BITS = 32  # fp16 scale and minimum
_ANCHOR_BITS = 16 * 32 // PAGE_TOKENS  # the fp16 key that a page's 16 tokens share, for each token and 32 channels
KV_FORMATS: dict[str, KvFormat] = {
    "fp32": KvFormat(32, 32),
    "fp16": KvFormat(16, 16),
    "bf16": KvFormat(16, 16),
    "fp8": KvFormat(8, 8),
    "k8v8": KvFormat(8, 8, _INT8_SCALE_BITS + _ANCHOR_BITS, _INT8_SCALE_BITS),
    "k8v4": KvFormat(8, 4, _INT8_SCALE_BITS + _ANCHOR_BITS, _INT4_SCALE_BITS),
    "k4v8": KvFormat(4, 8, _INT4_SCALE_BITS + _ANCHOR_BITS, _INT8_SCALE_BITS),
    "k4v4": KvFormat(4, 4, _INT4_SCALE_BITS + _ANCHOR_BITS, _INT4_SCALE_BITS),
}
ENGINE_FORMATS = tuple(PAGE_FORMATS)  # those that pages of the CPU backend come in


def token_bytes(shape: Shape, format: str) -> int:
    """Bytes that one more token takes, while every window still has room."""
    return context_bytes(shape, 1, format) - state_bytes(shape, format)


def state_bytes(shape: Shape, format: str) -> int:
    """Bytes that a sequence takes however short it is: the states of recurrent layers, kept in fp32 below 16 bits."""
    bits = max(KV_FORMATS[format].key_bits, 16)
    return sum(layer.cache.state_elements for layer in shape.layers) * bits // 8


def context_bytes(shape: Shape, tokens: int, format: str) -> int:
    """Bytes of a sequence of `tokens` tokens, windows and states included, without padding."""
    kind = KV_FORMATS[format]
    bits = sum(
        layer.cache.tokens_kept(tokens) * kind.layer_bits(layer.cache.key_elements, layer.cache.value_elements)
        for layer in shape.layers
    )
    return -(-bits // 8) + state_bytes(shape, format)


def page_bytes(shape: Shape, format: str, page_tokens: int = PAGE_TOKENS) -> int:
    """Bytes of a page record. For the formats of the engine exactly those of `PageLayout`, else by the same rule."""
    if format in ENGINE_FORMATS and shape.spec is not None:
        spec = shape.spec
        return PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, format, page_tokens).record_bytes
    kind = KV_FORMATS[format]
    bits = sum(
        kind.layer_bits(page_tokens * layer.cache.key_elements, page_tokens * layer.cache.value_elements)
        for layer in shape.layers
    )
    return -(-bits // 8 // 4096) * 4096


def pages_for(tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_tokens)


def paged_bytes(shape: Shape, tokens: int, format: str) -> int:
    """Bytes of the pages of a sequence. A page holds all layers, so a window spares no memory here."""
    return pages_for(tokens) * page_bytes(shape, format) + state_bytes(shape, format)

"""Page geometry: the only place that knows where a key or a value lies inside a page record.

A record holds `page_tokens` tokens of all layers, keys and values, in one contiguous piece of memory with the same
bytes in every tier: `[layer][K|V][kv_head]`, then `[head_dim][token]` for keys and `[token][head_dim]` for values. With
tokens innermost, scores of a page's 16 tokens are two vectors that walk along the head dimension, without a sum across
lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_TOKENS = 16
ALIGN_BYTES = 4096  # O_DIRECT and mmap both want page-aligned records

_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of one page record. Element formats: `fp32`, `fp16`, `bf16`.

    Raises ValueError for a format it does not know or a count that is not positive.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    format: str = "fp32"
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        if self.format not in _ELEMENT_BYTES:
            raise ValueError(f"unknown page format {self.format!r}; known: {', '.join(sorted(_ELEMENT_BYTES))}")
        for name in ("num_layers", "kv_heads", "head_dim", "page_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def element_bytes(self) -> int:
        """Bytes of one key or value element."""
        return _ELEMENT_BYTES[self.format]

    @property
    def head_elements(self) -> int:
        """Elements from one kv head to the next."""
        return self.page_tokens * self.head_dim

    @property
    def plane_elements(self) -> int:
        """Elements from the keys of a layer to its values."""
        return self.kv_heads * self.head_elements

    @property
    def layer_elements(self) -> int:
        """Elements from one layer to the next."""
        return 2 * self.plane_elements

    @property
    def layer_bytes(self) -> int:
        """Bytes from one layer to the next: the slice of a record that one layer reads and writes."""
        return self.layer_elements * self.element_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes that carry keys and values."""
        return self.num_layers * self.layer_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a record in every tier: the payload rounded up to `ALIGN_BYTES`."""
        return -(-self.payload_bytes // ALIGN_BYTES) * ALIGN_BYTES

    def describe(self) -> str:
        """A stable text of every field, for digests: two layouts share pages only if these are equal."""
        return f"{self.num_layers}.{self.kv_heads}.{self.head_dim}.{self.format}.{self.page_tokens}"

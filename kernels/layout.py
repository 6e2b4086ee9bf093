"""Page geometry: the only place that knows where a key or a value lies inside a page record.

A record holds `page_tokens` tokens of all layers, keys and values, in one contiguous piece of memory with the same
bytes in every tier: `[layer]`, then the keys of every kv head, then the values of every kv head. With T tokens and D
channels (the head dimension), one head of one layer is

    exact formats (fp32, fp16, bf16) and fp8 (e4m3, clamped to +-448, no scale)
        keys     element [D][T]
        values   element [T][D]

    packed formats k8v8, k8v4, k4v8, k4v4: keys as int8 or int4, values as int8 or int4; G channels share a scale
        keys     codes  [D][T]      int8, or 4 bits
                 scales [D/G][T]    fp16
                 minima [D/G][T]    fp16, only for 4 bits
                 anchor [D]         fp16
        values   codes  [T][D]      int8, or 4 bits
                 scales [D/G][T]    fp16
                 minima [D/G][T]    fp16, only for 4 bits

16 codes of 4 bits that follow each other are 8 bytes: byte i holds code i in its low and code i + 8 in its high half.
With tokens innermost, scores of a page's 16 tokens are two vectors that walk along the head dimension, without a sum
across lanes; and the scales of a group are such vectors as well.

**What the codes mean.** Every token is packed once, from itself and its page's first token, so that a page may be
filled token by token and read half full. Group g is channels gG to gG + G - 1, s and m are its scale and minimum.

    values   x[d, t] = v[t, d]
    keys     k' = H k                 H: Walsh-Hadamard in blocks of `rotation` channels, 1/sqrt(rotation) included;
                                      queries are turned alike, which leaves q . k as it is, and spreads out channels
                                      that stick out over the others
             anchor[d] = fp16(k'[d, 0])       the first token of the page
             x[d, t] = k'[d, t] - anchor[d]   the difference takes out what all keys of a page share
    int8     x[d, t] ~ code * s[g, t]             s = fp16(max |x| / 127)
    4 bits   x[d, t] ~ code * s[g, t] + m[g, t]   m = fp16(min x), s = fp16((max x - min x) / 15), max and min of x

A code is x / s, or (x - m) / s, rounded to nearest (ties to even) and held within -127..127, or 0..15; with s = 0 it is
0. A group with a NaN or an infinity among its x has no finite scale, so that everything computed from it shows that.
Why these and no others: docs/kernels.md, "Packed pages".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PAGE_TOKENS = 16
ALIGN_BYTES = 4096  # O_DIRECT and mmap both want page-aligned records
GROUP_CHANNELS = 32
_SCALE_BYTES = 2  # fp16: scales, minima and anchors
_CHUNK = 16  # codes of 4 bits come in chunks of so many


class PageFormat(NamedTuple):
    """Bits of an element of the keys and of the values. `packed`: codes with scales, keys turned and with an anchor."""

    key_bits: int
    value_bits: int
    packed: bool = False


PAGE_FORMATS = {
    "fp32": PageFormat(32, 32),
    "fp16": PageFormat(16, 16),
    "bf16": PageFormat(16, 16),
    "fp8": PageFormat(8, 8),
    "k8v8": PageFormat(8, 8, packed=True),
    "k8v4": PageFormat(8, 4, packed=True),
    "k4v8": PageFormat(4, 8, packed=True),
    "k4v4": PageFormat(4, 4, packed=True),
}


class HeadSections(NamedTuple):
    """Where the parts of one head's keys, or values, begin: bytes from where the head begins. -1: no such part."""

    codes: int
    scales: int
    minima: int
    anchor: int
    stop: int  # bytes from one head to the next


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of one page record in one of `PAGE_FORMATS`.

    Raises ValueError for a format it does not know, a count that is not positive, and for packed formats a head
    dimension or page that does not come in chunks of 16.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    format: str = "fp32"
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        if self.format not in PAGE_FORMATS:
            raise ValueError(f"unknown page format {self.format!r}; known: {', '.join(PAGE_FORMATS)}")
        for name in ("num_layers", "kv_heads", "head_dim", "page_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.packed and (self.head_dim % _CHUNK or self.page_tokens % _CHUNK):
            raise ValueError(
                f"page format {self.format} takes heads of a multiple of {_CHUNK} elements and pages of a multiple of "
                f"{_CHUNK} tokens, got {self.head_dim} and {self.page_tokens}"
            )

    @property
    def packed(self) -> bool:
        """Whether keys and values are codes with scales."""
        return PAGE_FORMATS[self.format].packed

    @property
    def rotation(self) -> int:
        """Channels of a Hadamard block of the keys, the largest power of two that divides a head; 1: not turned."""
        return self.head_dim & -self.head_dim if self.packed else 1

    @property
    def group(self) -> int:
        """Channels that share a scale, in packed formats."""
        return min(GROUP_CHANNELS, self.head_dim & -self.head_dim)

    @property
    def keys(self) -> HeadSections:
        """The parts of one head's keys."""
        return self._sections(PAGE_FORMATS[self.format].key_bits, anchor=self.packed)

    @property
    def values(self) -> HeadSections:
        """The parts of one head's values."""
        return self._sections(PAGE_FORMATS[self.format].value_bits, anchor=False)

    def _sections(self, bits: int, anchor: bool) -> HeadSections:
        at = self.head_elements * bits // 8
        if not self.packed:
            return HeadSections(0, -1, -1, -1, at)
        step = self.head_dim // self.group * self.page_tokens * _SCALE_BYTES
        scales, at = at, at + step
        minima_at, at = (at, at + step) if bits == 4 else (-1, at)
        anchor_at, at = (at, at + self.head_dim * _SCALE_BYTES) if anchor else (-1, at)
        return HeadSections(0, scales, minima_at, anchor_at, at)

    @property
    def element_bytes(self) -> int:
        """Bytes that a record's address and its layers are a multiple of: an element, or a scale in packed formats."""
        return _SCALE_BYTES if self.packed else PAGE_FORMATS[self.format].key_bits // 8

    @property
    def head_elements(self) -> int:
        """Elements of one head's keys, or values. In formats without scales: from one kv head to the next."""
        return self.page_tokens * self.head_dim

    @property
    def plane_elements(self) -> int:
        """Elements of a layer's keys. In formats without scales: from these to its values."""
        return self.kv_heads * self.head_elements

    @property
    def layer_elements(self) -> int:
        """Elements of a layer. In formats without scales: from one layer to the next."""
        return 2 * self.plane_elements

    @property
    def plane_bytes(self) -> int:
        """Bytes from the keys of a layer to its values."""
        return self.kv_heads * self.keys.stop

    @property
    def layer_bytes(self) -> int:
        """Bytes from one layer to the next: the slice of a record that one layer reads and writes."""
        return self.kv_heads * (self.keys.stop + self.values.stop)

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

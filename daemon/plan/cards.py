"""What graphics cards can do, for "what if I had one": memory, its bandwidth, arithmetic, and the link to the host.

Sources: memory sizes, bandwidths and PCI Express generations are those of NVIDIA's product pages. `fp16_flops` is the
dense rate of the tensor cores with 16-bit inputs and 32-bit sums. It is printed in the white papers for GA102 (3080,
3090, RTX A6000), for Ada (4080, 4090), for RTX Blackwell (5070 Ti, 5080, 5090) and in the data sheets of A100, H100,
H200 and L4; for the other GeForce cards, where NVIDIA prints none, it is twice the shader rate in fp32 that the product
page gives at boost clock, which is the ratio of every printed one. A real card reaches a part: see `EFFICIENCY`.
"""

from __future__ import annotations

from typing import NamedTuple

from tierd.daemon.errors import BadRequest, suggest


class Card(NamedTuple):
    """A card by its data sheet. Bytes, bytes per second and operations per second; `printed`: see the top."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    fp16_flops: float
    link_bytes_per_s: float
    printed: bool = False


class Efficiency(NamedTuple):
    """What part of a data sheet's rate is counted on."""

    memory: float
    compute: float
    link: float


# Of memory and link what long copies reach (80%), of arithmetic what large products in a whole model reach (50%).
EFFICIENCY = Efficiency(0.8, 0.5, 0.8)
# A card's driver and tierd's own buffers; what is left can be planned with.
RESERVED_BYTES = 1 << 30
GRAIN_BYTES = 64 << 20  # what an arena on a card is mapped in, `tiers.cuda_memory`: less would free nothing

_GIB, _GB, _TERA = 1 << 30, 1e9, 1e12
_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}  # one lane, one direction, after line coding


def _card(
    name: str, gib: int, gb_per_s: float, tflops: float, pcie: int, lanes: int = 16, *, printed: bool = False
) -> Card:
    return Card(name, gib * _GIB, gb_per_s * _GB, tflops * _TERA, lanes * _LANE_BYTES_PER_S[pcie], printed)


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _card("rtx3060", 12, 360, 25.5, 4),
        _card("rtx3070", 8, 448, 40.6, 4),
        _card("rtx3080", 10, 760, 59.5, 4, printed=True),
        _card("rtx3090", 24, 936, 71, 4, printed=True),
        _card("rtx3090ti", 24, 1008, 80, 4),
        _card("rtx4060", 8, 272, 30.2, 4, 8),
        _card("rtx4060ti", 16, 288, 44.1, 4, 8),
        _card("rtx4070", 12, 504, 58.3, 4),
        _card("rtx4070tisuper", 16, 672, 88.2, 4),
        _card("rtx4080", 16, 717, 97.5, 4, printed=True),
        _card("rtx4090", 24, 1008, 165.2, 4, printed=True),
        _card("rtx5060ti", 16, 448, 47.4, 5, 8),
        _card("rtx5070", 12, 672, 61.7, 5),
        _card("rtx5070ti", 16, 896, 87.9, 5, printed=True),
        _card("rtx5080", 16, 960, 112.6, 5, printed=True),
        _card("rtx5090", 32, 1792, 209.5, 5, printed=True),
        _card("rtxa6000", 48, 768, 154.8, 4, printed=True),
        _card("l4", 24, 300, 121, 4, printed=True),
        _card("a100", 80, 2039, 312, 4, printed=True),
        _card("h100", 80, 3350, 989, 5, printed=True),
        _card("h200", 141, 4800, 989, 5, printed=True),
    )
}


def find_card(text: str) -> Card:
    """A card by name: `rtx4090`, `RTX 4090`, `4090`, `NVIDIA GeForce RTX 4090`. Raises BadRequest for others."""
    name = "".join(c for c in text.lower() if c.isalnum())
    for word in ("nvidia", "geforce"):
        name = name.removeprefix(word)
    card = CARDS.get(name) or CARDS.get("rtx" + name)
    if card is None:
        hint = suggest(name, list(CARDS)) or f"known are {', '.join(CARDS)}"
        raise BadRequest(f"card {text[:40]!r} isn't known", hint=hint, param="gpu")
    return card


def card_like(name: str, memory_bytes: int) -> Card:
    """The card of this name, or, where that is not known, the slowest of those whose memory is the nearest."""
    try:
        return find_card(name)
    except BadRequest:
        return min(CARDS.values(), key=lambda card: (abs(card.memory_bytes - memory_bytes), card.bytes_per_s))

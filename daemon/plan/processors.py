"""How long computing takes: on this machine's processors by measured rates, on a card by its data sheet.

Both answer the same two questions: the matrices of a pass, and attention. A mixture of experts computes with those
that its rows are sent to: of `copies` experts with `used` for each row, `copies x (1 - (1 - used / copies) ^ rows)`
differ, if the router spreads rows evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tierd.daemon.plan.cards import EFFICIENCY, Card
from tierd.daemon.plan.kv import KV_FORMATS
from tierd.daemon.plan.rates import Compute, Loop
from tierd.daemon.plan.shape import Matrix, Shape


class Processor(Protocol):
    """Whatever computes. Seconds, of all layers."""

    def pass_s(self, shape: Shape, rows: int, logits: int, weight_bits: float) -> float:
        """The matrices of a pass over `rows` rows, of which `logits` give logits."""
        ...

    def attend_s(self, shape: Shape, rows: float, tokens: float, kv_format: str, *, prompt: bool) -> float:
        """Attention of rows that look at `tokens` tokens each. `prompt`: they are of one sequence."""
        ...

    def around_s(self, streams: int) -> float:
        """What a step costs beside its pass."""
        ...


def touched(matrix: Matrix, rows: float) -> float:
    """How many copies of a matrix a pass of so many rows reads."""
    if matrix.copies == matrix.used:
        return float(matrix.copies)
    left_out: float = (1.0 - matrix.used / matrix.copies) ** max(rows, 1.0)
    return matrix.copies * (1.0 - left_out)


def touched_share(shape: Shape, rows: float) -> float:
    """The part of the layers' weights that a pass of so many rows reads: 1 without experts."""
    read = sum(touched(m, rows) * m.rows * m.cols for layer in shape.layers for m in layer.matrices)
    return read / sum(m.elements for layer in shape.layers for m in layer.matrices)


@dataclass(frozen=True, slots=True)
class Cores:
    """The processors of this machine."""

    compute: Compute
    loop: Loop

    def pass_s(self, shape: Shape, rows: int, logits: int, weight_bits: float) -> float:
        """By the measured seconds of a matrix element at so many rows."""
        total_s = shape.head_elements * self.compute.head_element_s(logits) + self.compute.pass_s
        sizes: dict[tuple[float, float], float] = {}  # copies read, rows of each -> elements
        for layer in shape.layers:
            for matrix in layer.matrices:
                copies = touched(matrix, rows)
                key = copies, max(rows * matrix.used / copies, 1.0)
                sizes[key] = sizes.get(key, 0.0) + copies * matrix.rows * matrix.cols
        return total_s + sum(count * self.compute.layer_element_s(each) for (_, each), count in sizes.items())

    def attend_s(self, shape: Shape, rows: float, tokens: float, kv_format: str, *, prompt: bool) -> float:
        """By the measured seconds of a head's element."""
        width = shape.heads * shape.head_dim
        return rows * shape.attended_tokens(round(tokens)) * width * self.compute.attention_s(kv_format, prompt=prompt)

    def around_s(self, streams: int) -> float:
        """The engine's loop."""
        return self.loop.step_s + streams * self.loop.stream_s


@dataclass(frozen=True, slots=True)
class Roofline:
    """A card: whichever of its memory and its arithmetic takes longer."""

    card: Card

    def pass_s(self, shape: Shape, rows: int, logits: int, weight_bits: float) -> float:
        """Every weight that is needed is read once, every row multiplied with those that it needs."""
        elements = touched_share(shape, rows) * sum(m.elements for layer in shape.layers for m in layer.matrices)
        elements += shape.head_elements if logits else 0
        read_s = elements * weight_bits / 8 / (self.card.bytes_per_s * EFFICIENCY.memory)
        operations = 2.0 * (rows * shape.layer_elements + logits * shape.head_elements)
        return max(read_s, operations / (self.card.fp16_flops * EFFICIENCY.compute))

    def attend_s(self, shape: Shape, rows: float, tokens: float, kv_format: str, *, prompt: bool) -> float:
        """A row alone reads all that it looks at; rows of a prompt share what they read."""
        attended = shape.attended_tokens(round(tokens))
        operations = 4.0 * rows * attended * shape.heads * shape.head_dim
        kind = KV_FORMATS[kv_format]
        bits = sum(
            layer.cache.tokens_kept(round(tokens))
            * kind.layer_bits(layer.cache.key_elements, layer.cache.value_elements)
            for layer in shape.layers
        )
        reads = max(rows / 128, 1.0) if prompt else rows  # 128 rows of a prompt in one block: FlashAttention's tile
        read_s = reads * bits / 8 / (self.card.bytes_per_s * EFFICIENCY.memory)
        return max(read_s, operations / (self.card.fp16_flops * EFFICIENCY.compute))

    def around_s(self, streams: int) -> float:
        """Launches and sampling: a millisecond, whatever the card."""
        return 1e-3

"""The weights of a decoder on the card: layers, what comes before and after them, layers that pass through slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierd.kernels import card_bytes
from tierd.kernels.gpu.expand import plan_expand
from tierd.kernels.gpu.launch import Plan
from tierd.kernels.gpu.packing import GpuMatrix
from tierd.kernels.gpu.products import Matrix, matrix_bytes, to_card

if TYPE_CHECKING:
    from tierd.kernels.cpu.step import LayerWeights
    from tierd.kernels.gpu.experts import GpuExperts
    from tierd.kernels.packing import PackedMatrix, WeightFormat

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One layer on the card; what a model does not have is None.

    A mixture has a router, fp32 [experts, hidden], and experts in the place of `gate_up` and `down`. `sink_logits` fp32
    [heads] count in attention like a token each, without a value.
    """

    attn_norm: Tensor
    qkv: Matrix
    o: Matrix
    mlp_norm: Tensor
    gate_up: Matrix | None = None
    down: Matrix | None = None
    qkv_bias: Tensor | None = None
    qk_norms: tuple[Tensor, Tensor] | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    router: Tensor | None = None
    router_bias: Tensor | None = None
    sink_logits: Tensor | None = None
    experts: GpuExperts | None = None

    def __post_init__(self) -> None:
        parts = [part is not None for part in (self.gate_up, self.down, self.router, self.experts)]
        if parts not in ([True, True, False, False], [False, False, True, True]):
            raise ValueError("a layer has gate_up and down, or a router and experts")

    @staticmethod
    def load(
        layer: LayerWeights, device: torch.device, dtype: torch.dtype, experts: GpuExperts | None = None
    ) -> GpuLayer:
        """A layer of a prepared model, a mixture with these experts. Norms and biases stay fp32 where the products are
        ours; a router is fp32 in any case. Raises ValueError for a mixture without experts, or experts of none."""

        def needed(values: Floats) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        def vector(values: Floats | None) -> Tensor | None:
            return None if values is None else needed(values)

        def matrix(packed: PackedMatrix | None, kind: torch.dtype = dtype) -> Matrix | None:
            return None if packed is None else to_card(packed, device, kind)

        router = matrix(layer.router, torch.float32)
        assert not isinstance(router, GpuMatrix)
        qk_norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            qk_norms = needed(layer.q_norm), needed(layer.k_norm)
        return GpuLayer(
            needed(layer.attn_norm), to_card(layer.qkv, device, dtype), to_card(layer.o, device, dtype),
            needed(layer.mlp_norm), matrix(layer.gate_up), matrix(layer.down), vector(layer.qkv_bias), qk_norms,
            vector(layer.o_bias), vector(layer.gate_up_bias), vector(layer.down_bias), router,
            vector(layer.router_bias), vector(layer.sink_logits), experts,
        )  # fmt: skip

    @property
    def is_whole(self) -> bool:
        """Whether no expert is missing."""
        return self.experts is None or self.experts.all_here

    @property
    def nbytes(self) -> int:
        """Memory of the matrices, without experts."""
        matrices = (self.qkv, self.o, self.gate_up, self.down, self.router)
        return sum(matrix_bytes(matrix) for matrix in matrices if matrix is not None)


class Ends(NamedTuple):
    """What comes before the first layer and after the last one. `embed` is None where the CPU gives its rows."""

    embed: Matrix | None
    final_norm: Tensor
    head: Matrix


def load_ends(
    embed: PackedMatrix | None, final_norm: Floats, head: PackedMatrix, device: torch.device, dtype: torch.dtype
) -> Ends:
    """The ends of a prepared model; a head that is the embedding is on the card once."""
    first = None if embed is None else to_card(embed, device, dtype)
    is_same = embed is not None and (head is embed or head.data is embed.data)
    last = first if first is not None and is_same else to_card(head, device, dtype)
    return Ends(first, torch.from_numpy(np.ascontiguousarray(final_norm)).to(device), last)


class Piece(NamedTuple):
    """A tensor of a record: where its bytes lie in it. A vector, which is fp32, has one row and no format."""

    name: str
    format: WeightFormat | None
    rows: int
    cols: int
    offset: int
    num_bytes: int


class Layout:
    """A record in a slot, in the CPU's layout, and the same tensors laid out for the kernels in another place.

    Args:
        slot: uint8, the record's bytes from its begin on.
        place: uint8, `place_bytes` or more.

    Attributes:
        found: the tensors by name, in the place.

    Raises ValueError for sizes that don't fit.
    """

    def __init__(self, pieces: Sequence[Piece], slot: Tensor, place: Tensor, dtype: torch.dtype) -> None:
        self._plans: list[Plan[Matrix]] = []
        self._vectors: list[tuple[Tensor, Tensor]] = []
        self.found: dict[str, Any] = {}
        at, width = 0, torch.empty(0, dtype=dtype).element_size()
        for piece in pieces:
            source = slot[piece.offset : piece.offset + piece.num_bytes]
            size = piece_bytes(piece, width)
            dest = place[at : at + size]
            at += card_bytes.aligned(size)
            if piece.format is None:
                vector = dest.view(torch.float32)
                self._vectors.append((vector, source.view(torch.float32)))
                self.found[piece.name] = vector
            else:
                kind = torch.float32 if piece.name in card_bytes.EXACT else dtype
                plan = plan_expand(piece.format, piece.rows, piece.cols, source, dest, kind)
                self._plans.append(plan)
                self.found[piece.name] = plan.result

    def run(self) -> None:
        """Launches it; the slot has been read when that has run."""
        for plan in self._plans:
            plan.run()
        for dest, source in self._vectors:
            dest.copy_(source)


class SlotLayer:
    """A layer whose record comes to lie in a slot, and how it gets from there to where the kernels look for it.

    That place is the same for all layers that are streamed: kernels of one stream run one after the other, so the next
    layer is laid out there when the one before it has been computed. Experts have records and places of their own.

    Args:
        slot, place: as of `Layout`.
        experts: of a mixture.

    Raises ValueError for a record without the tensors of a layer, or sizes that don't fit.
    """

    def __init__(
        self, pieces: Sequence[Piece], slot: Tensor, place: Tensor, dtype: torch.dtype,
        experts: GpuExperts | None = None,
    ) -> None:  # fmt: skip
        self._layout = Layout(pieces, slot, place, dtype)
        found = dict(self._layout.found)
        norms = [found.pop(name, None) for name in ("q_norm", "k_norm")]
        try:
            self.layer = GpuLayer(qk_norms=None if None in norms else tuple(norms), experts=experts, **found)
        except (TypeError, ValueError) as exc:
            raise ValueError(f"a record that is no layer: {exc}") from None

    def lay_out(self) -> GpuLayer:
        """Launches it; the slot has been read when that has run."""
        self._layout.run()
        return self.layer


def piece_bytes(piece: Piece, width: int = 2) -> int:
    """Bytes of a tensor where kernels look for it, with activations of `width` bytes."""
    if piece.format is None:
        return 4 * piece.cols
    return card_bytes.tensor_bytes(piece.name, piece.format, piece.rows, piece.cols, width)


def place_bytes(pieces: Sequence[Piece], width: int = 2) -> int:
    """Bytes of a whole layer there."""
    return sum(card_bytes.aligned(piece_bytes(piece, width)) for piece in pieces)

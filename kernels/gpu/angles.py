"""cos and sin of positions on the card, and room for those of one pass that lie beyond the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tierd.kernels.cpu.step import Angles
    from tierd.kernels.rows import Ints

Floats = NDArray[np.float32]


class AngleTables:
    """Tables whose places stay, so that a captured graph finds the angles of each step.

    Attributes:
        cos, sin: fp32 [context + spare, head_dim / 2].

    Args:
        cos, sin: fp32 [context, head_dim / 2].
        spare: rows of a pass; those beyond the tables have their angles behind these.
        far: gives them, see `rope.angles`; None: there are no such rows.
    """

    def __init__(self, cos: Floats, sin: Floats, spare: int, far: Angles | None, device: torch.device) -> None:
        spare, self._context, self._far = spare if far is not None else 0, len(cos), far
        self.cos, self.sin = (
            torch.from_numpy(np.concatenate([table, np.zeros((spare, table.shape[1]))], dtype=np.float32)).to(device)
            for table in (cos, sin)
        )
        self._near = torch.zeros((2, spare, cos.shape[1]), pin_memory=device.type == "cuda")

    @property
    def has_far(self) -> bool:
        """Whether rows may stand beyond the tables."""
        return self._far is not None

    def load(self, positions: Ints) -> None:
        """Puts the angles of positions beyond the tables behind them, in this order.

        The pass before has been waited for, as for `Inputs.load`.
        """
        count = len(positions)
        if not count or self._far is None:
            return
        for near, table, values in zip(self._near, (self.cos, self.sin), self._far(positions), strict=True):
            near[:count] = torch.from_numpy(np.ascontiguousarray(values))
            table[self._context : self._context + count].copy_(near[:count], non_blocking=True)

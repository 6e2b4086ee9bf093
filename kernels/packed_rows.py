"""Single rows of a packed matrix: what a pass needs of an embedding that lies in CPU memory while a card computes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierd.kernels.packing import PANEL_ROWS, PackedMatrix, panels, sections, unpack
from tierd.kernels.rows import Ints


def unpack_rows(matrix: PackedMatrix, rows: Ints) -> NDArray[np.float32]:
    """These rows, exactly as the kernels compute with them: [len(rows), cols]. Touches their panels alone.

    Raises IndexError for a row that the matrix does not have.
    """
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < matrix.rows:
        raise IndexError(f"rows must lie in 0..{matrix.rows - 1}, got {rows.min()} to {rows.max()}")
    if not len(rows):
        return np.empty((0, matrix.cols), np.float32)
    needed, places = np.unique(rows // PANEL_ROWS, return_inverse=True)
    count, some = panels(matrix.rows), PANEL_ROWS * len(needed)
    whole, part = sections(matrix.format, matrix.rows, matrix.cols), sections(matrix.format, some, matrix.cols)
    data = np.zeros(part.total_bytes, np.uint8)
    for offset, size, dest in (
        (0, whole.quants_bytes, 0), (whole.scales_offset, whole.scales_bytes, part.scales_offset),
        (whole.minimums_offset, whole.minimums_bytes, part.minimums_offset),
    ):  # fmt: skip
        if size:
            block = matrix.data[offset : offset + size].reshape(count, -1)[needed]
            data[dest : dest + block.size] = block.reshape(-1)
    found = unpack(matrix.format, data, some, matrix.cols)
    picked: NDArray[np.float32] = found[places * PANEL_ROWS + rows % PANEL_ROWS]
    return picked

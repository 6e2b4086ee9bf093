"""Bytes of a matrix in memory of a card, by its format: for plans, so without numpy and torch.

int4-g32 and int8-g32 keep their codes, in panels of 32 rows and pairs of 32 columns (`kernels/gpu/packing.py`). All
other formats become dense, in 16 bits.
"""

from __future__ import annotations

ALIGN_BYTES = 256  # what torch's allocator gives, and more than the widest load
KEPT_BITS = {"int4-g32": 4, "int8-g32": 8}
EXACT = frozenset({"router"})  # matrices that stay fp32: their rounding could send rows to other experts
_PANEL_ROWS, _PAIR_COLS, _WORD_BYTES, _DENSE_BYTES, _EXACT_BYTES = 32, 64, 4, 2, 4


def quants_bytes(format: str, rows: int, cols: int, dense_bytes: int = _DENSE_BYTES) -> int:
    """Of the codes, or of all of a dense matrix with elements of `dense_bytes`."""
    bits = KEPT_BITS.get(format)
    if bits is None or dense_bytes > _DENSE_BYTES:  # the product with codes takes activations of 16 bits
        return rows * cols * dense_bytes
    return _panels(rows) * _pairs(cols) * _PANEL_ROWS * _PAIR_COLS * bits // 8


def scales_bytes(format: str, rows: int, cols: int, dense_bytes: int = _DENSE_BYTES) -> int:
    """Of the scales; 0 of a dense matrix."""
    bits = KEPT_BITS.get(format)
    if bits is None or dense_bytes > _DENSE_BYTES:
        return 0
    return _panels(rows) * _pairs(cols) * _PANEL_ROWS * _WORD_BYTES * (2 if bits == 4 else 1)


def matrix_bytes(format: str, rows: int, cols: int, dense_bytes: int = _DENSE_BYTES) -> int:
    """Of the whole matrix, each part rounded up to what it is aligned to."""
    parts = quants_bytes(format, rows, cols, dense_bytes), scales_bytes(format, rows, cols, dense_bytes)
    return sum(aligned(part) for part in parts)


def tensor_bytes(name: str, format: str, rows: int, cols: int, dense_bytes: int = _DENSE_BYTES) -> int:
    """Of a matrix of a record, by its name: those of `EXACT` are dense fp32."""
    return matrix_bytes(format, rows, cols, _EXACT_BYTES if name in EXACT else dense_bytes)


def aligned(size_bytes: int) -> int:
    """Rounded up."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _panels(rows: int) -> int:
    return -(-rows // _PANEL_ROWS)


def _pairs(cols: int) -> int:
    return -(-cols // _PAIR_COLS)

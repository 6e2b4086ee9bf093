"""Elements into panels and words, and floats into what fits there: the small steps of packing, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PANEL_ROWS = 16
GROUP_COLS = 32
BLOCK_COLS = 256
NIBBLES_PER_WORD = 8
_FIFTH_BITS = np.array([16 * (k % 8 // 4) + k // 8 * 4 + k % 4 for k in range(GROUP_COLS)], np.uint32)


def to_panels(values: NDArray[Any]) -> NDArray[Any]:
    """Rows side by side: [rows, n] -> [panels, n, 16], the last panel filled up with zeros."""
    rows, n = values.shape
    padded = np.zeros((-(-rows // PANEL_ROWS) * PANEL_ROWS, n), values.dtype)
    padded[:rows] = values
    return padded.reshape(-1, PANEL_ROWS, n).transpose(0, 2, 1)


def to_words(q: NDArray[Any], width: int) -> NDArray[np.uint32]:
    """Integers [panels, cols, 16] of 4 or 5 bits -> words [panels, cols / 8, 16] or [panels, cols / 32, 5, 16]."""
    eights = q.reshape(len(q), -1, NIBBLES_PER_WORD, PANEL_ROWS)
    words = np.zeros((len(q), eights.shape[1], PANEL_ROWS), np.uint32)
    for i in range(NIBBLES_PER_WORD):
        words |= (eights[:, :, i].astype(np.uint32) & np.uint32(15)) << np.uint32(4 * i)
    if width == 4:
        return words
    fifths = (q >> np.uint8(4)).astype(np.uint32).reshape(len(q), -1, GROUP_COLS, PANEL_ROWS) << _FIFTH_BITS[:, None]
    fifth_words = np.bitwise_or.reduce(fifths, axis=2)[:, :, None]
    return np.concatenate([words.reshape(len(q), -1, 4, PANEL_ROWS), fifth_words], axis=2)


def from_words(words: NDArray[np.uint32], width: int) -> NDArray[np.uint32]:
    """The inverse of `to_words`."""
    nibbles = words if width == 4 else words[:, :, :4].reshape(len(words), -1, PANEL_ROWS)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
    q = ((nibbles[:, :, None, :] >> shifts) & np.uint32(15)).reshape(len(words), -1, PANEL_ROWS)
    if width == 5:
        fifths = (words[:, :, 4:] >> _FIFTH_BITS[:, None]) & np.uint32(1)
        q |= fifths.reshape(len(words), -1, PANEL_ROWS) << np.uint32(4)
    return q


def blocks_type(counts: type[np.integer[Any]], parts: int) -> np.dtype[np.void]:
    """A block of 256 columns of a panel in a K format: a step for each row, and how many of them each part takes."""
    return np.dtype([("step", "<f2", (PANEL_ROWS,)), ("counts", counts, (parts, PANEL_ROWS))])


def from_steps(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Steps times counts for every column: [panels, blocks] of `blocks_type` -> [panels, cols, 16]."""
    values = blocks["counts"].astype(np.float32) * blocks["step"].astype(np.float32)[:, :, None]
    spread = np.repeat(values, BLOCK_COLS // values.shape[2], axis=2)
    return spread.reshape(len(blocks), -1, PANEL_ROWS)


def per_column(values: NDArray[np.float16]) -> NDArray[np.float32]:
    """Of a group for each of its columns: [panels, groups, 16] -> [panels, cols, 16]."""
    return np.repeat(values.astype(np.float32), GROUP_COLS, axis=1)


def round_to_bf16(w: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even. A value that rounds beyond the largest bfloat16 raises ValueError."""
    bits = np.ascontiguousarray(w).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    if ((rounded & np.uint32(0x7F80)) == 0x7F80).any():
        raise ValueError("a weight is too large for bfloat16")
    return rounded.astype(np.uint16)


def to_fp16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Rounded to nearest. Raises ValueError for what is too large."""
    if np.abs(values).max() > np.finfo(np.float16).max:
        raise ValueError("a group of weights is too large for a float16 scale")
    return values.astype(np.float16)


def divide_and_round(w: NDArray[np.float32], scale: NDArray[np.float32], low: int, high: int) -> NDArray[np.float32]:
    """Nearest integer of w / scale within low..high; 0 where the scale is 0."""
    quotient = np.zeros(w.shape, np.float32)
    np.divide(w, scale, out=quotient, where=scale != 0)
    return np.clip(np.rint(quotient, out=quotient), low, high)

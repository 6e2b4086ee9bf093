"""Tensor element types of GGUF files: ids, block sizes, and which of them this package can read."""

from __future__ import annotations

import enum

from tierd.daemon.models.errors import ModelFileError


class GgmlType(enum.IntEnum):
    """Element types that `dequant` reads. The values are those of the file format."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30
    MXFP4 = 39


# id -> (name, elements of a block, bytes of a block), as ggml lays them out. Types that can't be read are here too:
# the sizes of all tensors are checked against the file, whether they are wanted or not.
BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


def row_bytes(type_id: int, cols: int) -> int:
    """Bytes of a row of `cols` elements. Raises ModelFileError if the row isn't whole blocks or the type is unknown."""
    if type_id not in BLOCKS:
        raise ModelFileError(f"unknown tensor type {type_id}; the file is damaged or newer than this version")
    name, block, size = BLOCKS[type_id]
    if cols % block:
        raise ModelFileError(f"a row of {cols} elements isn't whole {name} blocks of {block}; the file is damaged")
    return cols // block * size


def readable(type_id: int) -> GgmlType:
    """The type as one that can be read. Raises ModelFileError that lists what is readable otherwise."""
    try:
        return GgmlType(type_id)
    except ValueError:
        name = BLOCKS.get(type_id, (f"type {type_id}", 0, 0))[0]
        known = ", ".join(t.name for t in GgmlType)
        raise ModelFileError(f"weights of type {name} aren't supported; take a file with {known}") from None

import gguf
import pytest

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import BLOCKS, GgmlType, readable, row_bytes


def test_block_sizes_are_those_of_the_gguf_package():
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    assert {i: row for i, row in theirs.items() if i in BLOCKS} == BLOCKS
    assert all(BLOCKS[kind][0] == kind.name for kind in GgmlType)


def test_row_bytes():
    assert row_bytes(GgmlType.Q4_1, 64) == 40
    with pytest.raises(ModelFileError, match="isn't whole Q4_1 blocks"):
        row_bytes(GgmlType.Q4_1, 63)
    with pytest.raises(ModelFileError, match="unknown tensor type 99"):
        row_bytes(99, 64)


def test_what_cannot_be_read_is_named():
    assert readable(14) is GgmlType.Q6_K
    with pytest.raises(ModelFileError, match=r"IQ2_XXS aren't supported; take a file with F32, .*Q6_K"):
        readable(16)

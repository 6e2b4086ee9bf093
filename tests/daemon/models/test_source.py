import numpy as np
import pytest

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import GgmlType
from tierd.daemon.models.records import PlannedPart
from tierd.daemon.models.source import (
    SourceTensor,
    check_shape,
    end_of_turn_ids,
    merged_ids,
    unpermuted,
    unpermuted_vector,
)


def source(values: np.ndarray, kind: GgmlType = GgmlType.F32) -> SourceTensor:
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(values.shape[0], -1)
    return SourceTensor("t", kind, values.shape[0], values.shape[1], lambda start, stop: raw[start:stop])


def test_a_message_of_harmony_ends_no_turn():
    ids = {"<|end|>": 1, "<|return|>": 2, "<|call|>": 3, "<|endoftext|>": 4}
    template = "<|start|>assistant<|channel|>final<|message|>{{ m }}<|end|> <|call|> <|return|>"
    assert end_of_turn_ids(ids.get, template) == [2, 3]
    assert end_of_turn_ids(ids.get, "<|assistant|>{{ m }}<|end|>") == [1]


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def test_any_rows_of_a_permuted_matrix():
    w = np.arange(48 * 3, dtype=np.float32).reshape(48, 3)
    tensor = unpermuted(source(interleaved(w, 6)), head_dim=8)
    for start in range(0, 49, 5):
        for stop in range(start, 49, 3):
            got = np.ascontiguousarray(tensor.read(start, stop)).view(np.float32)
            np.testing.assert_array_equal(got.reshape(-1, 3), w[start:stop])


def test_a_permuted_bias():
    bias = np.arange(24, dtype=np.float32)
    stored = interleaved(bias[:, None], 3).reshape(1, 24)
    tensor = unpermuted_vector(source(stored), head_dim=8)
    np.testing.assert_array_equal(tensor.read(0, 1).view(np.float32)[0], bias)
    assert tensor.read(0, 0).size == 0
    with pytest.raises(ModelFileError, match="quantized bias"):
        unpermuted_vector(source(stored, GgmlType.Q8_0), head_dim=8)


def test_shapes():
    tensor = source(np.zeros((4, 3), np.float32))
    assert check_shape(tensor, PlannedPart("q", 0, 4, 3), 2) is tensor
    for part, dims in ((PlannedPart("q", 0, 3, 4), 2), (PlannedPart("q", 0, 4, 3), 3), (PlannedPart("q", 0, 1, 12), 1)):
        with pytest.raises(ModelFileError, match="tensor t is 4 x 3, but the configuration asks for"):
            check_shape(tensor, part, dims)


def test_end_ids():
    ids = {"<|im_end|>": 7, "<|eot_id|>": 8}
    assert end_of_turn_ids(ids.get, "...<|im_end|>...") == [7]
    assert end_of_turn_ids(ids.get, "<|eot_id|><|im_end|><|end|>") == [7, 8]
    assert end_of_turn_ids(ids.get, None) == []
    assert merged_ids([[3, 7], [7, 1]], 10) == (3, 7, 1)
    with pytest.raises(ModelFileError, match="end token 10 isn't in the vocabulary of 10"):
        merged_ids([[10]], 10)

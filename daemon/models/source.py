"""A model as it was published, whatever the file format: what the importer reads from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from tierd.daemon.models.catalog import Sampling
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import GgmlType
from tierd.daemon.models.records import PlannedPart
from tierd.daemon.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a source. `read(start, stop)` gives those rows as raw blocks, uint8 [stop - start, row_bytes]."""

    name: str
    kind: GgmlType
    rows: int
    cols: int
    read: Callable[[int, int], npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class TextSide:
    """Everything about text: the tokenizer (JSON of the `tokenizers` library), the template and the ids that end."""

    tokenizer_json: str
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    sampling: Sampling = field(default_factory=Sampling)
    pooling: Literal["mean", "last"] = "mean"  # what embeddings are made of


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An open model. `tensor` finds a planned part (ModelFileError if it is missing or has another shape).

    `unused` names the tensors that no part of the plan was made from: they mean that the model is of another kind than
    its configuration says. `close` releases the files.
    """

    spec: ModelSpec
    text: TextSide
    tensor: Callable[[PlannedPart], SourceTensor]
    unused: Callable[[], list[str]]
    close: Callable[[], None]


def check_shape(tensor: SourceTensor, part: PlannedPart, num_dims: int) -> SourceTensor:
    """The tensor itself, if it has the shape that the configuration asks for."""
    expected_dims = 1 if part.rows == 1 and num_dims == 1 else 2
    if (tensor.rows, tensor.cols) != (part.rows, part.cols) or num_dims != expected_dims:
        raise ModelFileError(
            f"tensor {tensor.name} is {tensor.rows} x {tensor.cols}, but the configuration asks for "
            f"{part.rows} x {part.cols}; the model is inconsistent, fetch it again"
        )
    return tensor


def unpermuted(tensor: SourceTensor, head_dim: int) -> SourceTensor:
    """The tensor with the rows of each head in rotate-half order, read from interleaved order.

    llama GGUFs store row pairs (i, i + d/2) of each head next to each other, for kernels that rotate neighbours. Ours
    rotate halves: row j * d/2 + i of a head lies at row 2 * i + j of it, with j in 0..1.
    """
    half = head_dim // 2

    def read(start: int, stop: int) -> npt.NDArray[np.uint8]:
        first = start // head_dim * head_dim
        last = -(-stop // head_dim) * head_dim
        raw = tensor.read(first, last)
        size = raw.shape[1]
        halves = raw.reshape(-1, half, 2, size).swapaxes(1, 2).reshape(-1, size)
        return halves[start - first : stop - first]

    return SourceTensor(tensor.name, tensor.kind, tensor.rows, tensor.cols, read)


def unpermuted_vector(tensor: SourceTensor, head_dim: int) -> SourceTensor:
    """The same for a bias: a vector (one row) whose elements belong to rows of heads."""
    half = head_dim // 2

    def read(start: int, stop: int) -> npt.NDArray[np.uint8]:
        raw = tensor.read(start, stop)
        if stop == start:
            return raw
        size = raw.shape[1] // tensor.cols  # bytes of an element: biases are never quantized
        return np.ascontiguousarray(raw.reshape(-1, half, 2, size).swapaxes(1, 2)).reshape(raw.shape)

    if tensor.kind not in (GgmlType.F32, GgmlType.F16, GgmlType.BF16):
        raise ModelFileError(f"tensor {tensor.name} is a quantized bias, which isn't supported")
    return SourceTensor(tensor.name, tensor.kind, tensor.rows, tensor.cols, read)


# End-of-turn markers of chat templates in use. One ends a generation when it is a token of its own and the model's
# template writes it, even if the model's own list of end tokens forgot it.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|eom_id|>", "<|endoftext|>")


# Of gpt-oss (harmony), where <|end|> ends each message of a turn.
_HARMONY_ENDS = ("<|return|>", "<|call|>")


def end_of_turn_ids(token_id: Callable[[str], int | None], template: str | None) -> list[int]:
    """Ids of the end-of-turn markers that the template mentions."""
    harmony = template is not None and all(text in template for text in ("<|return|>", "<|channel|>"))
    markers = _HARMONY_ENDS if harmony else END_OF_TURN
    ids = (token_id(text) for text in markers if template is not None and text in template)
    return [i for i in ids if i is not None]


def merged_ids(groups: list[list[int]], vocab: int) -> tuple[int, ...]:
    """Ids of all groups, each once, in order. Raises ModelFileError for one outside the vocabulary."""
    merged = list(dict.fromkeys(i for group in groups for i in group))
    for i in merged:
        if not 0 <= i < vocab:
            raise ModelFileError(f"end token {i} isn't in the vocabulary of {vocab}; fetch the model again")
    return tuple(merged)

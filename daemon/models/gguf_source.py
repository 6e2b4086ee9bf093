"""A GGUF file as a `ModelSource`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.ggml_types import readable
from tierd.daemon.models.gguf_file import GgufFile, GgufTensor
from tierd.daemon.models.gguf_spec import ROPE_FREQS, spec_from_gguf
from tierd.daemon.models.records import PlannedPart
from tierd.daemon.models.source import (
    ModelSource,
    SourceTensor,
    TextSide,
    check_shape,
    end_of_turn_ids,
    merged_ids,
    unpermuted,
    unpermuted_vector,
)
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.models.tokenizer_build import GgufTokenizer

_POOLING_LAST = 3  # llama.cpp's number: 1 is the mean
_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "o_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
    "router": "ffn_gate_inp.weight",
    "router_bias": "ffn_gate_inp.bias",
    "sink_logits": "attn_sinks.weight",
}


def open_gguf(path: Path) -> ModelSource:
    """Open a GGUF model. Raises ModelFileError for a file that is damaged or not supported."""
    file = GgufFile(path)
    try:
        spec = spec_from_gguf(file)
        text = _text(file, spec)
    except BaseException:
        file.close()
        raise
    used = {ROPE_FREQS}

    def find(part: PlannedPart) -> SourceTensor:
        name = _name(part, file)
        found = file.tensors.get(name)
        if found is None:
            raise ModelFileError(f"{path.name}: tensor {name} is missing; the file is incomplete, fetch it again")
        used.add(name)
        if part.expert >= 0 and found.num_dims == (2 if part.slot.endswith("_bias") else 3):
            found = _one_of(found, part, spec)
        read = functools.partial(file.read_rows, found)
        tensor = SourceTensor(name, readable(found.type_id), found.rows, found.cols, read)
        tensor = check_shape(tensor, part, found.num_dims)
        if spec.family not in ("llama", "mixtral"):
            return tensor
        match part.slot:
            case "q" | "k":
                return unpermuted(tensor, spec.head_dim)
            case "q_bias" | "k_bias":
                return unpermuted_vector(tensor, spec.head_dim)
            case _:
                return tensor

    return ModelSource(spec, text, find, lambda: sorted(set(file.tensors) - used), file.close)


def _name(part: PlannedPart, file: GgufFile) -> str:
    """The tensor that holds a part. All experts of a layer are in one, in files of early 2024 each has its own."""
    if part.layer < 0:
        return _NAMES[part.slot]
    name = f"blk.{part.layer}.{_NAMES[part.slot]}"
    if part.slot == "mlp_norm" and name not in file.tensors:
        return f"blk.{part.layer}.post_attention_norm.weight"  # of gpt-oss
    if part.expert < 0:
        return name
    single = f"blk.{part.layer}.ffn_{part.slot}.{part.expert}.weight"
    if single in file.tensors:
        return single
    slot, kind = part.slot.removesuffix("_bias"), "bias" if part.slot.endswith("_bias") else "weight"
    return f"blk.{part.layer}.ffn_{slot}_exps.{kind}"


def _one_of(found: GgufTensor, part: PlannedPart, spec: ModelSpec) -> GgufTensor:
    """The rows of one expert among those of all. Raises ModelFileError when it has others than those."""
    count = spec.experts.count if spec.experts is not None else 0
    if found.rows != count * part.rows:
        raise ModelFileError(
            f"tensor {found.name} has {found.rows} rows, {count} experts have {count * part.rows}; fetch the file again"
        )
    row_bytes = found.size_bytes // found.rows
    offset = found.offset + part.expert * part.rows * row_bytes
    return dataclasses.replace(
        found, rows=part.rows, num_dims=2, offset=offset, size_bytes=part.rows * row_bytes
    )


def _text(file: GgufFile, spec: ModelSpec) -> TextSide:
    tokenizer = GgufTokenizer(file.metadata, file.path.name)
    if len(tokenizer.tokens) > spec.vocab:
        raise ModelFileError(
            f"{file.path.name}: {len(tokenizer.tokens)} tokens for an embedding of {spec.vocab}; fetch the file again"
        )
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelFileError(f"{file.path.name}: the chat template isn't text; take another file of this model")
    named = [tokenizer.special_id("eos"), tokenizer.special_id("eot"), tokenizer.special_id("eom")]
    # There is no generation_config.json in a GGUF, whose list often has <|endoftext|> beside the end of a turn.
    document_end = tokenizer.token_id("<|endoftext|>")
    groups = [
        [i for i in named if i is not None],
        end_of_turn_ids(tokenizer.token_id, template),
        [] if document_end is None else [document_end],
    ]
    architecture = file.metadata.get("general.architecture")
    return TextSide(
        tokenizer_json=tokenizer.json,
        chat_template=template,
        eos_ids=merged_ids(groups, spec.vocab),
        bos_id=tokenizer.special_id("bos"),
        add_bos=tokenizer.add_bos,
        pooling="last" if file.metadata.get(f"{architecture}.pooling_type") == _POOLING_LAST else "mean",
    )

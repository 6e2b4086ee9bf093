"""A model directory in the form of transformers (config.json, safetensors, tokenizer.json) as a `ModelSource`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tierd.daemon.models.catalog import Sampling
from tierd.daemon.models.config_json import Fields, parse_object, spec_from_config
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.file_reader import FileReader
from tierd.daemon.models.records import PlannedPart
from tierd.daemon.models.safetensors_file import SafeTensor, SafetensorsFile, model_files
from tierd.daemon.models.source import (
    ModelSource,
    SourceTensor,
    TextSide,
    check_shape,
    end_of_turn_ids,
    merged_ids,
)
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.models.stacked_experts import StackedExperts

_MAX_JSON_BYTES = 4 << 20
_MAX_TOKENIZER_BYTES = 128 << 20

_NAMES = {
    "embed": "embed_tokens.weight",
    "final_norm": "norm.weight",
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "sink_logits": "self_attn.sinks",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "o_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "router_bias": "mlp.router.bias",
}
# Of mixtures, by family: the router, and how the matrices of an expert are called (gpt-oss has all of them in one).
_EXPERTS = {
    "mixtral": ("block_sparse_moe.gate.weight", "block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": (
        "mlp.gate.weight", "mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    ),
    "gpt_oss": ("mlp.router.weight", "mlp.experts", {}),
}  # fmt: skip
_HEAD = "lm_head.weight"


def open_directory(directory: Path) -> ModelSource:
    """Open a model directory. Raises ModelFileError for anything unsafe, damaged or not supported."""
    config = _read_object(directory / "config.json", required=True)
    spec = spec_from_config(config)
    files: list[SafetensorsFile] = []

    def close() -> None:
        for file in files:
            file.close()

    try:
        tensors: dict[str, tuple[SafetensorsFile, SafeTensor]] = {}
        for path in model_files(directory):
            files.append(SafetensorsFile(path))
            for name, tensor in files[-1].tensors.items():
                if name in tensors:
                    raise ModelFileError(f"tensor {name[:80]!r} is in two files; fetch the model again")
                tensors[name] = (files[-1], tensor)
        text = _text(directory, config, spec)
    except BaseException:
        close()
        raise
    prefix = "model." if "model.embed_tokens.weight" in tensors else ""
    used: set[str] = {_HEAD} if spec.tied else set()
    stacked = StackedExperts(spec.experts, spec.hidden) if spec.experts and spec.family == "gpt_oss" else None

    def named(name: str) -> tuple[SafetensorsFile, SafeTensor]:
        if name not in tensors:
            raise ModelFileError(f"tensor {name} is missing from {directory.name}; fetch the model again")
        used.add(name)
        return tensors[name]

    def find(part: PlannedPart) -> SourceTensor:
        if stacked is not None and part.expert >= 0:
            inside = f"{prefix}{_layer(part)}mlp.experts."
            return stacked.part(part, lambda name: named(inside + name), f"{inside}gate_up_proj_blocks" in tensors)
        name = _HEAD if part.slot == "head" else prefix + _layer(part) + _name(part, spec.family)
        file, found = named(name)
        read = functools.partial(file.read_rows, found)
        return check_shape(SourceTensor(name, found.kind, found.rows, found.cols, read), part, found.num_dims)

    def unused() -> list[str]:
        # Old files carry RoPE's frequencies, which follow from the configuration.
        return sorted(n for n in tensors if n not in used and not n.endswith("rotary_emb.inv_freq"))

    return ModelSource(spec, text, find, unused, close)


def _layer(part: PlannedPart) -> str:
    return "" if part.layer < 0 else f"layers.{part.layer}."


def _name(part: PlannedPart, family: str) -> str:
    """Of a tensor within its layer."""
    if part.slot != "router" and part.expert < 0:
        return _NAMES[part.slot]
    router, experts, names = _EXPERTS[family]
    return router if part.slot == "router" else f"{experts}.{part.expert}.{names[part.slot]}.weight"


def _read_text(path: Path, limit_bytes: int) -> bytes | None:
    """The bytes of a small file, None if it isn't there."""
    if not path.exists():
        return None
    with FileReader(path) as reader:
        if reader.size_bytes > limit_bytes:
            raise ModelFileError(f"{path.name} has {reader.size_bytes:,} bytes, more than the {limit_bytes:,} allowed")
        return reader.read(0, reader.size_bytes, path.name).tobytes()


def _read_object(path: Path, required: bool = False) -> dict[str, Any]:
    """A JSON object, empty if the file isn't there and needn't be."""
    raw = _read_text(path, _MAX_JSON_BYTES)
    if raw is None:
        if required:
            raise ModelFileError(
                f"{path.parent.name} has no {path.name}; give a model directory (config.json and safetensors) or a "
                ".gguf file"
            )
        return {}
    return parse_object(raw, path.name)


def _text(directory: Path, config: dict[str, Any], spec: ModelSpec) -> TextSide:
    tokenizer = _tokenizer(directory, spec)
    settings = _read_object(directory / "tokenizer_config.json")
    generation = _read_object(directory / "generation_config.json")
    pooling = _read_object(directory / "1_Pooling" / "config.json")
    if "auto_map" in settings:
        raise ModelFileError("tokenizer_config.json asks for Python code (auto_map), which is never run")
    template = _template(directory, settings)
    eos_text = _token_text(settings.get("eos_token"))
    eos_token = None if eos_text is None else tokenizer.token_to_id(eos_text)
    published = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    groups = [published, [] if eos_token is None else [eos_token], end_of_turn_ids(tokenizer.token_to_id, template)]
    bos_text = _token_text(settings.get("bos_token"))
    bos_ids = _ids(generation.get("bos_token_id")) or _ids(config.get("bos_token_id"))
    bos_token = tokenizer.token_to_id(bos_text) if bos_text is not None else None
    bos = bos_token if bos_token is not None else (bos_ids[0] if bos_ids else None)
    # What the published tokenizer does with an empty text is what it does with any: it adds BOS or it doesn't.
    adds = bool(settings.get("add_bos_token")) or (bos is not None and tokenizer.encode("").ids[:1] == [bos])
    return TextSide(
        tokenizer_json=tokenizer.to_str(),
        chat_template=template,
        eos_ids=merged_ids(groups, spec.vocab),
        bos_id=bos,
        add_bos=adds and bos is not None,
        sampling=_sampling(generation),
        # As sentence-transformers writes it, for models that were made for embeddings.
        pooling="last" if pooling.get("pooling_mode_lasttoken") is True else "mean",
    )


def _tokenizer(directory: Path, spec: ModelSpec) -> Tokenizer:
    raw = _read_text(directory / "tokenizer.json", _MAX_TOKENIZER_BYTES)
    if raw is None:
        raise ModelFileError(
            f"{directory.name} has no tokenizer.json; save one with transformers (AutoTokenizer...save_pretrained)"
        )
    try:
        tokenizer: Tokenizer = Tokenizer.from_str(raw.decode())
    except Exception as exc:  # the library raises plain Exception
        raise ModelFileError(f"tokenizer.json can't be read ({exc}); fetch the model again") from exc
    # A stored truncation would cut long prompts in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.get_vocab_size() and max(tokenizer.get_vocab().values()) >= spec.vocab:
        raise ModelFileError(f"tokenizer.json has more tokens than the {spec.vocab} of the model; fetch it again")
    return tokenizer


def _template(directory: Path, settings: dict[str, Any]) -> str | None:
    raw = _read_text(directory / "chat_template.jinja", _MAX_JSON_BYTES)
    if raw is not None:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelFileError("chat_template.jinja isn't UTF-8; fetch the model again") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelFileError("tokenizer_config.json: the chat template isn't text; fetch the model again")
    return template


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json: text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    """A token id or a list of them."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in values):
        raise ModelFileError(f"token id {value!r} isn't a number; fetch the model again")
    return values


def _sampling(generation: dict[str, Any]) -> Sampling:
    """Published sampling defaults. `do_sample: false` means greedy, whatever else stands there."""
    if generation.get("do_sample") is False:
        return Sampling(temperature=0.0)
    fields = Fields(generation, "generation_config.json")

    def number(key: str) -> float | None:
        return None if not generation.get(key) else fields.number(key)

    top_k = generation.get("top_k")
    return Sampling(
        temperature=number("temperature"),
        top_p=number("top_p"),
        top_k=fields.integer("top_k", 1 << 31) if top_k else None,
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )

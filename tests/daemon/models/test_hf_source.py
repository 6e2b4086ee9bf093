import json

import pytest
from tokenizers import processors

from tierd.daemon.models.catalog import Sampling
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.hf_source import open_directory
from tierd.daemon.models.records import PlannedPart


def write(path, **fields) -> None:
    """Change fields of a JSON file, None to delete one; the file may not exist yet."""
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in {**data, **fields}.items() if v is not None}))


@pytest.fixture
def directory(hf_model):
    path, _ = hf_model("llama")
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


def text(directory):
    model = open_directory(directory)
    model.close()
    return model.text


def test_end_tokens_and_template(directory):
    write(directory / "config.json", eos_token_id=[5, 6])
    assert text(directory).eos_ids == (5, 6, 260)
    write(directory / "generation_config.json", eos_token_id=258)
    side = text(directory)
    assert side.eos_ids == (258, 260)  # the generation config's, then <|im_end|>
    assert side.chat_template == "{{ messages }}<|im_end|>"
    (directory / "chat_template.jinja").write_text("{{ own }}")
    assert text(directory).chat_template == "{{ own }}"
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    write(directory / "tokenizer_config.json", chat_template=named)
    assert text(directory).chat_template == "d"


def test_bos(directory):
    write(directory / "config.json", bos_token_id=1)
    assert (text(directory).bos_id, text(directory).add_bos) == (1, False)
    write(directory / "tokenizer_config.json", bos_token={"content": "<|im_start|>"})
    assert (text(directory).bos_id, text(directory).add_bos) == (259, False)
    write(directory / "tokenizer_config.json", add_bos_token=True)
    assert text(directory).add_bos


def test_bos_that_the_tokenizer_adds(directory):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 259)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.save(str(directory / "tokenizer.json"))
    write(directory / "tokenizer_config.json", bos_token="<|im_start|>")
    side = text(directory)
    assert side.add_bos
    # A truncation that was saved by accident would cut prompts in silence.
    assert len(Tokenizer.from_str(side.tokenizer_json).encode("x" * 100, add_special_tokens=False).ids) == 100


def test_pooling(directory):
    assert text(directory).pooling == "mean"
    (directory / "1_Pooling").mkdir()
    write(directory / "1_Pooling" / "config.json", pooling_mode_lasttoken=True)
    assert text(directory).pooling == "last"


def test_sampling(directory):
    assert text(directory).sampling == Sampling()
    path = directory / "generation_config.json"
    write(path, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1, do_sample=True)
    assert text(directory).sampling == Sampling(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1)
    write(path, do_sample=False)
    assert text(directory).sampling == Sampling(temperature=0.0)
    write(path, do_sample=None, top_k=0, temperature="hot")
    with pytest.raises(ModelFileError, match=r"generation_config.json: temperature must be"):
        text(directory)


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("config.json", None, r"has no config.json; give a model directory"),
        ("config.json", "[", r"config.json isn't valid JSON"),
        ("config.json", " " * (5 << 20), r"config.json has 5,242,880 bytes"),
        ("tokenizer.json", None, r"has no tokenizer.json; save one"),
        ("tokenizer.json", "{}", r"tokenizer.json can't be read"),
        ("tokenizer_config.json", '{"auto_map": {}}', "never run"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat template isn't text"),
        ("generation_config.json", '{"eos_token_id": "x"}', "token id 'x' isn't a number"),
        ("generation_config.json", '{"eos_token_id": 100000}', "end token 100000"),
        ("model.safetensors", None, "has no safetensors file"),
        ("model.safetensors", "junk junk junk", "claims a header"),
    ],
)
def test_what_is_refused(directory, file, content, match):
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_text(content)
    with pytest.raises(ModelFileError, match=match):
        open_directory(directory)


def test_a_template_file_that_is_not_utf8(directory):
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFileError, match="isn't UTF-8"):
        open_directory(directory)


def test_a_tokenizer_larger_than_the_embedding(directory):
    write(directory / "config.json", vocab_size=100)
    with pytest.raises(ModelFileError, match="more tokens than the 100"):
        open_directory(directory)


def test_missing_tensors_and_shapes(directory):
    model = open_directory(directory)
    with pytest.raises(ModelFileError, match=r"model.layers.7.self_attn.q_proj.weight is missing"):
        model.tensor(PlannedPart("q", 7, 64, 64))
    with pytest.raises(ModelFileError, match=r"lm_head.weight is 320 x 64, .* asks for 1 x 1"):
        model.tensor(PlannedPart("head", -1, 1, 1))
    assert "model.norm.weight" in model.unused()
    model.close()


def test_a_tensor_in_two_shards(directory):
    shard = (directory / "model.safetensors").read_bytes()
    for name in ("a.safetensors", "b.safetensors"):
        (directory / name).write_bytes(shard)
    weight_map = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    with pytest.raises(ModelFileError, match="is in two files"):
        open_directory(directory)

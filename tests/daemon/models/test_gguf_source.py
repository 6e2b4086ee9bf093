import gguf
import numpy as np
import pytest

from tierd.daemon.models.dequant import dequantize
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.gguf_source import open_gguf
from tierd.daemon.models.records import PlannedPart, plan_records


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_all_tensors_in_rotate_half_order(tmp_path, make_gguf, tiny, arch):
    make_gguf(tmp_path / "m.gguf", arch)
    model = open_gguf(tmp_path / "m.gguf")
    originals = tiny(arch)
    for record in plan_records(model.spec):
        for planned in record.tensors:
            for part in planned.parts:
                tensor = model.tensor(part)
                values = dequantize(tensor.kind, tensor.read(0, tensor.rows))
                np.testing.assert_array_equal(values, np.atleast_2d(originals[tensor.name]))
    assert model.unused() == []
    model.close()


def test_text_side(tmp_path, make_gguf):
    make_gguf(tmp_path / "m.gguf")
    text = open_gguf(tmp_path / "m.gguf").text
    assert text.eos_ids == (260, 258)  # <|im_end|> is eos and in the template, <|endoftext|> ends a document
    assert (text.bos_id, text.add_bos) == (259, False)
    assert text.chat_template is not None and "<|im_end|>" in text.chat_template


def test_unused_tensors_are_named(tmp_path, make_gguf, tiny):
    make_gguf(tmp_path / "m.gguf", weights={**tiny("llama"), "blk.0.attn_sinks.weight": np.zeros(32, np.float32)})
    model = open_gguf(tmp_path / "m.gguf")
    for record in plan_records(model.spec):
        for planned in record.tensors:
            for part in planned.parts:
                model.tensor(part)
    assert model.unused() == ["blk.0.attn_sinks.weight"]
    model.close()


def test_missing_and_misshapen_tensors(tmp_path, make_gguf, tiny):
    weights = tiny("llama")
    del weights["blk.1.attn_v.weight"]
    weights["blk.1.attn_output.weight"] = np.zeros((32, 64), np.float32)
    make_gguf(tmp_path / "m.gguf", weights=weights)
    model = open_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=r"blk.1.attn_v.weight is missing"):
        model.tensor(PlannedPart("v", 1, 32, 64))
    with pytest.raises(ModelFileError, match=r"blk.1.attn_output.weight is 32 x 64, .* asks for 64 x 64"):
        model.tensor(PlannedPart("o", 1, 64, 64))
    model.close()


def test_more_tokens_than_rows(tmp_path, make_gguf, tiny):
    weights = {**tiny("llama"), "token_embd.weight": np.zeros((200, 64), np.float32)}
    make_gguf(tmp_path / "m.gguf", weights=weights)
    with pytest.raises(ModelFileError, match="261 tokens for an embedding of 200"):
        open_gguf(tmp_path / "m.gguf")


def test_a_template_that_is_no_text(tmp_path, make_gguf, monkeypatch):
    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", lambda self, text: self.add_uint32(
        "tokenizer.chat_template", 1))  # fmt: skip
    make_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match="chat template isn't text"):
        open_gguf(tmp_path / "m.gguf")

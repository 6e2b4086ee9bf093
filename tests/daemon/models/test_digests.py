import msgspec
import pytest

from tierd.daemon.models import catalog
from tierd.daemon.models.digests import file_digest, source_digest, text_digest, verify
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.importer import import_model


@pytest.fixture
def prepared(tmp_path, make_gguf, quiet):
    make_gguf(tmp_path / "m.gguf")
    manifest = import_model(tmp_path / "m.gguf", tmp_path / "models", "m", None, quiet)
    return tmp_path / "models/m", manifest


def test_a_sound_model(prepared):
    assert verify(*prepared) == []


def test_any_flipped_byte_of_the_weights_is_found(prepared):
    directory, manifest = prepared
    path = directory / catalog.WEIGHTS
    data = path.read_bytes()
    for record in manifest.records:
        for at in (record.offset, record.offset + record.bytes // 2, record.offset + record.bytes - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert verify(directory, manifest) == [f"record {record.name} of weights.bin differs from its digest"]


def test_other_damage_is_found(prepared):
    directory, manifest = prepared
    changed = msgspec.structs.replace(manifest, spec=msgspec.structs.replace(manifest.spec, context=1))
    assert verify(directory, changed) == ["the manifest differs from its digest"]
    (directory / "chat_template.jinja").write_text("other")
    (directory / "tokenizer.json").unlink()
    (directory / "weights.bin").write_bytes(b"short")
    findings = verify(directory, manifest)
    assert len(findings) == 3 and "truncated" in findings[0]
    assert findings[1].startswith("can't open tokenizer.json") and findings[2].startswith("chat_template.jinja differs")


def test_source_digests(tmp_path, hf_model):
    (tmp_path / "a").write_bytes(b"x" * 5_000_000)
    (tmp_path / "b").write_bytes(b"x" * 5_000_000)
    (tmp_path / "c").write_bytes(b"x" * 4_999_999 + b"y")
    assert source_digest(tmp_path / "a") == source_digest(tmp_path / "b") != source_digest(tmp_path / "c")
    directory, _ = hf_model("llama")
    before = source_digest(directory)
    (directory / "README.md").write_text("not read by an import")
    assert source_digest(directory) == before
    (directory / "chat_template.jinja").write_text("new")
    assert source_digest(directory) != before
    with pytest.raises(ModelFileError, match="can't open gone"):
        source_digest(tmp_path / "gone")


def test_text_and_file_digests_agree(tmp_path):
    (tmp_path / "t").write_text("héllo")
    assert file_digest(tmp_path / "t").hex() == text_digest("héllo")

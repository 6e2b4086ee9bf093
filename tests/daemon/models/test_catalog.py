"""Names never become paths unchecked, and a broken model is a line in a listing."""

import itertools
import json
import os
import subprocess
import sys

import msgspec
import pytest

from tierd.daemon.errors import BadRequest, ModelInvalid, ModelNotFound
from tierd.daemon.models import catalog
from tierd.daemon.models.catalog import find, list_models, load_manifest, parse_ref, remove
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.importer import import_model


@pytest.fixture
def models_dir(tmp_path, make_gguf, quiet):
    make_gguf(tmp_path / "m.gguf")
    import_model(tmp_path / "m.gguf", tmp_path / "models", "smollm2-135m", None, quiet)
    return tmp_path / "models"


def edit(models_dir, **fields) -> None:
    path = models_dir / "smollm2-135m" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("ref", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("smollm2:135m", "smollm2-135m"),
        ("SmolLM2:135M", "smollm2-135m"),
        ("hf:HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("hf:o/N@refs/pr/1", "n"),
        ("hf:o/N:Q4_K_M", "n-q4_k_m"),
        ("hf:o/N.v2@main:Q8_0", "n.v2-q8_0"),
    ],
)
def test_parse_ref(ref, name):
    assert parse_ref(ref) == name


def test_hostile_names(tmp_path):
    """Thousands of names that try to leave the directory: none is accepted, none raises anything else."""
    parts = ["..", ".", "", "/", "\\", "a", "~", "%2e%2e", "\0", "\n", "hf:", "．．", "etc/passwd", "a" * 70, " "]
    joiners = ["", "/", "\\", ":", "@", "//"]
    names = {j.join(c) for n in (1, 2, 3) for c in itertools.product(parts, repeat=n) for j in joiners}
    assert len(names) > 5000
    (tmp_path / "models").mkdir()
    for name in names:
        try:
            parsed = parse_ref(name)
        except BadRequest:
            continue
        assert catalog.NAME.fullmatch(parsed) and "/" not in parsed and not parsed.startswith(".")
        assert (tmp_path / "models" / parsed).parent == tmp_path / "models"
        with pytest.raises(ModelNotFound):
            find(tmp_path / "models", name)
        with pytest.raises(ModelNotFound):
            remove(tmp_path / "models", name)


def test_find_and_list(models_dir):
    path, manifest = find(models_dir, "smollm2:135m")
    assert path == models_dir / "smollm2-135m" and manifest.name == "smollm2-135m"
    (listed,) = list_models(models_dir)
    assert (listed.name, listed.manifest, listed.problem) == ("smollm2-135m", manifest, None)
    with pytest.raises(ModelNotFound, match="model 'other' isn't prepared") as caught:
        find(models_dir, "other")
    assert caught.value.hint is not None and caught.value.hint.startswith("prepared models: smollm2-135m; ")
    assert list_models(models_dir / "gone") == []
    with pytest.raises(ModelNotFound) as caught:
        find(models_dir / "gone", "smollm2:135m")
    assert caught.value.hint == "pull it first: `tierd pull smollm2:135m`"


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda d: (d / "manifest.json").unlink(), "can't read manifest.json"),
        (lambda d: (d / "manifest.json").write_text("{"), "isn't valid"),
        (lambda d: (d / "manifest.json").write_bytes(b"\xff\xff"), "isn't valid"),
        (lambda d: (d / "manifest.json").write_text("[" * 10**6), "isn't valid"),
        (lambda d: os.truncate(d / "manifest.json", 17 << 20), "too large"),
        (lambda d: (d / "weights.bin").unlink(), "weights.bin is missing"),
        (lambda d: os.truncate(d / "weights.bin", 4096), "weights.bin has 4,096 bytes instead of"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda d: (d / "chat_template.jinja").unlink(), "chat_template.jinja is missing"),
        (lambda d: ((d / "weights.bin").rename(d.parent / "w"), (d / "weights.bin").symlink_to(d.parent / "w")),
         "isn't a regular file"),
    ],
)  # fmt: skip
def test_a_broken_model_is_listed_as_broken(models_dir, damage, match):
    damage(models_dir / "smollm2-135m")
    (listed,) = list_models(models_dir)
    assert listed.manifest is None and listed.problem is not None
    with pytest.raises(ModelInvalid, match=match):
        find(models_dir, "smollm2:135m")


def test_manifests_that_lie(models_dir):
    manifest = load_manifest(models_dir / "smollm2-135m")
    records = msgspec.to_builtins(manifest.records)

    def changed(record: int, tensor: int | None = None, **fields):
        copy = json.loads(json.dumps(records))
        (copy[record] if tensor is None else copy[record]["tensors"][tensor]).update(fields)
        return copy

    for fields, match in (
        ({"version": 2}, "has version 2, this version reads 1"),
        ({"name": "../x"}, "has the name"),
        ({"bytes": 5}, "instead of 5"),
        ({"extra": 1}, "unknown field"),
        ({"created_s": "x"}, "isn't valid"),
        ({"records": changed(1, offset=0)}, "isn't where it should be"),
        ({"records": changed(1, bytes=100)}, "isn't where it should be"),
        ({"records": records[:-1]}, "the records end at"),
        ({"records": changed(1, 1, offset=1 << 60)}, "outside its record"),
        ({"records": changed(1, 1, bytes=1 << 60)}, "outside its record"),
        ({"records": changed(1, 1, bytes=-1)}, "outside its record"),
        ({"records": changed(1, 1, rows=0)}, "outside its record"),
        ({"records": changed(1, 1, offset=records[1]["offset"] + 1)}, "outside its record"),
    ):
        original = (models_dir / "smollm2-135m/manifest.json").read_bytes()
        edit(models_dir, **fields)
        with pytest.raises(ModelFileError, match=match):
            load_manifest(models_dir / "smollm2-135m")
        (models_dir / "smollm2-135m/manifest.json").write_bytes(original)
    load_manifest(models_dir / "smollm2-135m")


def test_remove(models_dir):
    assert remove(models_dir, "smollm2:135m") == "smollm2-135m"
    assert [p.name for p in models_dir.iterdir()] == [".lock"]
    with pytest.raises(ModelNotFound):
        remove(models_dir, "smollm2:135m")


def test_remove_takes_broken_models_but_nothing_else(models_dir):
    (models_dir / "smollm2-135m/weights.bin").unlink()
    remove(models_dir, "smollm2-135m")
    other = models_dir / "other"
    other.mkdir()
    with pytest.raises(ModelInvalid, match=r"it has no manifest.json"):
        remove(models_dir, "other")
    (other / "manifest.json").write_text("{}")
    (other / "thesis.pdf").write_text("x")
    with pytest.raises(ModelInvalid, match=r"it holds 'thesis.pdf'"):
        remove(models_dir, "other")
    (models_dir / "link").symlink_to(other)
    with pytest.raises(ModelNotFound):
        remove(models_dir, "link")
    (models_dir / "file").write_text("x")
    with pytest.raises(ModelNotFound):
        remove(models_dir, "file")
    assert (other / "thesis.pdf").exists()
    assert [m.name for m in list_models(models_dir)] == ["link", "other"]


def test_the_catalog_loads_neither_numpy_nor_torch():
    code = "import sys, tierd.daemon.models.catalog; print({'numpy', 'torch', 'tokenizers'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"

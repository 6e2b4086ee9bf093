"""A pull as a whole: what it does the second time, and whose name is whose."""

import errno
import os

import pytest

from tierd.daemon.errors import BadRequest, Conflict, ModelInvalid, PermissionDenied, TierdError
from tierd.daemon.models import catalog, fetch
from tierd.daemon.models.catalog import Sampling
from tierd.daemon.models.fetch import Packaged
from tierd.daemon.models.pull import pull


@pytest.fixture
def puller(tmp_path):
    """Pulls into one models directory; returns (manifest, stages)."""

    def run(ref, **kwargs):
        stages = []
        kwargs.setdefault("cache_dir", tmp_path / "cache")
        manifest = pull(str(ref), tmp_path / "models", progress=lambda s, *_: stages.append(s), **kwargs)
        return manifest, stages

    return run


def test_the_second_pull_does_nothing(tmp_path, make_gguf, puller):
    make_gguf(tmp_path / "Tiny Model.gguf")
    first, stages = puller(tmp_path / "Tiny Model.gguf")
    assert first.name == "tiny-model" and stages[-1] == "import"
    again, stages = puller(tmp_path / "Tiny Model.gguf")
    assert again == first and stages == ["unchanged"]
    forced, stages = puller(tmp_path / "Tiny Model.gguf", force=True)
    assert forced.digest == first.digest and forced.created_s > first.created_s and stages[-1] == "import"


def test_other_weights_or_content_of_the_same_source_replace(tmp_path, make_gguf, tiny, puller):
    make_gguf(tmp_path / "m.gguf")
    first, _ = puller(tmp_path / "m.gguf")
    packed, stages = puller(tmp_path / "m.gguf", weights="int8")
    assert packed.format == "int8" and stages[-1] == "import"
    assert puller(tmp_path / "m.gguf", weights="int8")[1] == ["unchanged"]
    make_gguf(tmp_path / "m.gguf", weights=tiny("llama", 5))
    changed, _ = puller(tmp_path / "m.gguf")
    assert changed.digest != first.digest
    assert [m.name for m in catalog.list_models(tmp_path / "models")] == ["m"]


def test_the_planner_chooses_a_format_where_none_is_named(tmp_path, make_gguf, puller):
    make_gguf(tmp_path / "m.gguf")
    asked = []

    def choose(spec, own_format, own_bytes):
        asked.append((spec.num_layers, own_format, own_bytes))
        return "int8"

    chosen, _ = puller(tmp_path / "m.gguf", choose=choose)
    assert chosen.format == chosen.weights == "int8"
    assert puller(tmp_path / "m.gguf", choose=choose)[1] == ["unchanged"]
    plain, stages = puller(tmp_path / "m.gguf", weights="auto", choose=choose)
    assert plain.format != "int8" and stages[-1] == "import" and len(asked) == 2
    assert asked[0] == (plain.spec.num_layers, plain.format, plain.bytes)
    assert puller(tmp_path / "m.gguf", choose=lambda *_: None)[1] == ["unchanged"]


def test_a_name_stays_with_its_source(tmp_path, make_gguf, tiny, puller):
    make_gguf(tmp_path / "a.gguf")
    make_gguf(tmp_path / "b.gguf", weights=tiny("llama", 5))
    first, _ = puller(tmp_path / "a.gguf", name="mine")
    with pytest.raises(Conflict, match="'mine' is a model from .*a.gguf"):
        puller(tmp_path / "b.gguf", name="mine")
    assert catalog.find(tmp_path / "models", "mine")[1] == first
    forced, _ = puller(tmp_path / "b.gguf", name="mine", force=True)
    assert forced.digest != first.digest


def test_a_broken_model_is_replaced(tmp_path, make_gguf, puller):
    make_gguf(tmp_path / "m.gguf")
    puller(tmp_path / "m.gguf")
    (tmp_path / "models/m/tokenizer.json").unlink()
    assert puller(tmp_path / "m.gguf")[1][-1] == "import"
    catalog.find(tmp_path / "models", "m")


def test_a_packaged_model_needs_no_download_twice(tmp_path, make_gguf, puller, monkeypatch):
    make_gguf(tmp_path / "tiny.gguf")
    asked = []

    def fetch_packaged(model, downloads, progress, offline):
        asked.append(downloads)
        return tmp_path / "tiny.gguf"

    monkeypatch.setattr(fetch, "fetch_packaged", fetch_packaged)
    monkeypatch.setattr(fetch, "PACKAGED", {"tiny-1m": Packaged("tiny==1", 1, "tiny/t.gguf", 1, "")})
    manifest, _ = puller("Tiny:1m")
    assert (manifest.name, manifest.source) == ("tiny-1m", "tiny-1m")
    assert puller("tiny-1m", offline=True) == (manifest, ["unchanged"])
    assert asked == [tmp_path / "cache/downloads"]


def test_a_packaged_model_gets_the_sampling_of_its_card(tmp_path, make_gguf, puller, monkeypatch):
    make_gguf(tmp_path / "tiny.gguf")
    card = Sampling(temperature=0.2, top_p=0.9)
    assert fetch.PACKAGED["smollm2-135m"].sampling == card
    monkeypatch.setattr(fetch, "fetch_packaged", lambda *_: tmp_path / "tiny.gguf")
    monkeypatch.setattr(fetch, "PACKAGED", {"tiny-1m": Packaged("tiny==1", 1, "tiny/t.gguf", 1, "")})
    assert puller("tiny:1m")[0].sampling == Sampling()
    monkeypatch.setattr(fetch, "PACKAGED", {"tiny-1m": Packaged("tiny==1", 1, "tiny/t.gguf", 1, "", card)})
    assert puller("tiny:1m")[0].sampling == Sampling()  # what is there stays as it is
    assert puller("tiny:1m", force=True)[0].sampling == card
    assert catalog.find(tmp_path / "models", "tiny-1m")[1].sampling == card
    assert puller(tmp_path / "tiny.gguf", name="file")[0].sampling == Sampling()


def test_from_the_hub(tmp_path, hf_model, puller):
    directory, _ = hf_model("qwen3")

    class Hub:
        def files(self, repo, revision):
            return [p.name for p in directory.iterdir()]

        def snapshot(self, repo, revision, patterns, offline, progress):
            return directory

    manifest, _ = puller("hf:Qwen/Qwen3-Tiny", hub=Hub())
    assert (manifest.name, manifest.source) == ("qwen3-tiny", "hf:Qwen/Qwen3-Tiny")
    assert puller("hf:Qwen/Qwen3-Tiny", hub=Hub(), offline=True)[1] == ["download", "unchanged"]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda d: d[:100], "truncated"),
        (lambda d: d[:-100], "truncated"),
        (lambda d: b"junk" + d[4:], "GGUF"),
    ],
)
def test_every_refusal_is_an_error_for_users(tmp_path, make_gguf, puller, damage, match):
    make_gguf(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(damage((tmp_path / "m.gguf").read_bytes()))
    with pytest.raises(ModelInvalid, match=match):
        puller(tmp_path / "m.gguf")
    assert catalog.list_models(tmp_path / "models") == []


def test_bad_arguments(tmp_path, make_gguf, puller):
    make_gguf(tmp_path / "m.gguf")
    for kwargs in ({"weights": "int3"}, {"name": "../x"}):
        with pytest.raises(BadRequest):
            puller(tmp_path / "m.gguf", **kwargs)


def test_system_errors_are_errors_for_users(tmp_path, make_gguf, puller, monkeypatch):
    make_gguf(tmp_path / "m.gguf")
    for error, expected in (
        (PermissionError(errno.EACCES, "Permission denied", "/x"), PermissionDenied),
        (OSError(errno.EIO, "Input/output error"), TierdError),
    ):

        def fail(*_, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", fail)
            with pytest.raises(expected, match="/x can't be written to: no permission|Input/output error"):
                puller(tmp_path / "m.gguf")

"""Prepared models, found and told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from front_harness import CONTEXT, make_model, make_settings

from tierd.daemon.errors import ModelNotFound
from tierd.daemon.models import catalog
from tierd.daemon.shelf import Shelf
from tierd.daemon.supervisor import Model


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("alpha", "some-7b"):
        make_model(tmp_path / "models", name)
    return tmp_path / "models"


def test_a_model_by_its_names(models: Path, tmp_path: Path) -> None:
    shelf = Shelf(make_settings(tmp_path))
    assert shelf.find("Some:7b") == (Model("some-7b", models / "some-7b"), CONTEXT)
    assert shelf.find("")[0].name == "alpha"  # the default model
    assert Shelf(make_settings(tmp_path, ctx=99)).find("alpha")[1] == 99
    with pytest.raises(ModelNotFound):
        shelf.find("nobody")


def test_a_manifest_is_read_again_when_its_file_changed(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, read = Shelf(make_settings(tmp_path)), []
    find = catalog.find
    monkeypatch.setattr(catalog, "find", lambda *asked: read.append(asked[1]) or find(*asked))
    for _ in range(3):
        shelf.find("alpha")
    assert read == ["alpha"]
    os.utime(models / "alpha" / catalog.MANIFEST, ns=(1, 1))
    shelf.find("alpha")
    assert len(read) == 2
    (models / "alpha" / catalog.MANIFEST).unlink()
    with pytest.raises(Exception, match="alpha"):
        shelf.find("alpha")


async def test_the_list_tells_what_is_broken(models: Path, tmp_path: Path) -> None:
    (models / "some-7b" / catalog.MANIFEST).write_text("{")
    alpha, broken = await Shelf(make_settings(tmp_path)).list({"alpha"})
    assert alpha["problem"] is None and alpha["context"] == CONTEXT and alpha["loaded"]
    assert broken["problem"] and "context" not in broken and not broken["loaded"]


async def test_one_is_shown_whole(models: Path, tmp_path: Path) -> None:
    shown = await Shelf(make_settings(tmp_path)).show("some:7b", ())
    assert shown["name"] == "some-7b" and shown["path"] == str(models / "some-7b") and not shown["loaded"]
    assert shown["spec"]["num_layers"] == 1 and shown["context"] == CONTEXT

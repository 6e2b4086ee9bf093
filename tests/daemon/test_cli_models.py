"""pull, list, show, rm."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from cli_rig import Cli
from front_harness import make_model

from tierd.daemon.errors import DownloadFailed
from tierd.daemon.models import catalog, digests
from tierd.daemon.models import pull as pull_module
from tierd.daemon.plan.known import known_shape


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, monkeypatch, capsys)


@pytest.fixture
def alpha(cli: Cli) -> Path:
    """A prepared model with one record of 4,096 bytes."""
    directory: Path = make_model(cli.home / "models", "alpha")
    (directory / "fake.json").unlink()
    data = bytes(range(256)) * 16
    (directory / catalog.WEIGHTS).write_bytes(data)
    record = catalog.RecordEntry("layer.0", 0, len(data), xxhash.xxh3_128(data).hexdigest(), ())
    manifest = msgspec.structs.replace(
        catalog_manifest(directory), bytes=len(data), records=(record,),
        tokenizer_digest=digests.file_digest(directory / catalog.TOKENIZER).hex(),
    )  # fmt: skip
    weights = digests.file_digest(directory / catalog.WEIGHTS)
    digest = digests.model_digest(manifest.spec, (record,), weights, manifest.tokenizer_digest, None)
    manifest = msgspec.structs.replace(manifest, digest=digest)
    (directory / catalog.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return directory


def catalog_manifest(directory: Path) -> catalog.Manifest:
    return msgspec.json.decode((directory / catalog.MANIFEST).read_bytes(), type=catalog.Manifest)


def test_list(cli: Cli, alpha: Path) -> None:
    (cli.home / "models" / "broken").mkdir()
    said = cli("list")
    assert [line.split()[0] for line in said.out.splitlines()] == ["NAME", "alpha", "broken"]
    assert "broken: " in said.err
    models = cli("ls", "--json").json["models"]
    assert [model["name"] for model in models] == ["alpha", "broken"]
    assert models[0]["bytes"] == 4096 and models[0]["problem"] is None and models[1]["problem"]


def test_an_empty_list_says_what_to_do(cli: Cli) -> None:
    said = cli("list")
    assert said.code == 0 and "tierd pull" in said.err
    assert cli("list", "--json").json == {"models": []}


def test_show(cli: Cli, alpha: Path) -> None:
    assert cli("show", "alpha", "--json").json["spec"]["family"] == "llama"
    lines = dict(line.split(maxsplit=1) for line in cli("show", "alpha").out.splitlines())
    assert lines["name"] == "alpha" and lines["model"].startswith("llama, ")
    assert lines["weights"].endswith("in 1 record")
    assert not re.search(r"[\[\]{}]|None|\d{9}\.", " ".join(lines.values())), "no Python"
    said = cli("show", "beta")
    assert said.code == 1 and said.hinted


def test_show_tells_of_experts(cli: Cli, alpha: Path) -> None:
    spec = known_shape("qwen3-30b-a3b").spec
    manifest = msgspec.structs.replace(catalog_manifest(alpha), spec=spec)
    (alpha / catalog.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    lines = dict(line.split(maxsplit=1) for line in cli("show", "alpha").out.splitlines())
    assert lines["model"] == "qwen3_moe, 30,532 M parameters, 48 layers"
    assert lines["experts"] == "128 in each of 48 layers, 8 of them for a token, which uses 3,353 M parameters"
    assert cli("show", "alpha", "--json").json["active_parameters"] == spec.active_parameters


def test_show_verify(cli: Cli, alpha: Path) -> None:
    assert cli("show", "alpha", "--verify", "--json").json["verified"] is True
    data = bytearray((alpha / catalog.WEIGHTS).read_bytes())
    data[100] ^= 1
    (alpha / catalog.WEIGHTS).write_bytes(data)
    said = cli("show", "alpha", "--verify", "--json")
    assert said.code == 1
    assert said.json["verified"] is False
    assert said.json["findings"] == ["record layer.0 of weights.bin differs from its digest"]
    assert "--force" in said.err


def test_show_verify_reads_more_than_the_weights(cli: Cli, alpha: Path) -> None:
    (alpha / catalog.TOKENIZER).write_text("[]")
    said = cli("show", "alpha", "--verify", "--json")
    assert said.code == 1
    assert said.json["findings"] == ["tokenizer.json differs from its digest"]


def test_rm(cli: Cli, alpha: Path) -> None:
    assert cli("rm", "alpha").code == 2, "nobody can be asked"
    assert alpha.exists()
    with cli.front() as front:
        front.answers["ps"] = {"engines": [{"model": "alpha"}]}
        said = cli("rm", "alpha", "--yes")
    assert said.code == 1 and "tierd unload alpha" in said.err
    assert cli("rm", "alpha", "--yes").code == 0
    assert not alpha.exists()
    assert cli("rm", "alpha", "--yes").code == 1


def test_rm_asks_on_a_terminal(cli: Cli, alpha: Path) -> None:
    assert cli("rm", "alpha", stdin=b"n\n", terminal=True).code == 1
    assert alpha.exists()
    assert cli("rm", "alpha", stdin=b"y\n", terminal=True).code == 0
    assert not alpha.exists()


Progress = Callable[[str, int, int], None]


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch, alpha: Path) -> dict[str, Any]:
    """What the verb asks the models for; they answer with alpha."""
    asked: dict[str, Any] = {}

    def pull(ref: str, models_dir: Path, *, progress: Progress, **options: Any) -> catalog.Manifest:
        asked.update(options, ref=ref, models_dir=models_dir)
        for done in range(0, 101, 25):
            progress("download", done, 100)
        if ref == "hf:no/net":
            raise DownloadFailed("the hub does not answer", hint="try again")
        return catalog_manifest(alpha)

    monkeypatch.setattr(pull_module, "pull", pull)
    return asked


def test_pull(cli: Cli, pulled: dict[str, Any]) -> None:
    said = cli("pull", "hf:a/b", "--name", "n", "--weights", "int8", "--force", "--offline")
    assert said.code == 0
    assert "download 50% 50 of 100" in said.err and "alpha is ready" in said.out
    assert callable(pulled.pop("choose"))
    assert pulled == {
        "ref": "hf:a/b", "models_dir": cli.home / "models", "cache_dir": cli.home / "cache", "name": "n",
        "weights": "int8", "offline": True, "force": True,
    }  # fmt: skip
    assert cli("pull", "hf:a/b", "--json").json["name"] == "alpha"


@pytest.mark.parametrize(("memory", "format"), [("8GB", None), ("200MB", "int8-g32")])
def test_a_format_is_chosen_by_the_memory_for_weights(
    cli: Cli, pulled: dict[str, Any], memory: str, format: str | None
) -> None:
    said = cli("pull", "hf:a/b", "--weights-mem", memory)
    spec = known_shape("smollm2-135m").spec
    assert pulled["choose"](spec, "bf16", 270_000_000) == format
    assert said.code == 0 and pulled["weights"] is None


def test_a_pull_that_fails(cli: Cli, pulled: dict[str, Any]) -> None:
    said = cli("pull", "hf:no/net")
    assert said.code == 1
    assert said.err.splitlines()[-2:] == ["error: the hub does not answer", "hint: try again"]

"""tierd plan."""

from __future__ import annotations

import json
import os

import pytest
from cli_rig import Cli

from tests.daemon.plan.scenes import MEASURED
from tierd.daemon.machine import Machine
from tierd.daemon.models.catalog import MANIFEST, load_manifest
from tierd.daemon.plan import rates
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES
from tierd.kernels.packing import ROUNDED_FORMATS

GB = 10**9


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    made = Cli(tmp_path, monkeypatch, capsys)
    monkeypatch.setattr("tierd.daemon.cli_plan.probe_machine", lambda path: Machine(24 * GB, 20 * GB, 100 * GB))
    monkeypatch.setattr("tierd.daemon.cli_plan.rates.load", lambda path, fingerprint: MEASURED)
    return made


@pytest.fixture
def prepared(cli, models_dir, monkeypatch):
    monkeypatch.setenv("TIERD_MODELS_DIR", str(models_dir))
    return cli


def test_a_card_that_nobody_has(cli):
    said = cli("plan", "llama-3-70b-shape", "--gpu", "RTX 4090", "--ctx", "4096")
    assert said.code == 0
    assert "llama-3-70b on rtx4090" in said.out and "tokens/s" in said.out and "a step waits for" in said.out
    assert "can't run this today" in said.out


def test_for_programs(cli):
    plan = cli("plan", "llama-3-8b", "--gpu", "rtx4090", "--ctx", "8192", "--json").json
    assert plan["fits"] and plan["weight_format"] == "bf16" and plan["kv_token_bytes"] == 128 << 10
    device = plan["tiers"]["device"]
    assert device["layers"] == 32 and device["weights"] + device["kv"] + device["workspace"] < 23 << 30
    assert plan["speed"]["decode_tokens_per_s"] > 20 and plan["runs"] is False


@pytest.mark.parametrize("format", [format.value for format in ROUNDED_FORMATS])
def test_every_format_that_pull_takes(cli, format):
    plan = cli("plan", "llama-3-8b", "--ctx", "1024", "--weights", format, "--json").json
    assert plan["weight_format"] == format and plan["speed"]["decode_tokens_per_s"] > 0


def test_a_prepared_model_here(prepared):
    plan = prepared("plan", "smollm2:135m", "--json", "--ctx", "2048").json
    assert plan["fits"] and plan["runs"] and plan["kv_format"] == "fp32"
    assert plan["tiers"]["device"]["layers"] == 30 and plan["tiers"]["disk"]["layers"] == 0
    assert plan["tiers"]["device"]["kv"] == 128 * 737280
    assert plan["rates"].startswith("measured here")


def test_weights_that_are_streamed(prepared, model_dir):
    plan = prepared("plan", "smollm2:135m", "--json", "--weights-mem", "40MB").json
    assert plan["tiers"]["disk"]["layers"] > 0
    assert plan["tiers"]["device"]["weights"] + plan["tiers"]["disk"]["weights"] == load_manifest(model_dir).bytes
    said = prepared("plan", "smollm2:135m", "--weights-mem", "1MB")
    assert said.code == 1 and "does not fit" in said.out and "--weights-mem" in said.out


def test_what_does_not_fit_ends_with_1_and_the_nearest_plan(prepared):
    said = prepared(
        "plan", "smollm2:135m", "--device-mem", "100MB", "--host-mem", "0", "--nvme-mem", "0", "--json", "--ctx", "8192"
    )
    assert said.code == 1
    plan = said.json
    assert not plan["fits"] and plan["nearest"] == "a context of 2,160 tokens" and plan["context"] == 2160
    assert "pages of one sequence take 377 MB, and there is room for 100 MB" in plan["why"][0]


def test_more_than_the_model_reaches_is_told(prepared):
    plan = prepared("plan", "smollm2:135m", "--json", "--ctx", "16384").json
    assert plan["why"][-1] == "smollm2-135m reaches 8,192 tokens: tierd refuses more"
    assert "reaches" not in prepared("plan", "smollm2:135m", "--ctx", "8192").out


def test_a_config_alone(cli, tmp_path):
    config = {
        "model_type": "olmoe", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "num_local_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        said = cli("plan", str(path))
        assert said.code == 0 and "figures alone" in said.out


def test_throughput_and_streams(cli):
    options = ("plan", "llama-3-70b", "--gpu", "rtx4090", "--ctx", "512", "--json")
    one, many = cli(*options).json, cli(*options, "--goal", "throughput").json
    assert many["streams"] > 8 and one["streams"] == 1
    assert many["speed"]["with_prompts_tokens_per_s"] > 3 * one["speed"]["with_prompts_tokens_per_s"]


def test_the_draft_model_is_chosen_as_serve_does(prepared, models_dir, tmp_path, monkeypatch):
    asked = ("plan", "other", "--draft", "smollm2:135m", "--ctx", "1024")
    manifest = load_manifest(models_dir / "smollm2-135m")
    for name in ("smollm2-135m", "other"):
        (tmp_path / "models" / name).mkdir(parents=True)
        for path in (models_dir / "smollm2-135m").iterdir():
            (tmp_path / "models" / name / path.name).write_bytes(path.read_bytes() if path.name == MANIFEST else b"")
            os.truncate(tmp_path / "models" / name / path.name, path.stat().st_size)  # weights: a hole
    monkeypatch.setenv("TIERD_MODELS_DIR", str(tmp_path / "models"))
    assert "the draft model smollm2-135m takes" in prepared(*asked).out
    assert "draft model" not in prepared("plan", "smollm2:135m", *asked[2:]).out  # it does not guess for itself
    tight = (manifest.bytes + 2 * LEAST_ARENA_BYTES) * 10 // 9
    monkeypatch.setattr("tierd.daemon.cli_plan.probe_machine", lambda path: Machine(24 * GB, tight, 100 * GB))
    said = prepared(*asked, "--host-mem", "0")
    assert "there is no draft model: beside smollm2-135m" in said.out


def test_lists(cli):
    assert "rtx5090" in cli("plan", "--cards").out and "* twice" in cli("plan", "--cards").out
    assert "meta-llama/Meta-Llama-3-70B" in cli("plan", "--shapes").out
    assert any(shape["name"] == "gpt-oss-20b" for shape in cli("plan", "--shapes", "--json").json["shapes"])
    assert {"name": "rtx3060"}.items() <= cli("plan", "--cards", "--json").json["cards"][0].items()


@pytest.mark.parametrize(
    "words",
    [("plan",), ("plan", "lama-3-8b"), ("plan", "absent-shape"), ("plan", "llama-3-8b", "--gpu", "rtx99"),
     ("plan", "llama-3-8b", "--ctx", "many"), ("plan", "llama-3-8b", "--ctx", "100", "--answer", "100"),
     ("plan", "/nowhere/config.json")],
)  # fmt: skip
def test_mistakes_have_a_next_step(cli, words):
    said = cli(*words)
    assert said.code != 0 and said.hinted, said.err


def test_without_a_measurement_the_answer_says_so(cli, monkeypatch):
    monkeypatch.setattr("tierd.daemon.cli_plan.rates.load", lambda path, fingerprint: None)
    said = cli("plan", "llama-3-8b")
    assert "assumed, not measured: `tierd doctor --measure`" in said.out
    assert rates.assumed(MEASURED.fingerprint).assumed

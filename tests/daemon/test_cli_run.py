"""run with a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_rig import Cli
from fake_front import TIMINGS, USAGE
from front_harness import make_model

from tierd.clients import Client
from tierd.daemon import cli_models, cli_run, cli_spawn
from tierd.daemon.cli_common import load_settings
from tierd.daemon.cli_run import split_words
from tierd.daemon.protocol import Message


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    cli = Cli(tmp_path, monkeypatch, capsys)
    make_model(cli.home / "models", "alpha")
    return cli


@pytest.mark.parametrize(
    ("words", "split"),
    [
        ([], ("d", None)),
        (["alpha"], ("alpha", None)),
        (["alpha", "a", "b"], ("alpha", "a b")),
        (["smollm2-135m", "a"], ("smollm2-135m", "a")),
        (["llama3:8b", "hi"], ("llama3:8b", "hi")),
        (["hf:o/n"], ("hf:o/n", None)),
        (["./x.gguf"], ("./x.gguf", None)),
        (["x.gguf", "a"], ("x.gguf", "a")),
        (["Hi"], ("d", "Hi")),
        (["Hi!"], ("d", "Hi!")),
        (["what", "is", "it"], ("d", "what is it")),
        (["What is it?"], ("d", "What is it?")),
        (["What is", "it?"], ("d", "What is it?")),
        (["-"], ("d", "-")),
        (["alpha", "-"], ("alpha", "-")),
        ([""], ("d", "")),
    ],
)
def test_split_words(cli: Cli, words: list[str], split: tuple[str, str | None]) -> None:
    assert split_words(words, load_settings({"default_model": "d"})) == split


def test_a_single_word_is_a_prompt(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERD_DEFAULT_MODEL", "alpha")
    with cli.front() as front:
        assert cli("run", "Hi").code == 0
    assert front.submits[0].messages == (Message("user", "Hi"),)
    assert front.submits[0].model == "alpha"


def test_the_answer_has_a_limit(cli: Cli) -> None:
    with cli.front() as front:
        assert cli("run", "alpha", "echo a").code == 0
    assert front.submits[0].sampling.max_tokens == 1024
    assert "1,024" in cli("run", "--help").out


def test_an_error_begins_on_a_new_line(cli: Cli) -> None:
    with cli.front():
        said = cli("run", "alpha", "drop")
    assert said.out == "half\n" and said.err.startswith("error: ")


def test_a_file_is_no_prepared_model(cli: Cli) -> None:
    file = cli.home / "x.gguf"
    file.touch()
    said = cli("run", str(file), "hi")
    assert said.code == 1 and said.hinted and f"tierd pull {file}" in said.err


def test_one_answer_is_streamed(cli: Cli) -> None:
    with cli.front() as front:
        said = cli("run", "alpha", "echo", "one", "two")
    assert (said.code, said.out, said.err) == (0, "one two \n", "")
    assert front.submits[0].messages == (Message("user", "echo one two"),)


def test_json(cli: Cli) -> None:
    with cli.front():
        document = cli("run", "alpha", "echo one", "--json").json
    assert document["text"] == "one " and document["finish"] == "stop"
    assert document["usage"] == USAGE
    names = "ttft_ms prefill_tokens_per_s decode_tokens_per_s hit_device hit_host hit_nvme recomputed"
    assert set(names.split()) <= document["timings"].keys()
    assert document["timings"]["ttft_ms"] == TIMINGS["ttft_ms"]


def test_options_reach_the_request(cli: Cli) -> None:
    words = (
        "--system be-brief --temperature 0 --top-k 4 --top-p 0.5 --min-p 0.1 --max-tokens 9 --seed 7 --stop x --stop y "
        "--ctx 64 --repetition-penalty 1.1 --kv-mode window=64"
    ).split()
    with cli.front() as front:
        assert cli("run", *words, "alpha", "echo a").code == 0
    [submit] = front.submits
    assert submit.messages == (Message("system", "be-brief"), Message("user", "echo a"))
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 4, 0.5, 0.1)
    assert (sampling.max_tokens, sampling.seed, sampling.stop, submit.ctx) == (9, 7, ("x", "y"), 64)
    assert sampling.repetition_penalty == 1.1 and submit.kv_mode == "window=64"


@pytest.mark.parametrize("words", [["alpha"], ["alpha", "-"]])
def test_the_standard_input(cli: Cli, words: list[str]) -> None:
    with cli.front():
        assert cli("run", *words, stdin="echo grüße".encode()).out == "grüße \n"


@pytest.mark.parametrize(
    ("words", "stdin", "text"),
    [
        (["alpha"], b"", "the prompt is empty"),
        (["alpha", "  "], b"", "the prompt is empty"),
        (["alpha"], b"\xff\xfe", "not UTF-8"),
        (["alpha", "echo a", "--temperature", "warm"], b"", "not a valid float"),
        (["../etc", "x"], b"", "no model name"),
        (["alpha", "a", "--max-tokens", "9" * 23], b"", "--max-tokens"),
        (["alpha", "a", "--seed", "9" * 23], b"", "--seed"),
        (["alpha", "a", "--top-k", "9" * 23], b"", "--top-k"),
        (["alpha", "a", "--ctx", "9" * 23], b"", "--ctx"),
        (["alpha", "a", "--kv-mode", "windw=64"], b"", "kv_mode knows no 'windw'"),
        (["alpha", "a\udcff"], b"", "the prompt is not valid text"),
        (["alpha", "a", "--system", "\udcff"], b"", "--system is not valid text"),
        (["alpha", "a", "--stop", "\udcff"], b"", "--stop is not valid text"),
    ],
)
def test_bad_input_exits_2(cli: Cli, words: list[str], stdin: bytes, text: str) -> None:
    with cli.front():
        said = cli("run", *words, stdin=stdin)
    assert said.code == 2
    assert said.hinted or text == "not UTF-8"
    assert text in said.err


@pytest.mark.parametrize(("prompt", "code"), [("refuse", 1), ("fail", 1), ("drop", 69)])
def test_errors_of_a_generation(cli: Cli, prompt: str, code: int) -> None:
    with cli.front():
        said = cli("run", "alpha", prompt)
    assert said.code == code
    assert "error: " in said.err and "Traceback" not in said.err


def test_an_interrupt_cancels(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    def interrupt(text: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdout, "write", interrupt)
    with cli.front() as front:
        assert cli("run", "alpha", "slow").code == 130
        assert front.wait_for_cancel()


def test_an_unknown_model(cli: Cli) -> None:
    said = cli("run", "llama3:8b", "hi")
    assert said.code == 1 and said.hinted
    assert "'llama3:8b' isn't prepared" in said.err and "prepared models: alpha" in said.err


@pytest.mark.parametrize("words", [["run", "smolm2:135m", "hi"], ["show", "smolm2:135m"], ["rm", "smolm2:135m", "-y"]])
def test_a_mistyped_model_is_suggested(cli: Cli, words: list[str]) -> None:
    said = cli(*words)
    assert said.code == 1 and said.hinted
    assert "did you mean 'smollm2:135m'? Prepared: alpha" in said.err


def test_a_repository_is_to_be_pulled_first(cli: Cli) -> None:
    said = cli("run", "owner/name", "hi")
    assert said.code == 1 and said.hinted and "pull it first: `tierd pull hf:owner/name`" in said.err
    assert "pull it first: `tierd pull hf:owner/name`" in cli("run", "hf:owner/name", "hi").err
    assert "it is prepared as alpha" in cli("run", "owner/alpha", "hi").err


def test_the_default_model_is_fetched(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cli_models, "pull_with_progress", lambda settings, ref: asked.append(ref))
    with cli.front():
        said = cli("run", "echo it")
    assert (said.code, said.out, asked) == (0, "it \n", ["smollm2:135m"])
    assert "fetched once" in said.err


def test_another_known_model_is_offered(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cli_models, "pull_with_progress", lambda settings, ref: asked.append(ref))
    monkeypatch.setenv("TIERD_DEFAULT_MODEL", "alpha")
    with cli.front():
        said = cli("run", "smollm2:135m", "echo it")
        assert said.code == 1 and said.hinted and "tierd pull smollm2:135m" in said.err
        assert cli("run", "smollm2:135m", "echo it", stdin=b"n\n", terminal=True).code == 1
        assert asked == []
        assert cli("run", "smollm2:135m", "echo it", stdin=b"y\n", terminal=True).code == 0
        assert asked == ["smollm2:135m"]


def test_settings_for_a_running_daemon_are_told_to_be_unused(cli: Cli) -> None:
    with cli.front():
        said = cli("run", "alpha", "echo a", "--device-mem", "1GB")
    assert said.code == 0 and "--device-mem=1GB changes nothing" in said.err


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_daemon_is_started(cli: Cli, monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    with cli.front() as front:
        started: list[Any] = []

        def spawn(settings: Any, flags: list[str]) -> Any:
            started.append(flags)
            return cli_spawn.Spawned(Client(front.path).connect(), 5, is_ours)

        monkeypatch.setattr(cli_spawn, "spawn", spawn)
        monkeypatch.setattr(cli_run, "connect_if_running", lambda settings: None)
        said = cli("run", "alpha", "echo a", "--device-mem", "1GB")
    assert said.code == 0 and ("tierd started" in said.err) == is_ours
    assert ("--device-mem=1GB changes nothing" in said.err) != is_ours, "another start was faster"
    assert started == [["--device-mem=1GB"]]


def test_an_input_that_no_request_holds_is_refused_before_it_is_sent(cli: Cli) -> None:
    with cli.front() as front:
        said = cli("run", "alpha", "-", stdin=b"x" * (16 << 20))
        assert said.code == 2 and "16 MiB" in said.err and said.hinted
        assert not front.requests


@pytest.mark.parametrize(
    ("words", "noted"), [(["qwen9", "Hello"], True), (["Why", "7?"], False), (["llama3"], False)]
)
def test_a_first_word_that_may_be_meant_as_a_model_is_told(
    cli: Cli, capsys: pytest.CaptureFixture[str], words: list[str], noted: bool
) -> None:
    split_words(words, load_settings({"default_model": "alpha"}))
    assert ("no model is called" in capsys.readouterr().err) == noted

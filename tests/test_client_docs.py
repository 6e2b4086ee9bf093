"""What the pages about clients tell to paste does what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests" / "daemon"))  # the import mode of the suite puts no directory on the path

from front_harness import make_model  # noqa: E402
from sdk_daemon import Served, served  # noqa: E402

from tierd.daemon.api import openapi  # noqa: E402
from tierd.daemon.api.openai import METADATA, NEUTRAL  # noqa: E402
from tierd.daemon.api.openai_types import ChatRequest, CompletionRequest  # noqa: E402
from tierd.daemon.api.responses_store import MAX_RESPONSES, MAX_STORE_BYTES  # noqa: E402
from tierd.daemon.cli import app  # noqa: E402
from tierd.daemon.client_setup import setup_of  # noqa: E402
from tierd.daemon.config import Settings, load  # noqa: E402
from tierd.daemon.limits import MAX_ANSWERS  # noqa: E402

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs" / "clients").glob("*.md"))}
DEFAULT_URL = "http://127.0.0.1:8421"
OLLAMA_LISTEN = "127.0.0.1:11434"
MODEL = "smollm2:135m"
# Programs that the suite does not have, or does not start; what they send is in the tests of the dialects.
ELSEWHERE = ("claude", "codex", "aider", "llm", "open-webui", "docker")
# What the blocks of these pages import takes seconds of processor.
SLOW = ("anthropic", "embeddings-and-batches", "openai", "openai-clients")


class Block(NamedTuple):
    page: str
    kind: str
    text: str


def blocks(*kinds: str) -> list[Block]:
    found = [
        Block(page, *one)
        for page, text in PAGES.items()
        for one in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    return [block for block in found if block.kind in kinds]


def ids(block: Block) -> str:
    return f"{block.page}-{len(block.text)}"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("docs")
    make_model(root / "models", "smollm2-135m")
    yield from served(root)


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    every = blocks("sh", "python", "yaml", "toml")
    assert len(every) * 2 == sum(text.count("```") for text in PAGES.values())


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=[pytest.mark.long] if block.page in SLOW else []) for block in blocks("python")],
    ids=ids,
)
def test_python(block: Block, daemon: Served) -> None:
    code = block.text.replace(DEFAULT_URL, daemon.url)
    environment = os.environ | {"TIERD_SOCKET": str(daemon.root / "run" / "t.sock")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0 and len(done.stdout) > 100, done.stderr


@pytest.mark.parametrize("block", blocks("sh"), ids=ids)
def test_shell(block: Block, daemon: Served) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        match words[0]:
            case "curl":
                check_curl(words, daemon)
            case "tierd":
                check_verb(words[1:])
            case "export":
                check_variable(words[1])
            case _:
                assert words[0] in ELSEWHERE
                assert all(DEFAULT_URL in word for word in words if "URL=" in word)


def check_curl(words: list[str], daemon: Served) -> None:
    command = [word.replace(DEFAULT_URL, daemon.url) for word in words]
    done = subprocess.run([*command, "--fail-with-body"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout, done.stdout


def check_verb(words: list[str]) -> None:
    """The verb and its flags are there; nothing runs."""
    command = app.get_command(click.Context(app), words[0])
    assert command is not None
    command.make_context(words[0], words[1:])  # raises for a flag that is not there


def check_variable(assignment: str) -> None:
    """What `tierd launch` sets, or what a program that it does not start reads."""
    setups = [setup_of(name, DEFAULT_URL, MODEL, "any") for name in ("claude", "codex", "aider")]
    known = {name: value for setup in setups for name, value in setup.environment.items()}
    known |= {"OLLAMA_HOST": DEFAULT_URL, "OLLAMA_BASE_URL": DEFAULT_URL, "OPENAI_API_BASE_URL": f"{DEFAULT_URL}/v1"}
    name, value = assignment.split("=", 1)
    assert known[name] == value


def test_settings_in_toml_are_ours(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    for block in blocks("toml"):
        config = tomllib.loads(block.text)
        if "model_provider" in config:
            continue  # of Codex: the next test
        file.write_text(block.text)
        loaded = load({}, {}, file)
        ((table, values),) = config.items()
        for key, value in values.items():
            assert getattr(loaded.settings, key) == value and table == "compat"


def test_codex_is_set_up_as_launch_does_it() -> None:
    (config,) = [found for block in blocks("toml") if "model_provider" in (found := tomllib.loads(block.text))]
    words = setup_of("codex", DEFAULT_URL, config["model"], "any").command
    told = [word.partition("=") for word in words if word.startswith("model_provider")]
    assert {name: tomllib.loads(f"x = {value}")["x"] for name, _, value in told} == {
        "model_provider": config["model_provider"],
        **{f"model_providers.tierd.{key}": value for key, value in config["model_providers"]["tierd"].items()},
    }


def test_yaml_names_a_server_and_a_model(daemon: Served) -> None:
    yaml = pytest.importorskip("yaml")
    for block in blocks("yaml"):
        given: Any = yaml.safe_load(block.text)
        if isinstance(given, list):  # of llm
            (model,) = given
            assert model["api_base"] == f"{DEFAULT_URL}/v1" and model["model_name"] == MODEL
            continue
        for model in given["models"]:
            assert model["apiBase"] == DEFAULT_URL and model["provider"] == "ollama"
            assert model["model"] in {item["name"] for item in daemon.call("models")["models"]}


def test_paths_fields_and_figures_of_openai_are_those_of_the_code() -> None:
    page = PAGES["openai"]
    there = {one.path for one in openapi.ENDPOINTS}
    for path in re.findall(r"`(?:GET|POST|DELETE)?`?,? ?`?(/v1/[a-z/{}]+)`", page):
        assert path.replace("{id}", "{response_id}") in there or path == "/v1/models/{id}"
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    extras = page[page.index("**Not of OpenAI**") : page.index("**Mapped**")]
    assert {name.split(".")[0] for name in re.findall(r"`([a-z_.]+)`", extras)} <= fields
    ignored = page[page.index("**Accepted and not used**") : page.index("**Refused by name")]
    assert {"client_metadata", *METADATA} == set(re.findall(r"`([a-z_]+)`", ignored))
    refused = set(re.findall(r"`([a-z_]+)[`:]", page[page.index("**Refused by name") : page.index("**Errors**")]))
    assert {"functions", "prediction", "web_search_options"} <= refused & set(NEUTRAL)
    assert f"{MAX_RESPONSES:,} or {MAX_STORE_BYTES >> 20} MB" in page and f"at most {MAX_ANSWERS} in a request" in page


def test_addresses_are_the_default_and_ollamas_own() -> None:
    addresses = {one for text in PAGES.values() for one in re.findall(r"\b(?:127\.0\.0\.1|localhost):\d+", text)}
    assert addresses == {DEFAULT_URL.removeprefix("http://"), OLLAMA_LISTEN}
    default = Settings.__dataclass_fields__["listen"].default
    assert f"http://{default}" == DEFAULT_URL

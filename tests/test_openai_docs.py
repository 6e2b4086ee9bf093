"""What the pages about OpenAI's clients tell to paste does what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests" / "daemon"))  # the import mode of the suite puts no directory on the path

from front_harness import make_model  # noqa: E402
from sdk_daemon import Served, served  # noqa: E402

from tierd.daemon.api import openapi  # noqa: E402
from tierd.daemon.api.openai import METADATA, NEUTRAL  # noqa: E402
from tierd.daemon.api.openai_types import ChatRequest, CompletionRequest  # noqa: E402
from tierd.daemon.api.responses_store import MAX_RESPONSES, MAX_STORE_BYTES  # noqa: E402
from tierd.daemon.client_setup import setup_of  # noqa: E402
from tierd.daemon.limits import MAX_ANSWERS  # noqa: E402

DEFAULT_URL = "http://127.0.0.1:8421"
PAGES = {
    name: (REPOSITORY / "docs" / "clients" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("openai", "openai-clients")
}
# Programs that the suite does not start; what they send is in the tests of the dialect.
ELSEWHERE = ("codex", "aider", "llm", "open-webui")


def blocks(kind: str) -> list[str]:
    return [one for text in PAGES.values() for one in re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S)]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("docs")
    make_model(root / "models", "smollm2-135m")
    yield from served(root)


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    tested = sum(len(blocks(kind)) for kind in ("sh", "python", "yaml", "toml"))
    assert tested * 2 == sum(text.count("```") for text in PAGES.values())


@pytest.mark.long  # what they import takes many seconds of processor
@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split()[1])
def test_python(code: str, daemon: Served) -> None:
    code = code.replace(DEFAULT_URL, daemon.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0 and len(done.stdout) > 100, done.stderr


def test_shell(daemon: Served) -> None:
    setups = [setup_of(name, DEFAULT_URL, "smollm2:135m", "any") for name in ("codex", "aider")]
    known = {name: value for setup in setups for name, value in setup.environment.items()}
    known["OPENAI_API_BASE_URL"] = f"{DEFAULT_URL}/v1"  # Open WebUI's own name
    for line in (line for text in blocks("sh") for line in text.replace("\\\n", " ").splitlines()):
        words = shlex.split(line)
        match words[0]:
            case "curl":
                command = [word.replace(DEFAULT_URL, daemon.url) for word in words]
                done = subprocess.run([*command, "--fail-with-body"], capture_output=True, text=True, timeout=60)
                assert done.returncode == 0 and done.stdout, done.stdout
            case "export":
                name, value = words[1].split("=", 1)
                assert known[name] == value
            case _:
                assert words[0] in ELSEWHERE


def test_codex_is_set_up_as_launch_does_it() -> None:
    (text,) = blocks("toml")
    config = tomllib.loads(text)
    words = setup_of("codex", DEFAULT_URL, config["model"], "any").command
    told = [word.partition("=") for word in words if word.startswith("model_provider")]
    assert {name: tomllib.loads(f"x = {value}")["x"] for name, _, value in told} == {
        "model_provider": config["model_provider"],
        **{f"model_providers.tierd.{key}": value for key, value in config["model_providers"]["tierd"].items()},
    }


def test_the_yaml_of_llm_names_a_server_and_a_model(daemon: Served) -> None:
    import yaml

    (text,) = blocks("yaml")
    (model,) = yaml.safe_load(text)
    assert model["api_base"] == f"{DEFAULT_URL}/v1" and model["model_name"] == "smollm2:135m"


def test_paths_fields_and_figures_are_those_of_the_code() -> None:
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


def test_addresses_are_the_default() -> None:
    assert {found for text in PAGES.values() for found in re.findall(r"http://[\d.]+:\d+", text)} == {DEFAULT_URL}

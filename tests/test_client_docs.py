"""What the pages about clients tell to paste does what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests" / "daemon"))  # the import mode of the suite puts no directory on the path

from front_harness import make_model  # noqa: E402
from sdk_daemon import Served, served  # noqa: E402

from tierd.daemon.cli import app  # noqa: E402
from tierd.daemon.client_setup import setup_of  # noqa: E402
from tierd.daemon.config import Settings, load  # noqa: E402

PAGES = ("anthropic", "ollama", "continue", "oterm", "open-webui")
DEFAULT_URL = "http://127.0.0.1:8421"
OLLAMA_LISTEN = "127.0.0.1:11434"
# Programs that the suite does not have; what they send is in the tests of the dialects.
ELSEWHERE = ("claude", "open-webui", "docker")


class Block(NamedTuple):
    page: str
    kind: str
    text: str


def blocks(*kinds: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = (REPOSITORY / "docs" / "clients" / f"{page}.md").read_text(encoding="utf-8")
        found += [Block(page, *one) for one in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
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
    fences = sum(
        (REPOSITORY / "docs" / "clients" / f"{page}.md").read_text(encoding="utf-8").count("```") for page in PAGES
    )
    assert len(every) * 2 == fences


# Importing `anthropic` alone takes four seconds of processor.
SLOW = {"anthropic": [pytest.mark.long]}


@pytest.mark.parametrize("block", [pytest.param(b, marks=SLOW.get(b.page, [])) for b in blocks("python")], ids=ids)
def test_python(block: Block, daemon: Served) -> None:
    code = block.text.replace(DEFAULT_URL, daemon.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
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
    name, value = assignment.split("=", 1)
    if name.startswith("ANTHROPIC_"):
        assert setup_of("claude", DEFAULT_URL, "smollm2:135m", "any").environment[name] == value
    else:
        assert name in ("OLLAMA_HOST", "OLLAMA_BASE_URL") and value == DEFAULT_URL


def test_config_files(tmp_path: Path) -> None:
    for block in blocks("toml"):
        file = tmp_path / "config.toml"
        file.write_text(block.text)
        loaded = load({}, {}, file)
        ((table, values),) = tomllib.loads(block.text).items()
        for key, value in values.items():
            assert getattr(loaded.settings, key) == value and table == "compat"


def test_yaml_names_a_server_and_a_model(daemon: Served) -> None:
    yaml = pytest.importorskip("yaml")
    for block in blocks("yaml"):
        for model in yaml.safe_load(block.text)["models"]:
            assert model["apiBase"] == DEFAULT_URL and model["provider"] == "ollama"
            assert model["model"] in {item["name"] for item in daemon.call("models")["models"]}


def test_addresses_are_the_default_and_ollamas_own() -> None:
    addresses: set[str] = set()
    for page in PAGES:
        text = (REPOSITORY / "docs" / "clients" / f"{page}.md").read_text(encoding="utf-8")
        addresses |= set(re.findall(r"\b(?:127\.0\.0\.1|localhost):\d+", text))
    assert addresses == {DEFAULT_URL.removeprefix("http://"), OLLAMA_LISTEN}
    default = Settings.__dataclass_fields__["listen"].default
    assert f"http://{default}" == DEFAULT_URL

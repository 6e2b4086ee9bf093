"""What coding clients need to talk to tierd."""

from __future__ import annotations

import json
import tomllib

import pytest

from tierd.daemon.client_setup import CLIENTS, setup_of

URL, MODEL, KEY = "http://127.0.0.1:8421", "qwen3:4b", "tierd_abc_s-e_c"


@pytest.mark.parametrize("client", CLIENTS)
def test_each_gets_address_model_and_key(client: str) -> None:
    setup = setup_of(client, URL, MODEL, KEY)
    everything = " ".join([*setup.environment.values(), *setup.command])
    assert URL in everything and MODEL in everything and KEY in everything
    assert setup.command[0] == client and KEY not in " ".join(setup.command)  # command lines can be read by everybody
    # The prefix of our settings is strict: a tierd that the client runs must not stumble over it.
    assert not any(name.startswith("TIERD_") for name in setup.environment)


def test_claude_gets_the_address_without_a_path_and_no_key_of_its_own() -> None:
    environment = setup_of("claude", URL, MODEL, KEY).environment
    assert environment["ANTHROPIC_BASE_URL"] == URL and environment["ANTHROPIC_API_KEY"] == ""
    assert {value for name, value in environment.items() if name.endswith("_MODEL")} == {MODEL}
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"


def test_codex_speaks_responses() -> None:
    setup = setup_of("codex", URL, MODEL, KEY)
    settings = [word for before, word in zip(setup.command, setup.command[1:], strict=False) if before == "-c"]
    config = tomllib.loads("\n".join(settings))
    provider = config["model_providers"][config["model_provider"]]
    assert provider["wire_api"] == "responses" and provider["base_url"] == f"{URL}/v1"
    assert setup.environment[provider["env_key"]] == KEY


def test_opencode_gets_a_provider_with_the_model() -> None:
    config = json.loads(setup_of("opencode", URL, MODEL, KEY).environment["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    assert config["provider"][provider]["options"] == {"baseURL": f"{URL}/v1", "apiKey": KEY}
    assert model in config["provider"][provider]["models"]


def test_aider_names_the_model_as_one_of_openai() -> None:
    setup = setup_of("aider", URL, MODEL, KEY)
    assert setup.command == ["aider", "--model", f"openai/{MODEL}"]
    assert setup.environment["OPENAI_API_BASE"] == f"{URL}/v1"

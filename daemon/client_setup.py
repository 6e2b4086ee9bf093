"""What a coding client needs to talk to tierd: variables and a command line, nothing written anywhere; pure."""

from __future__ import annotations

import json
from typing import NamedTuple

# Client -> how to install it.
CLIENTS = {
    "claude": "npm install -g @anthropic-ai/claude-code",
    "codex": "npm install -g @openai/codex",
    "aider": "pipx install aider-chat",
    "opencode": "npm install -g opencode-ai",
}


class Setup(NamedTuple):
    """Variables beside those of the shell, and the words to type."""

    environment: dict[str, str]
    command: list[str]


def setup_of(client: str, url: str, model: str, key: str) -> Setup:
    """The setup of a client. `url`: of tierd, without a path. Raises KeyError for a client that is not in `CLIENTS`."""
    return {"claude": _claude, "codex": _codex, "aider": _aider, "opencode": _opencode}[client](url, model, key)


def _claude(url: str, model: str, key: str) -> Setup:
    names = ("OPUS", "SONNET", "HAIKU")  # it asks for a small model beside the large one: here they are the same
    environment = {
        "ANTHROPIC_BASE_URL": url,  # it adds /v1/messages itself
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_API_KEY": "",  # a real one would go before the token, and leave this machine's daemon out
        "ANTHROPIC_MODEL": model,
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": model for name in names},
        # A block that changes with every request stands first in its prompt: tierd drops it, but why send it.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Setup(environment, ["claude", "--model", model])


def _codex(url: str, model: str, key: str) -> Setup:
    # Not TIERD_...: that prefix belongs to the settings, and a `tierd` that codex runs would refuse the name.
    variable = "CODEX_TIERD_KEY"
    provider = {"name": "tierd", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": variable}
    words = ["codex", "-m", model, "-c", 'model_provider="tierd"']
    for name, value in provider.items():
        words += ["-c", f"model_providers.tierd.{name}={json.dumps(value)}"]
    return Setup({variable: key}, words)


def _aider(url: str, model: str, key: str) -> Setup:
    environment = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key}
    return Setup(environment, ["aider", "--model", f"openai/{model}"])


def _opencode(url: str, model: str, key: str) -> Setup:
    config = {
        "provider": {
            "tierd": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "tierd",
                "options": {"baseURL": f"{url}/v1", "apiKey": key},
                "models": {model: {"name": model}},
            }
        },
        "model": f"tierd/{model}",
        "small_model": f"tierd/{model}",
    }
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, ["opencode"])

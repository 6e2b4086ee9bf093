"""The Ollama dialect's views of models: what is prepared, one of them, what is loaded. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tierd.daemon.api.ollama import LATEST
from tierd.daemon.api.ollama_answers import stamp

# Clients read a version to know what they may ask for. It is that of the Ollama whose API this is.
API_VERSION = "0.13.5"
_FOR_EVER = timedelta(days=36525)
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def tags(listed: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer of /api/tags; directories that cannot be used are left out."""
    return {"models": [_tag(item) for item in listed if not item["problem"]]}


def _tag(item: Mapping[str, Any]) -> dict[str, Any]:
    name = item["name"] + LATEST
    return {
        "name": name,
        "model": name,
        "modified_at": stamp(datetime.fromtimestamp(item["created_s"], UTC)),
        "size": item["bytes"],
        "digest": item["digest"],
        "details": details(item),
    }


def details(item: Mapping[str, Any]) -> dict[str, Any]:
    """What kind of model it is. `format` is tierd's own: the prepared weights are no GGUF file."""
    return {
        "parent_model": "",
        "format": "tierd",
        "family": item["family"],
        "families": [item["family"]],
        "parameter_size": _short(item["parameters"]),
        "quantization_level": item["format"],
    }


def _named(source: str) -> str:
    """Where a model came from, for anybody with a key: of a file its name, not its place on this machine."""
    return source.rpartition("/")[2] if source.startswith("/") else source


def _short(parameters: int) -> str:
    for size, unit in _UNITS:
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return str(parameters)


def show(shown: Mapping[str, Any], template: str, capabilities: list[str]) -> dict[str, Any]:
    """The answer of /api/show, from `Service.show`."""
    spec, family = shown["spec"], shown["family"]
    options = {"num_ctx": shown["context"]} | {
        _OPTIONS.get(name, name): value for name, value in shown["sampling"].items() if value is not None
    }
    parameters = "\n".join(f"{name:<30} {value}" for name, value in options.items())
    return {
        "modelfile": f"# of tierd: this file can't be changed\nFROM {_named(shown['source'])}\n",
        "parameters": parameters,
        "template": template,
        "details": details(shown),
        "model_info": {
            "general.architecture": family,
            "general.basename": shown["name"],
            "general.parameter_count": shown["parameters"],
            f"{family}.context_length": shown["context"],
            f"{family}.embedding_length": spec["hidden"],
            f"{family}.feed_forward_length": spec["intermediate"],
            f"{family}.block_count": spec["num_layers"],
            f"{family}.attention.head_count": spec["heads"],
            f"{family}.attention.head_count_kv": spec["kv_heads"],
            f"{family}.vocab_size": spec["vocab"],
        },
        "capabilities": capabilities,
        "modified_at": stamp(datetime.fromtimestamp(shown["created_s"], UTC)),
    }


_OPTIONS = {"repetition_penalty": "repeat_penalty"}


def capabilities(template: str) -> list[str]:
    """What a chat template gives away: whether it can write tools, and whether the model thinks."""
    found = ["completion"]
    if "tools" in template:
        found.append("tools")
    if "enable_thinking" in template or "<think>" in template:
        found.append("thinking")
    return found


def ps(engines: list[dict[str, Any]], listed: list[dict[str, Any]], ctx: int, now: datetime) -> dict[str, Any]:
    """The answer of /api/ps, from `Service.ps` and `Service.models`. `ctx`: the context of the settings, or 0."""
    models = {item["name"]: item for item in listed if not item["problem"]}
    running = [engine for engine in engines if engine["model"] in models]
    return {"models": [_running(engine, models[engine["model"]], ctx, now) for engine in running]}


def _running(engine: Mapping[str, Any], item: Mapping[str, Any], ctx: int, now: datetime) -> dict[str, Any]:
    left_s = engine["expires_in_s"]
    # "Never" has no spelling of its own: a time that nobody lives to see, as Ollama does it.
    expires = now + (_FOR_EVER if left_s is None else timedelta(seconds=left_s))
    name = item["name"] + LATEST
    return {
        "name": name,
        "model": name,
        "size": max(engine["rss_bytes"], item["bytes"]),
        "size_vram": 0,  # nothing of it lies on a card
        "digest": item["digest"],
        "details": details(item),
        "expires_at": stamp(expires),
        "context_length": ctx or item["context"],
    }


def pulling(step: Mapping[str, Any], ref: str) -> dict[str, Any]:
    """A line of /api/pull, from a step of a pull."""
    if "name" in step:
        return {"status": "success"}
    if step["stage"] == "download":
        # Clients draw one bar for each digest.
        return {"status": f"pulling {ref}", "digest": ref, "total": step["total"], "completed": step["done"]}
    status = step.get("text") or _STAGES.get(step["stage"], step["stage"])
    return {"status": status, "total": step["total"], "completed": step["done"]}


_STAGES = {"check": "verifying digest", "unpack": "unpacking", "import": "preparing", "unchanged": "up to date"}

"""schemathesis against a running daemon: `run_schemathesis.py URL PHASES EXAMPLES` prints as JSON what it found.

A process of its own: under pytest each of its modules would be rewritten on import, which takes seconds.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any
from zlib import crc32

import schemathesis
from schemathesis.engine import Status, from_schema
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished

GENERATING = ("/chat", "/completions", "/messages", "/responses", "/generate")
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
MOST = 8


def short(value: Any) -> Any:
    """A body that asks for few tokens: whoever asks for very many gets as many as the context holds."""
    match value:
        case dict():
            bound = {name: MOST for name in LENGTHS if type(value.get(name)) is int and value[name] > MOST}
            return {name: short(inner) for name, inner in value.items()} | bound
        case list():
            return [short(inner) for inner in value]
        case _:
            return value


def answerable(value: Any) -> Any:
    """A body with the texts that must be one of a few, so that it comes further than to the first of its checks."""
    match value:
        case {"model": str()}:
            return {**{name: answerable(inner) for name, inner in value.items()}, "model": "alpha"}
        case {"role": str()}:
            return {**value, "role": "user"}
        case dict():
            return {name: answerable(inner) for name, inner in value.items()}
        case list():
            return [answerable(inner) for inner in value]
        case _:
            return value


def run(url: str, phases: list[str], examples: int) -> tuple[Counter[int], dict[str, str]]:
    """How often which status came, and one example of each kind of finding.

    What is refused though the document allows it is none: that a model is there, that a number is in its range, that a
    conversation is no empty one, a schema can't say or does not.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=schemathesis.Config())
    schema.config.phases.update(phases=phases)
    schema.config.generation.update(max_examples=examples, deterministic=True, database="none")
    schema.config.checks.update(included_check_names=["all"], excluded_check_names=["positive_data_acceptance"])
    schema.config.update(request_timeout=20, continue_on_failure=True)

    @schema.hook
    def map_body(context: Any, body: Any) -> Any:
        if not context.operation.path.endswith(GENERATING):
            return body
        return short(answerable(body) if crc32(repr(body).encode()) % 2 else body)

    seen: Counter[int] = Counter()
    found: dict[str, str] = {}
    for event in from_schema(schema).execute():
        if isinstance(event, FatalError | NonFatalError):
            raise RuntimeError(event)
        if not isinstance(event, ScenarioFinished):
            continue
        seen.update(one.response.status_code for one in event.recorder.interactions.values() if one.response)
        for checks in event.recorder.checks.values():
            for check in checks:
                if check.status is Status.FAILURE and (info := check.failure_info):
                    found[f"{event.recorder.label}: {check.name}"] = f"{info.failure}\n{info.code_sample}"
    return seen, found


if __name__ == "__main__":
    seen, found = run(sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]))
    print(json.dumps({"seen": seen, "found": found}))

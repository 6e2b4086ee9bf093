"""Vectors of texts, as every door asks for them: inputs to calls of an engine, again when it dies, and what came back.

A vector depends on its input alone, so a call that an engine took with it is simply made once more.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tierd.daemon.admission import Place
from tierd.daemon.errors import BadRequest, EngineFailed, TierdError
from tierd.daemon.limits import MAX_TOKEN_ID
from tierd.daemon.metrics import Metrics
from tierd.daemon.stream import LOAD_TIMEOUT_S
from tierd.daemon.supervisor import Model, Supervisor

Input = str | tuple[int, ...]  # a text, or token ids

MAX_INPUTS = 2048  # of one request, as OpenAI has it
MAX_CALL_INPUTS = 64  # that an engine gets at once: what a death costs, and what one frame of vectors holds
MAX_CALL_BYTES = 1 << 20  # of text in it; one input alone may have more
CALL_TIMEOUT_S = 3600.0  # one input may be a context of 100,000 tokens on a slow machine
TRIES = 3  # an engine that dies takes the call with it, whoever's fault it was
_TOKEN_BYTES = 4


class Vectors(NamedTuple):
    """One for each input, float32 and of unit length, and the tokens of all inputs."""

    vectors: list[array[float]]
    prompt_tokens: int
    cached_tokens: int


def check(inputs: Sequence[Input]) -> None:
    """Raises BadRequest for what no engine has to look at."""
    if not inputs:
        raise BadRequest("input is empty", param="input")
    if len(inputs) > MAX_INPUTS:
        raise BadRequest(f"input has {len(inputs)} entries, at most {MAX_INPUTS} are allowed", param="input")
    for place, given in enumerate(inputs):
        where = f"input[{place}]"
        if not given:
            raise BadRequest(f"{where} is empty", param="input")
        if not isinstance(given, str) and not all(0 <= token <= MAX_TOKEN_ID for token in given):
            raise BadRequest(f"{where} holds a number that is no token id", param="input")


class Embeddings:
    """They are made here, and told to the metrics. Threading: for one event loop."""

    def __init__(self, supervisor: Supervisor, metrics: Metrics) -> None:
        self._supervisor = supervisor
        self._metrics = metrics

    async def run(
        self, model: Model, inputs: Sequence[Input], place: Place, door: str, truncate: bool, priority: int
    ) -> Vectors:
        """The vectors of inputs that were checked. Raises what an engine answers, EngineFailed after the last try."""
        outcome, usage = "aborted", dict[str, int]()
        given = {
            "truncate": truncate, "tenant": place.tenant, "quota_pages": place.allowance.pages, "priority": priority
        }  # fmt: skip
        try:
            found = await self._vectors(model, inputs, given)
            outcome = "done"
            usage = {"prompt_tokens": found.prompt_tokens, "cached_tokens": found.cached_tokens}
            return found
        except TierdError as exc:
            outcome = "refused" if exc.status < 500 else "failed"
            raise
        finally:
            self._metrics.ended(door, outcome, usage, deaths=0, ttft_s=None)

    async def _vectors(self, model: Model, inputs: Sequence[Input], given: dict[str, Any]) -> Vectors:
        vectors: list[array[float]] = []
        prompt_tokens = cached_tokens = 0
        for part in _parts(inputs):
            found = await self._call(model, {"inputs": part, "first": len(vectors), **given})
            vectors += [array("f", one) for one in found["vectors"]]
            prompt_tokens += found["usage"]["prompt_tokens"]
            cached_tokens += found["usage"]["cached_tokens"]
        return Vectors(vectors, prompt_tokens, cached_tokens)

    async def _call(self, model: Model, args: dict[str, Any]) -> dict[str, Any]:
        tries = 0
        while True:
            engine = await self._supervisor.acquire(model, LOAD_TIMEOUT_S)
            try:
                return await engine.call("embed", args, CALL_TIMEOUT_S)
            except EngineFailed:
                tries += 1
                if tries == TRIES:
                    raise


def _parts(inputs: Sequence[Input]) -> Iterator[list[Input]]:
    """The inputs in order, in calls of a bounded size."""
    part: list[Input] = []
    size_bytes = 0
    for given in inputs:
        more_bytes = len(given) * (1 if isinstance(given, str) else _TOKEN_BYTES)
        if part and (len(part) == MAX_CALL_INPUTS or size_bytes + more_bytes > MAX_CALL_BYTES):
            yield part
            part, size_bytes = [], 0
        part.append(given)
        size_bytes += more_bytes
    yield part


def shortened(vector: array[float], dimensions: int | None) -> array[float]:
    """The first `dimensions` values of a vector, of unit length again. Raises BadRequest when it has fewer."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if not 1 <= dimensions < len(vector):
        what = f"dimensions must be from 1 to the model's {len(vector)}, not {dimensions}"
        raise BadRequest(what, param="dimensions")
    first = vector[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in first))
    return array("f", (x / length for x in first)) if length else first

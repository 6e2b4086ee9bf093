"""What holds of every memory mode that leaves prompts exact: random lives, streamed weights, and what comes after."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.daemon.engine.fakes import expected
from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tests.daemon.engine.model.test_weights import least_bytes
from tests.daemon.engine.model.test_weights import live as live_weights
from tests.daemon.engine.rig import Rig
from tests.daemon.engine.test_bounded_live import pages, prompt, said


def live_at_random(seed: int, kv_mode: str, answer: Callable[[Sequence[int], int], list[int]], most: int) -> None:
    """In a mode and not, texts that begin alike, in little memory; afterwards each text once more, exactly.

    `answer`: so many tokens after a prompt in this mode, `most` at most.
    """
    chance = random.Random(seed)
    rig = Rig(
        slots=chance.choice((30, 45)), host=chance.choice((0, 9)), store=chance.choice((0, 90)), max_streams=3,
        max_rows=chance.choice((8, 16)),
    )  # fmt: skip
    wanted: dict[int, list[int]] = {}
    texts: dict[int, list[int]] = {}
    for number in range(1, 6):
        tokens = [chance.choice((1, 2)) if place > 60 else place for place in range(chance.randint(1, 90))]
        bounded, count = chance.random() < 0.6, chance.randint(1, most)
        wanted[number] = answer(tokens, count) if bounded else expected(tokens, count)
        texts[number] = [*tokens, *wanted[number]]
        rig.submit(number, tokens, count, kv_mode=kv_mode if bounded else None, priority=chance.randint(0, 2))
        rig.turn(chance.randint(0, 9))
        rig.disturb(number, chance)
    rig.run()
    for number, found in wanted.items():
        if rig.terminal(number) == ["done"]:
            assert rig.tokens(number) == found
    for number, text in texts.items():
        rig.submit(100 + number, text, 4)
        rig.run()
        assert rig.tokens(100 + number) == expected(text, 4)


def check_streamed_weights(directory: Path, wanted: list[dict[str, Any]], context: int) -> None:
    """They change nothing."""
    model = prepare(reference("llama", num_hidden_layers=6, max_position_embeddings=context), directory / "model")
    with live_weights(model, directory / "whole", None) as live:
        right = said(live, wanted)
    with live_weights(model, directory / "streamed", least_bytes(model)) as live:
        assert live.engine.weights.streams and said(live, wanted) == right


def check_exact_after(
    model: Path, directory: Path, seed: int, ask: dict[str, Any], lengths: tuple[int, int], kept: Callable[[int], int]
) -> None:
    """After an answer an exact request has the tokens of a cold one and, to the last bit, what every page under a key
    holds. `lengths`: of the prompt. `kept`: the tokens of one that are found."""
    chance = random.Random(seed)
    kv_format = chance.choice(("fp32", "fp32", "k8v4"))
    tokens = prompt(seed, chance.randint(*lengths))
    with Live(model, directory / "used", device=100, nvme=200, kv_format=kv_format) as live:
        (answer,) = said(live, [ask | {"tokens": tokens}])
        again = {"tokens": [*tokens, *answer], "max_tokens": 8}
        ((warm, end),) = live.run([again])
        assert end.data["usage"].cached_tokens == kept(len(tokens))
        used = pages(live)
    with Live(model, directory / "cold", device=100, nvme=0, kv_format=kv_format) as live:
        assert said(live, [again])[0] == warm
        assert used == pages(live) and len(used) >= 4

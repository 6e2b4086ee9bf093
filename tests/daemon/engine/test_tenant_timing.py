"""Whether time tells one tenant what another one asked: CVE-2025-46570."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.daemon.engine.live import Live

TRIALS = 500
PROMPT_TOKENS = 100


def kolmogorov_smirnov(one: Sequence[float], other: Sequence[float]) -> float:
    """The chance of two samples that are at least as different, if both come from one distribution (asymptotic)."""
    values = sorted([(value, 0) for value in one] + [(value, 1) for value in other])
    seen, distance = [0, 0], 0.0
    for place, (value, which) in enumerate(values):
        seen[which] += 1
        if place + 1 == len(values) or values[place + 1][0] != value:
            distance = max(distance, abs(seen[0] / len(one) - seen[1] / len(other)))
    root = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    x = (root + 0.12 + 0.11 / root) * distance
    chance = 2.0 * sum((-1) ** (k - 1) * math.exp(-2.0 * k * k * x * x) for k in range(1, 101)) if x > 0.2 else 1.0
    return min(max(chance, 0.0), 1.0)


def test_the_measure_tells_distributions_apart() -> None:
    rng = random.Random(4)
    same = [[rng.gauss(0, 1) for _ in range(500)] for _ in range(20)]
    chances = [kolmogorov_smirnov(one, other) for one, other in zip(same[::2], same[1::2], strict=True)]
    assert sum(chance > 0.1 for chance in chances) >= 7 and min(chances) > 0.001
    assert kolmogorov_smirnov(same[0], [value + 0.3 for value in same[1]]) < 0.01
    assert kolmogorov_smirnov([1.0] * 50, [1.0] * 50) == 1.0


@pytest.mark.long
def test_a_prefix_of_another_tenant_takes_as_long_as_one_nobody_had(tmp_path: Path) -> None:
    from tests.daemon.engine.families import CONTEXT, VOCAB, prepare, reference  # torch: for this test alone

    model_dir = prepare(reference("llama"), tmp_path)
    rng = random.Random(7)
    assert PROMPT_TOKENS < CONTEXT

    def prompt() -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]

    with Live(model_dir, tmp_path / "cache", device=24 * TRIALS, nvme=0) as engine:

        def ttft_ms(tokens: list[int], tenant: str) -> tuple[float, int]:
            [(_, end)] = engine.run([{"tokens": tokens, "tenant": tenant, "max_tokens": 1}])
            return end.data["timings"].ttft_ms, end.data["usage"].cached_tokens

        def trials() -> tuple[list[float], list[float], list[float]]:
            """Times of prompts that another tenant had just asked, that nobody had, and that the asker had itself."""
            theirs, unseen, own = [], [], []
            for _ in range(TRIALS):
                known = prompt()
                ttft_ms(known, "key:victim")
                asked = [(theirs, known), (unseen, prompt())]
                rng.shuffle(asked)
                for found, tokens in asked:
                    took_ms, hit = ttft_ms(tokens, "key:spy")
                    assert hit < 16  # a few first tokens of an earlier prompt of its own
                    found.append(took_ms)
                took_ms, hit = ttft_ms(known, "key:victim")
                assert hit >= PROMPT_TOKENS - 16
                own.append(took_ms)
            return theirs, unseen, own

        for _ in range(20):
            ttft_ms(prompt(), "warm-up")
        for _ in range(2):  # honest samples fall below 0.01 once in a hundred runs; a real difference gives 1e-7
            theirs, unseen, own = trials()
            chance = kolmogorov_smirnov(theirs, unseen)
            print(f"p = {chance:.3f}; shared: {kolmogorov_smirnov(theirs, own):.3g}")
            assert kolmogorov_smirnov(theirs, own) < 0.01  # what is shared can be told: the measure would have seen it
            if chance > 0.01:
                return
    raise AssertionError(f"p = {chance:.4f}, twice")

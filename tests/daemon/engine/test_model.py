"""The default model: greedy tokens against transformers' own class, wherever the pages come from."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemon.engine.live import Live
from tests.reference_model import load_reference
from tierd.daemon.engine.tokens import Vocabulary

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

TEXTS = (
    "What is a page table?",
    "Write a short poem about the sea.",
    "def fibonacci(n):\n    ",
    "The capital of France is Paris. The capital of Italy is",
    "List three uses of a hash map.",
    "Explain TCP slow start to a child.",
    "Once upon a time in a small village",
    "SELECT name, count(*) FROM users",
    "Translate to German: good morning",
    "Why is the sky blue?",
    "import numpy as np\n",
    "Dear Sir or Madam,",
    "The three laws of robotics are",
    "How do I boil an egg?",
    "1, 1, 2, 3, 5, 8,",
    "In 1969, the first humans",
    "A recipe for pancakes:\n1.",
    "Summarize: tiers of memory trade size for speed.",
    "Die Katze sitzt auf",
    "\u65e5\u672c\u306e\u9996\u90fd\u306f",
)


@cache
def reference(model_dir: Path) -> Any:
    return load_reference(model_dir)


def check_greedy(model_dir: Path, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the likeliest one, to transformers' model with the very same weights, after all before it.

    So these are its greedy tokens, by induction; one pass over them takes a tenth of generating them.
    """
    with torch.no_grad():
        logits = reference(model_dir)(torch.tensor([prompt + tokens[:-1]])).logits[0]
    assert tokens == logits[len(prompt) - 1 :].argmax(dim=1).tolist()


@pytest.fixture
def prompts(model_dir: Path) -> list[list[int]]:
    vocabulary = Vocabulary.load(model_dir / "tokenizer.json")
    # Long enough for some full pages each.
    return [vocabulary.encode(f"You are a helpful assistant, and you answer well.\n\nQuestion {number}: {text}\n" * 2)
            for number, text in enumerate(TEXTS)]  # fmt: skip


def check_everywhere(model_dir: Path, cache_dir: Path, prompts: list[list[int]], count: int) -> None:
    submits = [{"tokens": prompt, "max_tokens": count} for prompt in prompts]
    wanted: list[list[int]] = []

    def same(found: list[Any], where: str) -> list[Any]:
        for number, ((tokens, end), right) in enumerate(zip(found, wanted, strict=True)):
            assert end.ev == "done", end
            assert tokens == right, f"prompt {number} {where}"
        return [end.data for _tokens, end in found]

    with Live(model_dir, cache_dir, device=96, host=0, nvme=2048) as live:
        alone = [live.run([submit])[0] for submit in submits]
        wanted += [tokens for tokens, _end in alone]
        for prompt, tokens in zip(prompts, wanted, strict=True):
            assert len(tokens) == count
            check_greedy(model_dir, prompt, tokens)
        cold = same(alone, "cold, alone")
        assert all(data["usage"].prompt_tokens >= data["usage"].cached_tokens for data in cold)
        warm = same([live.run([submit])[0] for submit in submits[:3]], "warm") if len(submits) <= 3 else []
        assert all(data["timings"].hit_device > 0 for data in warm)
        batches = [submits[start : start + 8] for start in range(0, len(submits), 8)]
        same([result for batch in batches for result in live.run(batch)], "in batches")
        live.flush()
        live.clear_device()
        stored = same([live.run([submit])[0] for submit in submits], "from the store")
        assert all(data["timings"].hit_nvme > 0 for data in stored)
        live.flush()
    with Live(model_dir, cache_dir, device=48, host=512, nvme=2048, max_streams=4) as live:
        reopened = same(live.run(submits), "after reopening, few pages")
        # What several prompts share comes up once; then it is a hit on the device.
        assert sum(data["timings"].hit_nvme for data in reopened) > 0
        assert all(data["timings"].recomputed <= 16 for data in reopened)
        live.clear_device()
        lower = same([live.run([submit])[0] for submit in submits], "from CPU memory")
        assert sum(data["timings"].hit_host for data in lower) > 0
        assert live.engine.pager.check() == []


def test_three_prompts(model_dir: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    check_everywhere(model_dir, tmp_path, prompts[:3], 24)


@pytest.mark.long
def test_twenty_prompts(model_dir: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    check_everywhere(model_dir, tmp_path, prompts, 64)


def test_a_chat_turn_computes_only_what_is_new(model_dir: Path, tmp_path: Path) -> None:
    with Live(model_dir, tmp_path) as live:
        first = [("user", "What is a page table? Say it in one sentence.")]
        ((tokens, end),) = live.run([{"messages": first, "max_tokens": 40, "ignore_eos": False}])
        text = live.engine.intake._vocabulary.text(tokens)
        second = [*first, ("assistant", text), ("user", "And a TLB?")]
        ((_, again),) = live.run([{"messages": second, "max_tokens": 4}])
    usage, before = again.data["usage"], end.data["usage"]
    # All that the first turn computed is there: its prompt and its answer, all but the last drawn token.
    assert usage.cached_tokens >= before.prompt_tokens + before.completion_tokens - 1
    assert again.data["timings"].recomputed == usage.prompt_tokens - usage.cached_tokens

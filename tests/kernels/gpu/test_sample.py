"""sample: the twin's token, or a neighbour of it where rounding decides; cuts and ties exactly; what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.cases import few_examples
from tierd.kernels import reference
from tierd.kernels.gpu.sample import NO_TOKEN, sample


def run(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, draws: list[float]
) -> list[int]:
    """One row of logits, drawn from with each of `draws`."""
    rows = len(draws)
    return sample(
        logits.expand(rows, -1).contiguous(), torch.full((rows,), temperature), torch.full((rows,), top_k).int(),
        torch.full((rows,), top_p), torch.full((rows,), min_p), torch.tensor(draws),
    ).tolist()  # fmt: skip


@few_examples
@given(
    vocab=st.sampled_from([1, 2, 100, 4097]), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]), top_k=st.sampled_from([0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 0.0]), min_p=st.sampled_from([0.0, 0.05, 1.0]),
    draw=st.sampled_from([0.0, 0.3, 0.77, 0.999]), size=st.sampled_from([1.0, 10.0]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_like_the_twin(
    vocab: int, dtype: torch.dtype, temperature: float, top_k: int, top_p: float, min_p: float, draw: float,
    size: float, seed: int,
) -> None:  # fmt: skip
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)
    [ours] = run(logits, temperature, top_k, top_p, min_p, [draw])
    if temperature == 0 or top_k == 1:
        assert ours == int(logits.float().argmax())
        return
    kept = reference.kept_mass(logits, temperature, top_k, top_p, min_p)
    assert kept[ours] > 0
    cumulative = kept.cumsum(0) / kept.sum()
    # fp32 sums of some thousand terms.
    assert cumulative[ours] >= draw - 1e-5
    assert cumulative[ours] - kept[ours] / kept.sum() <= draw + 1e-5


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (3, 1.0, 0.0, {0, 1, 2}),  # two of the four equals, the lower ids
        (0, 0.5, 0.0, {0, 1}),  # 2 + 1 of 6 is half exactly
        (0, 0.6, 0.0, {0, 1, 2}),
        (4, 0.7, 0.0, {0, 1, 2}),  # of 5: 2 + 1 + 1 pass 3.5
        (0, 1.0, 0.6, {0}),
        (0, 0.0, 0.0, {0}),
    ],
)
def test_cuts_fall_between_equals(top_k: int, top_p: float, min_p: float, kept: set[int]) -> None:
    logits = torch.tensor([math.log(2.0), 0, 0, 0, 0, -math.inf])
    share = 2 / (len(kept) + 1)  # of token 0
    first, second, last = run(logits, 1.0, top_k, top_p, min_p, [share - 0.01, min(share + 0.01, 0.999), 0.999])
    assert (first, second, last) == (0, min(1, max(kept)), max(kept))


def test_rows_do_not_touch_one_another() -> None:
    logits = torch.randn((4, 50), generator=torch.Generator().manual_seed(0))
    logits[1, 7], logits[2, 3] = math.nan, math.inf
    logits[3] = -math.inf
    ones, zeros = torch.ones(4), torch.zeros(4)
    tokens = sample(logits, ones, torch.zeros(4).int(), ones, zeros, zeros + 0.5)
    assert tokens.tolist()[1:] == [NO_TOKEN] * 3
    assert tokens.tolist() == reference.sample(logits, ones, zeros.int(), ones, zeros, zeros + 0.5).tolist()


@pytest.mark.parametrize(
    ("logits", "temperatures", "message"),
    [
        (torch.zeros(2, 0), torch.ones(2), "logits: a row must hold neighbours"),
        (torch.zeros(5, 2).T, torch.ones(2), "logits: a row must hold neighbours"),
        (torch.zeros(2, 5), torch.ones(3), r"temperatures: expected shape \[2\], got \[3\]"),
        (torch.zeros(2, 5), torch.ones(2).double(), "temperatures: expected float32, got float64"),
    ],
)
def test_refuses(logits: torch.Tensor, temperatures: torch.Tensor, message: str) -> None:
    two = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        sample(logits, temperatures, two.int(), two, two, two)

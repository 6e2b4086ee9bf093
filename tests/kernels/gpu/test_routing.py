"""routing: the experts of rows and their shares, rows grouped by expert; what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gpu.cases import few_examples, many_examples, run_poisoned
from tierd.kernels import reference
from tierd.kernels.gpu.routing import NO_EXPERT, HostGroups, Tiling, group, plan_group, plan_route, route


@few_examples
@given(
    rows=st.sampled_from([0, 1, 5]), experts=st.sampled_from([1, 4, 12, 32]), hidden=st.sampled_from([32, 130, 200]),
    used=st.integers(1, 4), dtype=st.sampled_from([torch.float32, torch.bfloat16]), renormalized=st.booleans(),
    with_bias=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_route_is_softmax_and_the_most_probable(
    rows: int, experts: int, hidden: int, used: int, dtype: torch.dtype, renormalized: bool, with_bias: bool, seed: int
) -> None:
    used = min(used, experts)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, hidden), generator=generator).to(dtype)
    router = torch.randn((experts, hidden), generator=generator) / math.sqrt(hidden)
    bias = torch.randn(experts, generator=generator) if with_bias else None
    found = run_poisoned(plan_route(x, router, bias, used, renormalized))
    logits = x.double() @ router.double().T
    chosen, shares = reference.route(logits if bias is None else logits + bias, used, renormalized)
    assert torch.equal(found.experts.long(), chosen)
    torch.testing.assert_close(found.shares.double(), shares, rtol=1e-5, atol=1e-6)


def test_of_equal_experts_the_first_and_rows_of_any_company() -> None:
    router = torch.zeros(6, 32)
    router[4] = 1.0
    x = torch.ones(5, 32)
    assert route(x, router, None, 3, True).experts.tolist() == [[4, 0, 1]] * 5
    x = torch.randn((5, 200), generator=torch.Generator().manual_seed(0))
    router = torch.randn((6, 200), generator=torch.Generator().manual_seed(1))
    together = route(x, router, None, 3, True)
    for row in range(5):
        alone = route(x[row : row + 1], router, None, 3, True)
        assert torch.equal(alone.shares[0], together.shares[row])


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("renormalized", [True, False])
def test_what_is_no_number_goes_to_some_expert_and_stays_in_its_row(what: float, renormalized: bool) -> None:
    x, router = torch.ones(2, 32), torch.eye(4, 32)
    x[1, 2] = what
    found = route(x, router, None, 2, renormalized)
    assert found.experts[0].tolist() == [0, 1] and found.shares[0].isfinite().all()
    assert 0 <= int(found.experts[1].min()) <= int(found.experts[1].max()) < 4
    assert len(set(found.experts[1].tolist())) == 2
    # All router logits of the row are infinite or no number, for 0 * inf is none.
    assert found.shares[1].isnan().all()


GROUPED = given(
    rows=st.sampled_from([0, 1, 3, 40, 300]), experts=st.sampled_from([1, 3, 8, 40]), used=st.integers(1, 4),
    tile_rows=st.sampled_from([16, 64]), skew=st.sampled_from([0.0, 3.0]), seed=st.integers(0, 2**31),
)  # fmt: skip


@few_examples
@GROUPED
def test_groups_are_those_of_the_host(**case: Any) -> None:
    compare_groups(**case)


@pytest.mark.long
@many_examples
@GROUPED
def test_groups_are_those_of_the_host_often(**case: Any) -> None:
    compare_groups(**case)


def compare_groups(rows: int, experts: int, used: int, tile_rows: int, skew: float, seed: int) -> None:
    used, rng = min(used, experts), np.random.default_rng(seed)
    weights = rng.random((rows, experts)) - skew * np.arange(experts) / experts
    chosen = np.argsort(weights, axis=1)[:, :used].astype(np.int32)
    tiling = Tiling(tile_rows, rows * used, experts)
    found = run_poisoned(plan_group(torch.from_numpy(np.ascontiguousarray(chosen)), tiling))
    host = HostGroups.of(chosen)
    assert found.slot_pairs.tolist() == host.slot_pairs.tolist()
    twin = reference.group(torch.from_numpy(chosen), experts)
    assert found.slot_pairs.tolist() == [pair for pairs in twin for pair in pairs]
    filled = found.tiles[found.tiles[:, 0] != NO_EXPERT]
    assert filled.tolist() == host.tiles(list(host.spans), tile_rows).tolist()
    assert {expert: host.pairs_of(expert).tolist() for expert in host.spans} == {
        expert: pairs for expert, pairs in enumerate(twin) if pairs
    }


def test_few_pairs_have_few_tiles() -> None:
    assert Tiling(16, 8, 128).tiles == 8 and Tiling(16, 512, 128).tiles == 160 and Tiling(16, 2, 8).tiles == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: route(torch.zeros(2, 32), torch.zeros(4, 64), None, 2, True), r"x: expected shape \[any, 64\]"),
        (lambda: route(torch.zeros(2, 64), torch.zeros(4, 64).half(), None, 2, True), "router: expected float32"),
        (lambda: route(torch.zeros(2, 64), torch.zeros(4, 64), torch.zeros(3), 2, True), r"bias: .* \[4\], got \[3\]"),
        (lambda: route(torch.zeros(2, 64), torch.zeros(4, 64), None, 5, True), "1 to 4 experts, got 5"),
        (lambda: group(torch.zeros(2, 2, dtype=torch.int32), Tiling(16, 3, 4)), "4 pairs, the tiling is for 3"),
    ],
)
def test_refuses(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

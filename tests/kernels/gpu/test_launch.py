"""launch: plans and checks; every kernel has a contract that names its twin."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from tests.kernels.gpu.cases import run_poisoned
from tierd.kernels import reference
from tierd.kernels.gpu.fused import plan_swiglu
from tierd.kernels.gpu.launch import Launch, check_contiguous, check_tensor, next_power_of_2

SOURCES = Path(__file__).resolve().parents[3] / "kernels" / "gpu"


def test_every_kernel_names_a_twin_that_is_there() -> None:
    functions = {
        node.name: node
        for path in SOURCES.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    kernels = [name.removeprefix("plan_") for name in functions if name.startswith("plan_")]
    assert len(kernels) >= 11
    for kernel in kernels:
        contract = ast.get_docstring(functions[kernel]) or ""
        twin = re.search(r"Twin: `reference\.(\w+)`", contract)
        assert twin and hasattr(reference, twin[1]), kernel
        assert "Raises ValueError" in contract or "As `gather`" in contract, kernel


def test_a_plan_runs_again_with_new_inputs() -> None:
    gate_up = torch.zeros(2, 8)
    plan = plan_swiglu(gate_up)
    assert run_poisoned(plan).abs().max() == 0
    gate_up.fill_(1.0)
    again = plan.run()
    assert again is plan.result
    assert torch.allclose(again, torch.sigmoid(torch.tensor(1.0)))


def test_an_empty_grid_is_no_launch() -> None:
    Launch(None, (3, 0, 1), {}).run()


@pytest.mark.parametrize(("count", "power"), [(0, 1), (1, 1), (2, 2), (80, 128), (128, 128), (129, 256)])
def test_next_power_of_2(count: int, power: int) -> None:
    assert next_power_of_2(count) == power


def test_checks_name_what_is_wrong() -> None:
    x = torch.zeros(2, 3)
    check_tensor("x", x, [torch.float32], [None, 3], x)
    with pytest.raises(ValueError, match="x: expected float16 or int8, got float32"):
        check_tensor("x", x, [torch.float16, torch.int8], [2, 3])
    with pytest.raises(ValueError, match=r"x: expected shape \[any, 4\], got \[2, 3\]"):
        check_tensor("x", x, [torch.float32], [None, 4])
    with pytest.raises(ValueError, match=r"x: expected shape \[2\], got \[2, 3\]"):
        check_tensor("x", x, [torch.float32], [2])
    with pytest.raises(ValueError, match="x: lies on meta, expected cpu"):
        check_tensor("x", x.to("meta"), [torch.float32], [2, 3], x)
    with pytest.raises(ValueError, match=r"x: must be contiguous, got strides \(1, 3\) for shape \[3, 2\]"):
        check_contiguous("x", x.T)

"""quant: pages from any format to any other, as the twin repacks them; what it refuses."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gpu.cases import aligned, draw, run_poisoned
from tierd.kernels import reference
from tierd.kernels.gpu.pages import base_of
from tierd.kernels.gpu.quant import plan_quant
from tierd.kernels.layout import PageLayout
from tierd.kernels.reference import selected

CPU = torch.device("cpu")


def memory(layout: PageLayout, pages: int = 2) -> torch.Tensor:
    return aligned(pages * layout.record_bytes, torch.uint8).view(pages, layout.record_bytes)


@pytest.mark.parametrize(
    ("source", "target"), [("bf16", "k8v8"), ("fp16", "k4v8"), ("k8v8", "k4v4"), ("k4v8", "bf16"), ("k8v4", "fp8")]
)
def test_like_the_twin(source: str, target: str) -> None:
    generator = torch.Generator().manual_seed(3)
    layouts = [PageLayout(2, 1, 32, name) for name in (source, target)]
    old, ours, theirs = memory(layouts[0]), memory(layouts[1]), memory(layouts[1])
    addresses = [[m[page].data_ptr() for page in range(2)] for m in (old, ours, theirs)]
    for layer in range(2):
        for page in range(2):
            rows = [draw((16, 1, 32), torch.float32, generator) for _ in range(2)]
            reference.write(*rows, [old], layouts[0], layer, [(addresses[0][page], 0, 0, 16)])
    lengths = torch.tensor([16, 5], dtype=torch.int32)
    tensors = [torch.tensor(addresses[n]) for n in range(2)]
    bases = [base_of(layout, CPU) for layout in layouts]
    run_poisoned(plan_quant(tensors[0], bases[0], layouts[0], tensors[1], bases[1], layouts[1], lengths))
    selected.quant(addresses[0], [old], layouts[0], addresses[2], [theirs], layouts[1], lengths.tolist())
    for layer in range(2):
        for page, length in enumerate(lengths.tolist()):
            for mine, twin in zip(
                reference.page_planes([ours], addresses[1][page], layouts[1], layer),
                reference.page_planes([theirs], addresses[2][page], layouts[1], layer),
                strict=True,
            ):
                difference = (mine.double() - twin.double())[:, :length].abs()
                # A number between two codes may go either way: a step of 4 bits is about a quarter here.
                assert difference.max() < (0.6 if "4" in target else 0.1 if target == "fp8" else 0.06)
                assert float((difference > 0.01).double().mean()) < 0.03
    assert not ours[1, layouts[1].payload_bytes :].any()


def test_refuses_pages_of_another_shape() -> None:
    layouts = [PageLayout(2, 1, 32, "bf16"), PageLayout(2, 2, 32, "k8v8")]
    none = torch.zeros(0, dtype=torch.int64)
    bases = [base_of(layout, CPU) for layout in layouts]
    with pytest.raises(ValueError, match="the pages differ in kv_heads"):
        plan_quant(none, bases[0], layouts[0], none, bases[1], layouts[1])

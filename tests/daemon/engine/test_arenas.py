"""arenas: what exact copies take is what the plan says, and what can't be is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tierd.daemon.engine import arenas
from tierd.daemon.engine.backend import Backend, CpuBackend
from tierd.daemon.engine.scheduler import Limits
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import BadConfig
from tierd.daemon.kv_mode import Kind
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.plan.workspace import engine_bytes, exact_bytes
from tierd.kernels.layout import PageLayout

SPEC = ModelSpec(
    family="llama", num_layers=3, hidden=72, intermediate=100, heads=6, kv_heads=2, head_dim=16, vocab=101, context=512,
    norm_eps=1e-5, tied=True,
)  # fmt: skip
LAYOUT = PageLayout(3, 2, 16, "k8v4")


def config(**more: Any) -> EngineConfig:
    sizes = {"device_bytes": 1 << 20, "host_bytes": 0, "nvme_bytes": 0, "nvme_min_free_bytes": 0}
    return EngineConfig("m", "c", **sizes, threads=1, kv_format="k8v4", context=0, **more)


def backend(*modes: Kind) -> Backend:
    """The CPU's, with other modes."""
    cpu = CpuBackend(1)
    same = {name: getattr(cpu, name) for name in ("ring", "copy", "copy_format", "device_block")}
    return cast(Backend, SimpleNamespace(modes=modes, **same))


def test_copies_take_what_the_plan_says() -> None:
    given = config(kv_exact_first=32, kv_exact_last=64, max_streams=3, max_batch_rows=50)
    found = arenas.ladders(given, LAYOUT, Limits(50, 3, 16), backend(Kind.LADDER))
    assert found is not None
    planned = exact_bytes(SPEC, "k8v4", (32, 64), 50, 3)
    copies, nowhere = found.ladders.pages.statistics().total_bytes, found.nowhere
    assert copies == (3 * (2 + 4 + 2) + 4) * PageLayout(3, 2, 16, "fp16").record_bytes
    assert planned == copies + nowhere.nbytes == copies + LAYOUT.record_bytes
    sizes = {"device_bytes": 1 << 20, "host_bytes": 0, "nvme_bytes": 0, "context": 0, "threads": 1}
    plain, more = (
        engine_bytes(SPEC, kv_format="k8v4", max_batch=50, max_streams=3, ladder=ladder, **sizes).workspace
        for ladder in ((0, 0), (32, 64))
    )
    assert more - plain == planned


def test_there_are_none_unless_asked_for() -> None:
    assert arenas.ladders(config(), LAYOUT, Limits(50, 3, 16), backend()) is None


def test_a_card_refuses_them_by_name() -> None:
    with pytest.raises(BadConfig, match="not there on the card yet") as refused:
        arenas.ladders(config(kv_exact_last=64), LAYOUT, Limits(50, 3, 16), backend(*set(Kind) - {Kind.LADDER}))
    assert refused.value.param == "kv_exact_last" and refused.value.hint

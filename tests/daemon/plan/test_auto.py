"""What `auto` means for a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tierd.daemon.config import Settings
from tierd.daemon.machine import Machine
from tierd.daemon.plan.auto import choose_sizes
from tierd.daemon.plan.known import known_shape
from tierd.daemon.settled import resolve_sizes
from tierd.kernels.layout import PageLayout

GB = 10**9
MACHINE = Machine(24 * GB, 20 * GB, 100 * GB)
SETTINGS = Settings(Path("/m"), Path("/c"), Path("/s"))


def choose(name: str, weights: int, *, context: int = 2048, machine: Machine = MACHINE, **asked: Any) -> Any:
    spec = known_shape(name).spec
    assert spec is not None
    return choose_sizes(dataclasses.replace(SETTINGS, **asked), machine, spec, weights, context, 2)


def test_a_small_model_gets_what_the_machine_says() -> None:
    found = choose("smollm2-135m", 97_000_000)
    assert found.sizes == resolve_sizes(SETTINGS, MACHINE) and found.why == ()


def test_pages_shrink_so_that_weights_stay_in_memory() -> None:
    found = choose("llama-3-8b", 14 * GB)
    usual = resolve_sizes(SETTINGS, MACHINE)
    assert usual.device_bytes + usual.host_bytes > 18 * GB - 14 * GB
    assert 3 * GB < found.sizes.device_bytes + found.sizes.host_bytes < 4 * GB
    assert found.sizes.weights_bytes >= 14 * GB
    assert "less memory" in found.why[0]


def test_pages_grow_until_one_context_fits() -> None:
    spec = known_shape("llama-3-8b").spec
    assert spec is not None
    layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, "fp32")
    found = choose("llama-3-8b", 5 * GB, context=40_000)
    assert found.sizes.device_bytes + found.sizes.host_bytes == 2500 * layout.record_bytes
    assert "one sequence of 40,000 tokens" in found.why[0]


def test_weights_that_fit_nowhere_do_not_starve_the_pages() -> None:
    found = choose("llama-3-70b", 44 * GB)
    usual = resolve_sizes(SETTINGS, MACHINE)
    assert (found.sizes.device_bytes, found.sizes.host_bytes) == (usual.device_bytes, usual.host_bytes)
    assert "read from the disk in every step" in found.why[0]


@pytest.mark.parametrize("asked", [{"device_mem": GB}, {"host_mem": 0}, {"device_mem": 9 * GB, "host_mem": 9 * GB}])
def test_what_was_asked_for_is_taken(asked: dict[str, int]) -> None:
    sizes = choose("llama-3-8b", 14 * GB, **asked).sizes
    assert sizes.device_bytes == asked.get("device_mem", sizes.device_bytes)
    assert sizes.host_bytes == asked.get("host_mem", sizes.host_bytes)


@pytest.mark.parametrize("available", [0, GB // 10, GB, 4 * GB, 16 * GB])
@pytest.mark.parametrize("weights", [0, GB, 10 * GB])
def test_never_more_than_there_is(available: int, weights: int) -> None:
    machine = Machine(24 * GB, available, 100 * GB)
    sizes = choose("llama-3-8b", weights, machine=machine, context=100_000).sizes
    least = resolve_sizes(SETTINGS, machine)
    assert sizes.device_bytes + sizes.host_bytes <= max(available, least.device_bytes + least.host_bytes)
    assert sizes.device_bytes > 0 and sizes.host_bytes >= 0 and sizes.weights_bytes >= 0

"""Sizes on a card: pages and weights share its memory, and nothing is planned from the computer's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.daemon.plan.test_auto import MACHINE, SETTINGS
from tierd.daemon.card_memory import CardMemory
from tierd.daemon.plan.auto import choose_sizes
from tierd.daemon.plan.auto_card import usable_bytes, workspace_bytes
from tierd.daemon.plan.known import known_shape
from tierd.daemon.plan.workspace import exact_bytes
from tierd.kernels.layout import PageLayout

GB = 10**9
CARD = CardMemory("a card", 24 * GB, 22 * GB)


def choose(name: str, weights: int, *, context: int = 2048, card: CardMemory = CARD, **asked: Any) -> Any:
    spec = known_shape(name).spec
    assert spec is not None
    machine = MACHINE._replace(card=card)
    return choose_sizes(dataclasses.replace(SETTINGS, **asked), machine, spec, weights, context, 2)


def test_pages_get_what_weights_leave() -> None:
    found = choose("llama-3-8b", 5 * GB)
    sizes, room = found.sizes, usable_bytes(CARD) - found.card_workspace_bytes
    assert sizes.weights_bytes >= 5 * GB and sizes.device_bytes + 5 * GB == room < CARD.free_bytes
    assert found.why == () and found.card_usable_bytes == usable_bytes(CARD)


def test_weights_that_do_not_fit_leave_pages_a_part() -> None:
    found = choose("llama-3-70b", 40 * GB, context=8192)
    spec = known_shape("llama-3-70b").spec
    assert spec is not None
    layout = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, "bf16")
    assert found.sizes.device_bytes == 512 * layout.record_bytes  # of 16 tokens, in 16 bits
    assert found.sizes.device_bytes + found.sizes.weights_bytes + found.card_workspace_bytes <= usable_bytes(CARD)
    assert found.sizes.host_weights_bytes > 0 and "copied to it in every step" in found.why[-1]


def test_a_long_context_does_not_starve_the_weights() -> None:
    sizes = choose("llama-3-70b", 40 * GB, context=131_072).sizes
    assert sizes.device_bytes < 0.25 * CARD.free_bytes and sizes.weights_bytes > 0.5 * CARD.free_bytes


@pytest.mark.parametrize(
    "asked", [{"device_mem": GB}, {"weights_mem": GB}, {"host_mem": 0}, {"host_weights_mem": 2 * GB}]
)
def test_what_was_asked_for_is_taken(asked: dict[str, int]) -> None:
    sizes = choose("llama-3-8b", 14 * GB, **asked).sizes
    given = {"device_mem": sizes.device_bytes, "weights_mem": sizes.weights_bytes, "host_mem": sizes.host_bytes}
    given["host_weights_mem"] = sizes.host_weights_bytes
    assert given.items() >= asked.items()
    assert sizes.device_bytes + min(sizes.weights_bytes, 14 * GB) <= CARD.free_bytes


@pytest.mark.parametrize("asked", [{"device_mem": 12 * GB}, {"weights_mem": 8 * GB}, {}])
def test_what_others_hold_is_planned_by_nobody(asked: dict[str, int]) -> None:
    free = [choose("llama-3-8b", 8 * GB, card=CARD._replace(free_bytes=size * GB), **asked) for size in (24, 12, 6)]
    for found, size in zip(free, (24, 12, 6), strict=True):
        weights = min(found.sizes.weights_bytes, 8 * GB)
        assert found.sizes.device_bytes + weights + found.card_workspace_bytes <= size * GB
        assert found.later_device_bytes == free[0].sizes.device_bytes >= found.sizes.device_bytes
    if "device_mem" in asked:
        assert free[0].sizes.device_bytes == 12 * GB and free[0].why == ()
        assert free[1].sizes.weights_bytes >= 8 * GB  # pages give first
        assert any("instead of 12.0 GB: other programs hold 12.0 GB of it" in why for why in free[1].why)
    if "weights_mem" in asked:
        assert free[1].sizes.weights_bytes == 8 * GB and free[2].sizes.weights_bytes < 8 * GB


def test_what_is_to_stay_free_for_others_is_not_taken_first() -> None:
    found, gives = choose("llama-3-8b", 5 * GB), choose("llama-3-8b", 5 * GB, yield_device_mem=GB)
    assert found.sizes.device_bytes - gives.sizes.device_bytes == GB  # others hold more than that
    assert gives.later_device_bytes > found.sizes.device_bytes
    alone = choose("llama-3-8b", 5 * GB, yield_device_mem=GB, card=CARD._replace(free_bytes=24 * GB))
    assert alone.sizes.device_bytes == alone.later_device_bytes


def test_more_than_the_whole_card_has_is_left_for_the_engine_to_refuse() -> None:
    assert choose("llama-3-8b", 5 * GB, device_mem=30 * GB).sizes.device_bytes == 30 * GB


def test_a_card_that_others_fill_has_the_least() -> None:
    found = choose("llama-3-8b", 5 * GB, card=CARD._replace(free_bytes=GB))
    assert 64 << 20 <= found.sizes.device_bytes < GB // 4 and 0 <= found.sizes.weights_bytes < GB


def test_without_the_card_the_computer_is_planned_for() -> None:
    spec = known_shape("llama-3-8b").spec
    assert spec is not None
    settings = dataclasses.replace(SETTINGS, card="off")
    found = choose_sizes(settings, MACHINE._replace(card=CARD), spec, 5 * GB, 2048, 2)
    assert found.sizes.host_weights_bytes is None and found.card_usable_bytes == 0
    assert workspace_bytes(spec, 2048, 512, 16) < GB


def test_exact_copies_count_as_workspace() -> None:
    plain, more = (choose("llama-3-8b", 5 * GB, kv_format="k4v4", kv_exact_last=last) for last in (0, 128))
    copies = more.card_workspace_bytes - plain.card_workspace_bytes
    spec = known_shape("llama-3-8b").spec
    assert spec is not None
    asked = dataclasses.replace(SETTINGS, kv_exact_last=128)
    assert copies == exact_bytes(spec, "k4v4", (0, 128), asked.max_batch, asked.max_streams, "bf16") > 0
    assert plain.sizes.device_bytes - more.sizes.device_bytes == copies

"""Memory that is not there is named beforehand, with the number that would do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.daemon.models.test_placement_card import card_model, whole_bytes
from tierd.daemon.engine.memory_check import check_device, check_memory
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import BadConfig
from tierd.daemon.models.placement_card import place_on_card
from tierd.daemon.plan.workspace import exact_bytes

MIB = 1 << 20
MANIFEST = card_model(tied=True)
WHOLE = whole_bytes(MANIFEST)


def config(**sizes: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "device_bytes": 64 * MIB, "host_bytes": 0, "weights_bytes": WHOLE, "host_weights_bytes": 0, "card": True,
    }  # fmt: skip
    return EngineConfig(
        model_dir=str(Path("/m")), cache_dir="/c", nvme_bytes=0, nvme_min_free_bytes=0, threads=1,
        context=0, **{"kv_format": "bf16"} | defaults | sizes,
    )  # fmt: skip


def card(free_bytes: int) -> Any:
    return SimpleNamespace(on_card=True, device_memory=(free_bytes, free_bytes), name="a card", copy_format="bf16")


def test_pages_and_weights_have_to_fit_the_card() -> None:
    check_device(config(), MANIFEST, card(64 * MIB + WHOLE), [])
    with pytest.raises(BadConfig, match="more than the") as caught:
        check_device(config(), MANIFEST, card(40 * MIB + WHOLE), [])
    assert caught.value.hint == "--device-mem 40MiB fits"
    with pytest.raises(BadConfig) as caught:
        check_device(config(), MANIFEST, card(WHOLE - 1), [])
    assert caught.value.hint is not None and "--weights-mem" in caught.value.hint


def test_exact_copies_take_their_part_of_the_card_and_none_of_ram() -> None:
    ladder = config(kv_format="k8v4", kv_exact_first=32, kv_exact_last=32, max_streams=1, max_batch_rows=16)
    copies = exact_bytes(MANIFEST.spec, "k8v4", (32, 32), 16, 1, "bf16")
    assert copies > 0
    check_device(ladder, MANIFEST, card(64 * MIB + WHOLE + copies), [])
    with pytest.raises(BadConfig, match="of exact tokens and"):
        check_device(ladder, MANIFEST, card(64 * MIB + WHOLE + copies - 1), [])
    check_memory(ladder, MANIFEST, 1)


def test_a_card_that_can_not_be_used_after_all_is_told() -> None:
    cpu: Any = SimpleNamespace(on_card=False)
    with pytest.raises(BadConfig, match="was to compute on a card: its driver is too old") as caught:
        check_device(config(), MANIFEST, cpu, ["its driver is too old"])
    assert "--card off" in str(caught.value.hint)


def test_with_a_card_ram_holds_the_hosts_part_alone() -> None:
    check_memory(config(device_bytes=1 << 40), MANIFEST, 1 << 30)
    with pytest.raises(BadConfig, match="host_mem"):
        check_memory(config(host_bytes=2 << 30), MANIFEST, 1 << 30)
    below = place_on_card(MANIFEST, WHOLE - 8 * MIB, None).host_bytes
    streamed = config(weights_bytes=WHOLE - 8 * MIB, host_weights_bytes=None)
    check_memory(streamed, MANIFEST, below)
    with pytest.raises(BadConfig, match="host_weights_mem"):
        check_memory(streamed, MANIFEST, below - 1)


def test_the_least_memory_is_named() -> None:
    with pytest.raises(BadConfig, match="weights_mem of 1 bytes is too little") as caught:
        check_device(config(weights_bytes=1), MANIFEST, card(1 << 30), [])
    assert "--weights-mem" in str(caught.value.hint)
    with pytest.raises(BadConfig, match="host_weights_mem of 1 bytes") as caught:
        check_device(config(weights_bytes=WHOLE - 8 * MIB, host_weights_bytes=1), MANIFEST, card(1 << 30), [])
    assert "--host-weights-mem" in str(caught.value.hint)


def test_copies_that_no_machine_holds_are_refused_before_anything_is_loaded() -> None:
    sizes: dict[str, Any] = {"card": False, "device_bytes": MIB, "weights_bytes": None, "kv_format": "k8v4"}
    check_memory(config(**sizes), MANIFEST, 2 << 20)
    with pytest.raises(BadConfig, match="kv_exact_last of .* more than this machine's memory") as refused:
        check_memory(config(**sizes, kv_exact_last=1 << 20), MANIFEST, 2 << 20)
    assert "--kv-exact-last" in (refused.value.hint or "")


def test_a_hint_names_auto_only_where_it_is_a_value() -> None:
    exact = {"kv_format": "k4v4", "kv_exact_first": 65536, "kv_exact_last": 65536, "card": False, "weights_bytes": None}
    with pytest.raises(BadConfig, match="kv_exact_last of") as caught:
        check_memory(config(**exact), MANIFEST, 64 * MIB)
    assert "auto" not in str(caught.value.hint)
    with pytest.raises(BadConfig, match="device_mem of") as caught:
        check_memory(config(card=False, weights_bytes=None), MANIFEST, MIB)
    assert str(caught.value.hint).endswith(", or auto")

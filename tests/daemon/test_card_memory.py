"""Whether there is a card: by a management library that is made up."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from typing import Any

import pytest

from tierd.daemon.card_memory import CardMemory, probe_card

GB = 10**9


CARDS = {"GPU-5a": "00000000:01:00.0", "GPU-5b": "00000000:41:00.0", "GPU-77": "00000000:81:00.0"}  # in NVML's order


class Nvml:
    """The library, with cards of so much memory. `fails`: a call that it refuses."""

    def __init__(self, capability: tuple[int, int] = (8, 9), fails: str = "", cards: int = 1) -> None:
        self.capability, self.fails, self.open = capability, fails, 0
        self.cards = list(CARDS.items())[:cards]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.fails:
                return 999
            told = getattr(self, "_" + name.removeprefix("nvml").removesuffix("_v2"), lambda *_: None)(*arguments)
            return 6 if told is False else 0  # not found

        return call

    def _Init(self) -> None:
        self.open += 1

    def _Shutdown(self) -> None:
        self.open -= 1

    def _DeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(self.cards)

    def _DeviceGetHandleByIndex(self, index: Any, card: Any) -> bool:
        card._obj.value = index.value + 1
        return index.value < len(self.cards)

    def _DeviceGetHandleByPciBusId(self, bus_id: bytes, card: Any) -> bool:
        found = [n for n, (_, known) in enumerate(self.cards, 1) if known.endswith(bus_id.decode())]
        card._obj.value = found[0] if found else None
        return bool(found)

    def _DeviceGetUUID(self, card: Any, uuid: Any, _size: Any) -> None:
        uuid.value = self.cards[card.value - 1][0].encode()

    def _DeviceGetMemoryInfo(self, card: Any, found: Any) -> None:
        found._obj[0], found._obj[1] = 24 * GB, (21 - card.value) * GB

    def _DeviceGetName(self, _card: Any, name: Any, _size: Any) -> None:
        name.value = b"RTX 4090"

    def _DeviceGetCudaComputeCapability(self, _card: Any, major: Any, minor: Any) -> None:
        major._obj.value, minor._obj.value = self.capability


def unasked(_env: Any) -> str | None:
    raise AssertionError("CUDA need not be asked")


def found(nvml: Nvml, installed: bool = True, first: Any = unasked, **env: str) -> CardMemory | None:
    card = probe_card(lambda _name: nvml, env, lambda _name: installed, first=first)
    assert nvml.open == 0
    return card


def number(card: CardMemory | None) -> int:
    """Of the card, in NVML's order: they have less and less that is free."""
    return -1 if card is None else 20 - card.free_bytes // GB


def test_a_card_and_its_memory() -> None:
    assert found(Nvml()) == CardMemory("RTX 4090", 24 * GB, 20 * GB)


@pytest.mark.parametrize(
    ("shown", "index"), [("GPU-5b", 1), ("GPU-7", 2), ("GPU-77,GPU-5a", 2), ("GPU-5", -1), ("GPU-9", -1)]
)
def test_a_card_by_its_uuid_or_the_beginning_of_it(shown: str, index: int) -> None:
    assert number(found(Nvml(cards=3), CUDA_VISIBLE_DEVICES=shown)) == index
    assert number(found(Nvml(), CUDA_VISIBLE_DEVICES="GPU-5")) == 0


@pytest.mark.parametrize("shown", [None, "0", "1,0"])
def test_among_several_cards_cuda_says_which_is_its_first(shown: str | None) -> None:
    env = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    asked: list[Any] = []

    def first(told: Any) -> str:
        asked.append(told)
        return "0000:81:00.0"  # CUDA's domains have four digits

    assert number(found(Nvml(cards=3), first=first, **env)) == 2 and asked == [env]
    assert found(Nvml(cards=3), first=lambda _env: "0000:99:00.0", **env) is None


def test_where_cuda_does_not_say_the_drivers_order_counts(caplog: pytest.LogCaptureFixture) -> None:
    assert number(found(Nvml(cards=3), first=lambda _env: None, CUDA_VISIBLE_DEVICES="1,0")) == 1
    assert "does not say which card it shows first" in caplog.text
    assert found(Nvml(), CUDA_VISIBLE_DEVICES="1") is None


@pytest.mark.parametrize("shown", ["", "-1"])
def test_cards_that_are_hidden_are_none(shown: str) -> None:
    assert found(Nvml(), CUDA_VISIBLE_DEVICES=shown) is None


@pytest.mark.parametrize(
    "fails",
    ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo"],
)
def test_a_library_that_refuses_is_no_card(fails: str) -> None:
    assert found(Nvml(fails=fails)) is None


def test_a_card_that_is_too_old_or_that_nothing_can_use_is_none() -> None:
    assert found(Nvml((7, 5))) is None
    assert found(Nvml(), installed=False) is None


def test_a_driver_that_hangs_is_no_card(caplog: pytest.LogCaptureFixture) -> None:
    let_go = threading.Event()

    class Hangs(Nvml):
        def _Init(self) -> None:
            let_go.wait(20)

    assert probe_card(lambda _name: Hangs(), {}, lambda _name: True, 0.05) is None
    let_go.set()
    assert "did not answer" in caplog.text


def test_without_the_library_nothing_is_loaded() -> None:
    def missing(_name: str) -> ctypes.CDLL:
        raise OSError("no such file")

    assert probe_card(missing, {}) is None
    code = "import sys; from tierd.daemon.card_memory import probe_card; probe_card(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"

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


class Nvml:
    """The calls of NVML that are needed, for cards of so much memory."""

    def __init__(self, capability: tuple[int, int] = (8, 9), fails: str = "") -> None:
        self.capability, self.fails, self.asked, self.open = capability, fails, "", 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.fails:
                return 999
            getattr(self, "_" + name.removeprefix("nvml").removesuffix("_v2"), lambda *_: None)(*arguments)
            return 0

        return call

    def _Init(self) -> None:
        self.open += 1

    def _Shutdown(self) -> None:
        self.open -= 1

    def _DeviceGetHandleByIndex(self, index: Any, _card: Any) -> None:
        self.asked = str(index.value)

    def _DeviceGetHandleByUUID(self, uuid: bytes, _card: Any) -> None:
        self.asked = uuid.decode()

    def _DeviceGetMemoryInfo(self, _card: Any, found: Any) -> None:
        found._obj[0], found._obj[1] = 24 * GB, 20 * GB

    def _DeviceGetName(self, _card: Any, name: Any, _size: Any) -> None:
        name.value = b"RTX 4090"

    def _DeviceGetCudaComputeCapability(self, _card: Any, major: Any, minor: Any) -> None:
        major._obj.value, minor._obj.value = self.capability


def found(nvml: Nvml, installed: bool = True, **env: str) -> CardMemory | None:
    card = probe_card(lambda _name: nvml, env, lambda _name: installed)
    assert nvml.open == 0
    return card


def test_a_card_and_its_memory() -> None:
    nvml = Nvml()
    assert found(nvml) == CardMemory("RTX 4090", 24 * GB, 20 * GB) and nvml.asked == "0"


@pytest.mark.parametrize(("shown", "asked"), [("1,0", "1"), ("GPU-5", "GPU-5")])
def test_the_card_that_an_engine_would_see_first(shown: str, asked: str) -> None:
    nvml = Nvml()
    assert found(nvml, CUDA_VISIBLE_DEVICES=shown) is not None and nvml.asked == asked


@pytest.mark.parametrize("shown", ["", "-1"])
def test_cards_that_are_hidden_are_none(shown: str) -> None:
    assert found(Nvml(), CUDA_VISIBLE_DEVICES=shown) is None


@pytest.mark.parametrize("fails", ["nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo"])
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

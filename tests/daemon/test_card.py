"""What NVML tells of a card, and what it can't: with a library that is made up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tierd.daemon.card import CardError, CardThread, Nvml

GIB = 1 << 30


Listed = list[tuple[int, int | None]]  # process ids, and bytes


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class Library:
    """`pynvml` with two cards, of which the second has our process 100."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_FunctionNotFound = NotSupported
    nvmlMemory_v2 = 2

    def __init__(self) -> None:
        self.computing: dict[int, Listed] = {0: [(7, GIB)], 1: [(100, 3 * GIB), (8, 2 * GIB), (9, 4 * GIB)]}
        self.drawing: dict[int, Listed] = {0: [], 1: [(8, 2 * GIB), (10, None)]}
        self.count = 2
        self.mig: list[int] | None = None
        self.opened = self.shut = 0
        self.fail: dict[str, Exception] = {}

    def nvmlInit(self) -> None:
        self._may("init")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, card: int, version: int) -> Any:
        self._may("memory")
        assert version == 2
        return SimpleNamespace(total=24 * GIB, free=13 * GIB, used=10 * GIB, reserved=GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, card: int) -> list[Any]:
        self._may("processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.computing[card]]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.drawing[card]]

    def nvmlDeviceGetMigMode(self, card: int) -> list[int]:
        if self.mig is None:
            raise NotSupported("Not Supported")
        return self.mig

    def _may(self, what: str) -> None:
        if what in self.fail:
            raise self.fail[what]


def test_the_card_of_our_processes_is_read() -> None:
    library = Library()
    reading = Nvml(library).read([100, 101])
    assert reading is not None
    assert (reading.total_bytes, reading.free_bytes, reading.ours_bytes) == (24 * GIB, 13 * GIB, 3 * GIB)
    assert reading.others_bytes == 7 * GIB  # unlisted ones too, what the driver keeps not
    assert [(other.pid, other.used_bytes) for other in reading.others] == [(9, 4 * GIB), (8, 2 * GIB), (10, None)]


def test_programs_have_names() -> None:
    library = Library()
    library.computing[1].append((os.getpid(), GIB))
    reading = Nvml(library).read([100])
    assert reading is not None
    names = {other.pid: other.name for other in reading.others}
    assert names[os.getpid()] not in ("", "a program")


def test_processes_that_no_card_lists() -> None:
    assert Nvml(Library()).read([55]) is None


@pytest.mark.parametrize("what", ["init", "memory", "processes"])
def test_an_error_of_the_driver_is_told_and_the_library_let_go(what: str) -> None:
    library = Library()
    library.fail[what] = NVMLError("Driver Not Loaded")
    with pytest.raises(CardError, match="NVML: Driver Not Loaded"):
        Nvml(library).read([100])
    assert library.opened == library.shut


def test_a_divided_card_is_refused() -> None:
    library = Library()
    library.mig = [1, 1]
    with pytest.raises(CardError, match="MIG"):
        Nvml(library).read([100])
    library.mig = [0, 0]
    assert Nvml(library).read([100]) is not None


def test_a_driver_that_hides_what_processes_use_is_refused() -> None:
    library = Library()
    library.computing[1][0] = (100, None)
    with pytest.raises(CardError, match="each process"):
        Nvml(library).read([100])


def test_no_card_at_all() -> None:
    library = Library()
    library.count = 0
    with pytest.raises(CardError, match="no card"):
        Nvml(library)
    assert library.opened == library.shut


def test_closing_twice_is_once() -> None:
    library = Library()
    reader = Nvml(library)
    reader.close()
    reader.close()
    assert library.shut == 1


def test_a_card_that_is_opened_too_late_is_let_go() -> None:
    let_go, shut = threading.Event(), threading.Event()

    class Watched(Library):
        def nvmlShutdown(self) -> None:
            shut.set()

    library = Watched()

    def late() -> Nvml:
        let_go.wait(20)
        return Nvml(library)

    with pytest.raises(CardError, match="did not answer within 0.05 s"):
        CardThread(late, 0.05)
    let_go.set()
    assert shut.wait(20) and library.opened == 1


async def test_a_card_on_a_thread() -> None:
    library = Library()
    card = CardThread(lambda: Nvml(library))
    reading = await card.read([100])
    assert reading is not None and reading.ours_bytes == 3 * GIB
    library.fail["memory"] = NVMLError("GPU is lost")
    with pytest.raises(CardError, match="GPU is lost"):
        await card.read([100])
    card.close(20)
    card.close(20)
    assert library.opened == library.shut == 1
    with pytest.raises(CardError, match="no card"):
        CardThread(lambda: Nvml(_none()))


def _none() -> Library:
    library = Library()
    library.count = 0
    return library


def test_the_real_library_is_loaded_when_asked_alone() -> None:
    code = (
        "import sys, tierd.daemon.lifecycle, tierd.daemon.card as card\n"
        "assert 'pynvml' not in sys.modules\n"
        "try: card.Nvml().close()\n"
        "except card.CardError as exc: print(exc)\n"
        "assert 'pynvml' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "" or done.stdout.startswith("NVML")

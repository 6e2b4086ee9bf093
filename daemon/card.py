"""Who holds how much of a card's memory, as NVIDIA's management library (NVML) tells.

`nvidia-ml-py` is imported when somebody asks, and never before: it takes 4 MB, and a front without a card needs none of
it. Which card is meant is told by the processes on it: NVML and CUDA count cards differently.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tierd.daemon.aside import Aside

ANSWER_S = 10.0  # for the driver: one that hangs is not asked again
LET_GO_S = 1.0  # for the library, before the process ends


class CardError(Exception):
    """The card's memory can't be known. The text says why, fit for a user."""


class Other(NamedTuple):
    """A program that is not ours. `used_bytes`: None where the driver does not say."""

    pid: int
    name: str
    used_bytes: int | None


class Reading(NamedTuple):
    """One card, in bytes. `ours_bytes`: of the processes that were named; `others_bytes`: all else that is used, by
    programs that the driver does not list too; `others`: the largest first."""

    total_bytes: int
    free_bytes: int
    ours_bytes: int
    others_bytes: int
    others: tuple[Other, ...]


class CardReader(Protocol):
    """Looks at the card. One thread at a time; may take a while."""

    def read(self, pids: Collection[int]) -> Reading | None:
        """The card that one of these processes is on, which are all of ours; None when none lists any. Raises
        CardError."""
        ...

    def close(self) -> None:
        """Lets go of the library. Idempotent."""
        ...


class CardThread:
    """A card that is asked on a thread of its own, for its driver may stand still.

    Raises what `open_card` raises, and CardError when the driver does not answer within `answer_s`.
    """

    def __init__(self, open_card: Callable[[], CardReader], answer_s: float = ANSWER_S) -> None:
        self.answer_s = answer_s
        self._closed = False
        self._aside = Aside("card")
        opening = self._aside.begin(open_card)
        try:
            self._reader = opening.result(answer_s)
        except TimeoutError:
            self._aside.begin(lambda: opening.result().close())  # should it come back one day
            self._aside.close()
            raise self._silence() from None
        except BaseException:
            self._aside.close()
            raise

    async def read(self, pids: Collection[int]) -> Reading | None:
        """As `CardReader.read`, within `answer_s`."""
        try:
            async with asyncio.timeout(self.answer_s):
                return await asyncio.wrap_future(self._aside.begin(lambda: self._reader.read(pids)))
        except TimeoutError:
            raise self._silence() from None

    def close(self, wait_s: float = 0.0) -> None:
        """Let go of the library, on its thread; `wait_s` are waited for it. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(TimeoutError):
                self._aside.begin(self._reader.close)
        self._aside.close(wait_s)

    def _silence(self) -> CardError:
        return CardError(f"the driver did not answer within {self.answer_s:g} s")


class Nvml:
    """NVML. Raises CardError without the package, the library, a driver that answers, or any card.

    Args:
        library: the module `pynvml`; tests hand in one that makes a card up.
    """

    def __init__(self, library: Any = None) -> None:
        self._nvml = nvml = _library() if library is None else library
        self._open = False
        with self._telling():
            nvml.nvmlInit()
            self._open = True
            self._cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if not self._cards:
            self.close()
            raise CardError("NVML finds no card")

    def read(self, pids: Collection[int]) -> Reading | None:
        with self._telling():
            for card in self._cards:
                processes = self._processes(card)
                if not processes.keys().isdisjoint(pids):
                    return self._reading(card, processes, pids)
        return None

    def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _reading(self, card: Any, processes: dict[int, int | None], pids: Collection[int]) -> Reading:
        if self._is_divided(card):
            raise CardError("the card is divided (MIG), and what is free of our part of it is not told")
        # Version 2 counts what the driver keeps for itself apart, not as used.
        memory = self._nvml.nvmlDeviceGetMemoryInfo(card, version=self._nvml.nvmlMemory_v2)
        ours = [used for pid, used in processes.items() if pid in pids]
        if None in ours:
            raise CardError("this driver does not tell how much of the card each process uses")
        ours_bytes = sum(used or 0 for used in ours)
        others = [Other(pid, _name_of(pid), used) for pid, used in processes.items() if pid not in pids]
        others.sort(key=lambda other: other.used_bytes or 0, reverse=True)
        others_bytes = max(int(memory.used) - ours_bytes, 0)
        return Reading(int(memory.total), int(memory.free), ours_bytes, others_bytes, tuple(others))

    def _processes(self, card: Any) -> dict[int, int | None]:
        """Bytes of each process that computes or draws on a card. One that does both is listed twice, as large."""
        listed = [*self._nvml.nvmlDeviceGetComputeRunningProcesses(card)]
        listed += self._nvml.nvmlDeviceGetGraphicsRunningProcesses(card)
        return {process.pid: process.usedGpuMemory for process in listed}

    def _is_divided(self, card: Any) -> bool:
        try:
            return bool(self._nvml.nvmlDeviceGetMigMode(card)[0])
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            return False  # consumer cards can't be

    @contextlib.contextmanager
    def _telling(self) -> Any:
        """Turns errors of the library into ours; the library is let go of."""
        try:
            yield
        except self._nvml.NVMLError as exc:
            self.close()
            raise CardError(f"NVML: {exc}") from None


def _library() -> Any:
    try:
        import pynvml
    except ImportError:
        raise CardError("nvidia-ml-py is not installed (`pip install nvidia-ml-py`)") from None
    return pynvml


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return "a program"  # of another user's namespace, or gone

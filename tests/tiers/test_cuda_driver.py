"""The bindings of CUDA's driver: against the header that Triton brings, and on a library that only notes its calls."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from tierd.tiers import cuda_driver
from tierd.tiers.cuda_driver import CudaDriver
from tierd.tiers.gpu import GpuError, Stream

# In bytes, of what is no pointer and no int.
SIZES = {
    "size_t": 8, "unsigned long long": 8, "CUdeviceptr": 8, "CUmemGenericAllocationHandle": 8, "CUcontext": 8,
    "CUstream": 8, "CUevent": 8, "unsigned char": 1,
}  # fmt: skip


class Function:
    """A function of the library."""

    def __init__(self, library: Library, name: str) -> None:
        self._library, self._name = library, name
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        for argument, kind in zip(arguments, self.argtypes, strict=True):
            kind.from_param(argument)  # as ctypes does; raises for what does not fit
        return self._library.call(self._name, arguments)


class Library:
    """libcuda, as far as a caller can tell: outputs are small numbers, some calls fail if told to."""

    def __init__(self, **fails: int) -> None:
        self.fails = fails
        self.calls: list[tuple[str, int]] = []  # and the thread
        self.attributes: dict[int, int] = {}
        self._functions: dict[str, Function] = {}

    def __getattr__(self, name: str) -> Function:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return self._functions.setdefault(name, Function(self, name))

    def call(self, name: str, arguments: tuple[Any, ...]) -> int:
        self.calls.append((name, threading.get_ident()))
        if name == "cuGetErrorString":
            arguments[1]._obj.value = b"out of luck"
            return 0
        if name == "cuDeviceGetAttribute":
            arguments[0]._obj.value = self.attributes.get(arguments[1], 1)
        elif arguments and hasattr(arguments[0], "_obj"):
            arguments[0]._obj.value = 2 << 20 if name == "cuMemGetAllocationGranularity" else 7
        return self.fails.get(name, 0)

    def named(self) -> list[str]:
        return [name for name, _ in self.calls]


def opened(library: Library) -> CudaDriver:
    return CudaDriver(load=lambda _: library)


def test_signatures_and_constants_are_those_of_the_header() -> None:
    found = importlib.util.find_spec("triton")
    assert found is not None and found.origin is not None
    text = (Path(found.origin).parent / "backends/nvidia/include/cuda.h").read_text()
    for name, arguments in cuda_driver._SIGNATURES.items():
        bare = name.removesuffix("_v2")
        declared = re.search(rf"CUresult CUDAAPI (?:{name}|{bare})\(([^)]*)\);", text)
        assert declared is not None, name
        kinds = [part.replace("*", " * ").rsplit(None, 1)[0].strip() for part in declared.group(1).split(",")]
        assert len(kinds) == len(arguments), name
        for kind, argument in zip(kinds, arguments, strict=True):
            size = 8 if "*" in kind else SIZES.get(kind, 4)
            assert ctypes.sizeof(argument) == size, (name, kind)
        versioned = re.search(rf"#define {bare}\s+{bare}_v(\d)", text)
        assert name == (f"{bare}_v{versioned.group(1)}" if versioned else bare)
    for constant, value in (
        ("CU_MEM_ALLOCATION_TYPE_PINNED", cuda_driver._PINNED), ("CU_MEM_LOCATION_TYPE_DEVICE", cuda_driver._ON_DEVICE),
        ("CU_MEM_ACCESS_FLAGS_PROT_READWRITE", cuda_driver._READ_WRITE),
        ("CU_MEM_ALLOC_GRANULARITY_RECOMMENDED", cuda_driver._RECOMMENDED),
        ("CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", cuda_driver._HOST_POINTERS_WORK),
        ("CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", cuda_driver._HAS_MAPPING),
        ("CUDA_ERROR_OUT_OF_MEMORY", cuda_driver._OUT_OF_MEMORY),
    ):  # fmt: skip
        stated = re.search(rf"{constant}\s*=\s*(\w+)", text)
        assert stated is not None and int(stated.group(1), 0) == value, constant
    assert ctypes.sizeof(cuda_driver._AllocationProp) == 32 and ctypes.sizeof(cuda_driver._AccessDesc) == 12


def test_without_a_driver_the_error_says_so() -> None:
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(GpuError, match="no CUDA driver: libcuda.so.1"):
        CudaDriver(load=load)


def test_a_driver_without_one_of_the_calls_is_refused() -> None:
    library = Library()
    library.cuMemSetAccess = None
    with pytest.raises(GpuError, match="too old: it has no cuMemSetAccess") as caught:
        opened(library)
    assert caught.value.errno == errno.ENOTSUP and not library.calls


def test_a_driver_that_fails_after_it_gave_the_context_lets_go_of_it() -> None:
    library = Library(cuMemGetAllocationGranularity=1)
    with pytest.raises(GpuError):
        opened(library)
    assert library.named()[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_a_card_that_can_not_map_memory_is_refused() -> None:
    library = Library()
    library.attributes[cuda_driver._HAS_MAPPING] = 0
    with pytest.raises(GpuError, match="does not support mapping of memory"):
        opened(library)


def test_every_thread_enters_the_context_once() -> None:
    library = Library()
    driver = opened(library)
    thread = threading.Thread(target=lambda: [driver.new_event() for _ in range(2)])
    thread.start()
    thread.join()
    driver.new_event()
    entered = [thread for name, thread in library.calls if name == "cuCtxSetCurrent"]
    assert len(entered) == len(set(entered)) == 2


def test_memory_that_can_not_be_mapped_is_released() -> None:
    library = Library(cuMemMap=1)
    driver = opened(library)
    with pytest.raises(GpuError, match=r"cuMemMap: out of luck \(CUDA error 1\)") as caught:
        driver.map(1 << 40, 2 << 20)
    assert caught.value.errno == errno.EIO and library.named()[-3:] == ["cuMemMap", "cuGetErrorString", "cuMemRelease"]
    library.fails = {"cuMemSetAccess": 1}
    with pytest.raises(GpuError):
        driver.map(1 << 40, 2 << 20)
    assert library.named()[-2:] == ["cuMemUnmap", "cuMemRelease"]
    library.fails = {"cuMemCreate": 2}
    with pytest.raises(GpuError) as caught:
        driver.map(1 << 40, 2 << 20)
    assert caught.value.errno == errno.ENOMEM


def test_every_call_fits_its_signature() -> None:
    library = Library()
    driver = opened(library)
    address = driver.reserve(1 << 30)
    handle = driver.map(address, driver.granularity_bytes)
    driver.unmap(address, driver.granularity_bytes, handle)
    driver.release(address, 1 << 30)
    driver.register(1 << 46, 4096)
    driver.unregister(1 << 46)
    stream, event = driver.new_stream(), driver.new_event()
    driver.copy(1 << 47, 1 << 46, 100, stream)
    driver.fill(1 << 47, 0xAA, 100, stream)
    driver.record(event, stream)
    driver.wait(Stream(0), event)
    driver.synchronize(event)
    driver.free_event(event)
    driver.free_stream(stream)
    assert driver.granularity_bytes == 2 << 20
    assert all(isinstance(found, int) for found in driver.memory())
    driver.close()
    driver.close()
    assert library.named().count("cuDevicePrimaryCtxRelease_v2") == 1
    assert set(library.named()) == set(cuda_driver._SIGNATURES) - {"cuGetErrorString"}
    with pytest.raises(GpuError, match="the card was given back"):
        driver.new_event()


def test_its_memory_is_asked_of_the_driver() -> None:
    library = Library()
    assert opened(library).memory()[0] == 7 and library.named()[-1] == "cuMemGetInfo_v2"

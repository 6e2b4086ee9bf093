"""CUDA's driver API by ctypes: `Gpu` for a card of NVIDIA's. Needs no torch, no toolkit and no compiler.

It works in the device's primary context, the one that torch and Triton use too, so their kernels reach this memory and
these streams. Signatures and constants: cuda.h of CUDA 12. Calls give the interpreter's lock up while they last.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable
from typing import Any

from tierd.tiers.gpu import Event, GpuError, Handle, Stream

LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # CUmemAllocationType, CUmemLocationType, CUmemAccess_flags
_RECOMMENDED = 1  # CUmemAllocationGranularity_flags
_REGISTER_FLAGS = 0x01 | 0x02  # portable, mapped: in every context, and readable by kernels
_NON_BLOCKING = 0x1  # a stream that does not wait for the default one
_EVENT_FLAGS = 0x1 | 0x2  # a waiting thread sleeps; no timing
_HOST_POINTERS_WORK = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_HAS_MAPPING = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]  # fmt: skip


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("win32", ctypes.c_void_p), ("flags", _AllocationFlags),
    ]  # fmt: skip


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_POINTER, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_ADDRESS, _LONG = ctypes.c_uint64, ctypes.c_ulonglong
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [_NUMBER],
    "cuDeviceGet": [_POINTER, ctypes.c_int],
    "cuDeviceGetAttribute": [_POINTER, ctypes.c_int, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [_POINTER, ctypes.c_int],
    "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
    "cuCtxSetCurrent": [_POINTER],
    "cuMemGetInfo_v2": [_POINTER, _POINTER],
    "cuMemGetAllocationGranularity": [_POINTER, _POINTER, ctypes.c_int],
    "cuMemAddressReserve": [_POINTER, _SIZE, _SIZE, _ADDRESS, _LONG],
    "cuMemAddressFree": [_ADDRESS, _SIZE],
    "cuMemCreate": [_POINTER, _SIZE, _POINTER, _LONG],
    "cuMemRelease": [_LONG],
    "cuMemMap": [_ADDRESS, _SIZE, _SIZE, _LONG, _LONG],
    "cuMemUnmap": [_ADDRESS, _SIZE],
    "cuMemSetAccess": [_ADDRESS, _SIZE, _POINTER, _SIZE],
    "cuMemHostRegister_v2": [_POINTER, _SIZE, _NUMBER],
    "cuMemHostUnregister": [_POINTER],
    "cuStreamCreate": [_POINTER, _NUMBER],
    "cuStreamDestroy_v2": [_POINTER],
    "cuStreamWaitEvent": [_POINTER, _POINTER, _NUMBER],
    "cuEventCreate": [_POINTER, _NUMBER],
    "cuEventDestroy_v2": [_POINTER],
    "cuEventRecord": [_POINTER, _POINTER],
    "cuEventSynchronize": [_POINTER],
    "cuMemcpyAsync": [_ADDRESS, _ADDRESS, _SIZE, _POINTER],
    "cuMemsetD8Async": [_ADDRESS, ctypes.c_ubyte, _SIZE, _POINTER],
    "cuGetErrorString": [ctypes.c_int, _POINTER],
}  # fmt: skip


class CudaDriver:
    """One card. Raises GpuError without a driver or a card, or for a card that can't do what tierd needs.

    Args:
        ordinal: which card, as CUDA counts them.
        load: gives the library; tests hand one in.
    """

    def __init__(self, ordinal: int = 0, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            self._library = load(LIBRARY)
        except OSError as exc:
            raise GpuError(errno.ENODEV, f"no CUDA driver: {exc}") from None
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise GpuError(errno.ENOTSUP, f"the CUDA driver is too old: it has no {name}")
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._threads = threading.local()
        self._context = ctypes.c_void_p()
        self._ordinal = ordinal
        device = ctypes.c_int()
        self._raw("cuInit", 0)
        self._raw("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device.value
        for attribute, what in ((_HAS_MAPPING, "mapping of memory"), (_HOST_POINTERS_WORK, "host memory in kernels")):
            found = ctypes.c_int()
            self._raw("cuDeviceGetAttribute", ctypes.byref(found), attribute, self._device)
            if not found.value:
                raise GpuError(errno.ENOTSUP, f"card {ordinal} or its driver does not support {what}")
        self._raw("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._where = _Location(_ON_DEVICE, self._device)
        self._prop = _AllocationProp(type=_PINNED, location=self._where)
        size = ctypes.c_size_t()
        try:
            self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._prop), _RECOMMENDED)
        except GpuError:
            self.close()
            raise
        self._granularity_bytes = size.value

    def close(self) -> None:
        if self._context:
            self._context = ctypes.c_void_p()
            self._raw("cuDevicePrimaryCtxRelease_v2", self._device)

    @property
    def granularity_bytes(self) -> int:
        return self._granularity_bytes

    def memory(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def reserve(self, size_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), size_bytes, 0, 0, 0)
        return address.value

    def release(self, address: int, size_bytes: int) -> None:
        self._call("cuMemAddressFree", address, size_bytes)

    def map(self, address: int, size_bytes: int) -> Handle:
        handle = ctypes.c_ulonglong()
        self._call("cuMemCreate", ctypes.byref(handle), size_bytes, ctypes.byref(self._prop), 0)
        try:
            self._call("cuMemMap", address, size_bytes, 0, handle.value, 0)
        except GpuError:
            self._call("cuMemRelease", handle.value)
            raise
        access = _AccessDesc(self._where, _READ_WRITE)
        try:
            self._call("cuMemSetAccess", address, size_bytes, ctypes.byref(access), 1)
        except GpuError:
            self.unmap(address, size_bytes, Handle(handle.value))
            raise
        return Handle(handle.value)

    def unmap(self, address: int, size_bytes: int, handle: Handle) -> None:
        self._call("cuMemUnmap", address, size_bytes)
        self._call("cuMemRelease", handle)

    def register(self, address: int, size_bytes: int) -> None:
        self._call("cuMemHostRegister_v2", address, size_bytes, _REGISTER_FLAGS)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def new_stream(self) -> Stream:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return Stream(stream.value or 0)

    def free_stream(self, stream: Stream) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def new_event(self) -> Event:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _EVENT_FLAGS)
        return Event(event.value or 0)

    def free_event(self, event: Event) -> None:
        self._call("cuEventDestroy_v2", event)

    def record(self, event: Event, stream: Stream) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def synchronize(self, event: Event) -> None:
        self._call("cuEventSynchronize", event)

    def copy(self, dest: int, source: int, size_bytes: int, stream: Stream) -> None:
        self._call("cuMemcpyAsync", dest, source, size_bytes, stream)

    def fill(self, dest: int, value: int, size_bytes: int, stream: Stream) -> None:
        self._call("cuMemsetD8Async", dest, value, size_bytes, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        """In this card's context, which is a matter of the calling thread."""
        if not self._context:
            raise GpuError(errno.EIO, f"{name}: the card was given back")
        if not getattr(self._threads, "ready", False):
            self._raw("cuCtxSetCurrent", self._context)
            self._threads.ready = True
        self._raw(name, *arguments)

    def _raw(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            what = text.value.decode() if text.value else "an unknown error"
            raise GpuError(errno.ENOMEM if code == _OUT_OF_MEMORY else errno.EIO, f"{name}: {what} (CUDA error {code})")

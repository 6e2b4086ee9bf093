"""Which card CUDA shows first, by a library that is made up."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from tierd.daemon import cuda_order


class Cuda:
    """The library. `fails`: a call that it refuses."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.fails:
                return 100
            if name == "cuDeviceGet":
                arguments[0]._obj.value = 7
            if name == "cuDeviceGetPCIBusId":
                assert arguments[2].value == 7
                arguments[0].value = b"0000:41:00.0"
            return 0

        return call


def test_the_first_card_has_a_place_on_the_bus() -> None:
    assert cuda_order.ask(lambda _name: Cuda()) == "0000:41:00.0"


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet", "cuDeviceGetPCIBusId"])
def test_a_refusal_is_no_card(fails: str) -> None:
    assert cuda_order.ask(lambda _name: Cuda(fails)) == ""


def test_without_the_library_there_is_none() -> None:
    def missing(_name: str) -> ctypes.CDLL:
        raise OSError("no such file")

    assert cuda_order.ask(missing) == ""


def test_it_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_order.first_bus_id({**os.environ, "CUDA_VISIBLE_DEVICES": ""}) is None
    monkeypatch.setattr(cuda_order.sys, "executable", "/nowhere/python")
    assert cuda_order.first_bus_id({}) is None

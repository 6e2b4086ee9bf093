"""Datagrams to systemd."""

from __future__ import annotations

import os
import socket

import pytest

from tierd.daemon.notify import notify, watchdog_s


def test_without_systemd_nothing_happens(tmp_path):
    assert not notify("READY=1", {})
    assert not notify("READY=1", {"NOTIFY_SOCKET": "relative"})
    assert not notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "nobody")})


@pytest.mark.parametrize("abstract", [False, True])
def test_a_file_or_a_name(tmp_path, abstract):
    address = "@tierd-test-notify" if abstract else str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0tierd-test-notify" if abstract else address)
        assert notify("READY=1\nSTATUS=ready", {"NOTIFY_SOCKET": address})
        assert listener.recv(100) == b"READY=1\nSTATUS=ready"


@pytest.mark.parametrize(
    ("env", "period_s"),
    [
        ({}, None), ({"WATCHDOG_USEC": "30000000"}, 30.0), ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}, 1.0),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, None),
    ],
)  # fmt: skip
def test_the_watchdog_of_systemd(env, period_s):
    assert watchdog_s(env) == period_s

"""The verb `proxy`: bytes go through, ends are told, a daemon that is not there is an error."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from tierd.daemon.cli_proxy import bridge, proxy
from tierd.daemon.errors import DaemonUnreachable


def test_bytes_go_both_ways_and_the_end_is_told() -> None:
    near, far = socket.socketpair()
    source_read, source_write = os.pipe()
    dest_read, dest_write = os.pipe()
    thread = threading.Thread(target=bridge, args=(source_read, dest_write, near))
    thread.start()
    try:
        question, answer = os.urandom(300_000), os.urandom(300_000)
        sender = threading.Thread(target=lambda: (os.write(source_write, question[:1000]), os.close(source_write)))
        sender.start()
        got = b""
        while data := far.recv(1 << 16):
            got += data
        assert got == question[:1000]
        answerer = threading.Thread(target=lambda: (far.sendall(answer), far.close()))
        answerer.start()
        got = b""
        while len(got) < len(answer):
            got += os.read(dest_read, 1 << 16)
        assert got == answer
        sender.join(10)
        answerer.join(10)
        thread.join(10)
        assert not thread.is_alive()
    finally:
        near.close()
        for fd in (source_read, dest_read, dest_write):
            os.close(fd)


def test_a_daemon_that_is_not_there_is_told(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(proxy, ["--socket", str(tmp_path / "s")])
    assert isinstance(outcome.exception, DaemonUnreachable)
    with pytest.raises(DaemonUnreachable):
        raise outcome.exception

"""The daemon as a process: start, what it loads, what it weighs, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from front_harness import Daemon, Wire, set_options, text

from tierd.daemon import keys, lifecycle, service
from tierd.daemon.config import Settings
from tierd.daemon.errors import BadConfig, Conflict, PermissionDenied
from tierd.daemon.lifecycle import serve
from tierd.daemon.protocol import TERMINAL

START_S = 2.0  # measured on an idle machine with two cores: 0.35 s
RSS_BYTES = 60 << 20  # measured: 43 MiB with HTTP
STOP_S = 10.0


def rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def http_url(daemon: Daemon) -> str:
    async def ask():
        wire = await Wire.connect(daemon.socket)
        try:
            for _ in range(500):
                if url := (await wire.call("status"))["http"]:
                    return url
                await asyncio.sleep(0.02)
            raise AssertionError("HTTP never came")
        finally:
            await wire.close()

    return asyncio.run(ask())


def test_start_time_memory_and_what_is_loaded(daemon):
    one = daemon()
    assert one.wait() < START_S
    with urllib.request.urlopen(http_url(one) + "/health") as answer:
        assert answer.status == 200
    assert rss_bytes(one.process.pid) < RSS_BYTES
    maps = Path(f"/proc/{one.process.pid}/maps").read_text()
    for library in ("torch", "numpy", "tokenizers", "numba"):
        assert f"/{library}/" not in maps
    one.signal(signal.SIGTERM)
    assert one.process.wait(STOP_S) == 0
    assert not one.socket.exists()


def test_the_front_imports_nothing_heavy():
    code = (
        "import sys, tierd.daemon.lifecycle, tierd.daemon.api.web;"
        "print(*sorted(m for m in ('torch','numpy','numba','transformers','tokenizers') if m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split() == []


def test_http_is_not_loaded_before_the_socket_answers():
    code = "import sys, tierd.daemon.lifecycle; print('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_a_second_daemon_is_refused_and_the_first_goes_on(daemon):
    first = daemon()
    first.wait()
    second = daemon()
    assert second.process.wait(10) == 1
    assert f"pid {first.process.pid}" in second.end()
    assert first.wait() < 5


def test_a_second_daemon_learns_of_the_first_not_of_the_port(daemon):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first = daemon(listen=f"127.0.0.1:{port}")
    first.wait()
    second = daemon(listen=f"127.0.0.1:{port}")
    assert second.process.wait(10) == 1
    said = second.end()
    assert f"a daemon (pid {first.process.pid}) already serves" in said and "Address already in use" not in said


def test_a_socket_that_was_cleaned_away_comes_back(daemon):
    one = daemon(times={"DOOR_CHECK_S": 0.05})
    one.wait()

    async def across():
        wire = await Wire.connect(one.socket)
        for _ in range(3):
            one.socket.unlink()
            await asyncio.to_thread(one.wait)
        assert (await wire.call("status"))["state"] == "idle"  # the old connection goes on
        await wire.close()

    asyncio.run(across())
    one.signal(signal.SIGTERM)
    assert one.process.wait(STOP_S) == 0 and not one.socket.exists()
    assert "was removed; listening there again" in one.end()


def test_a_killed_daemon_leaves_nothing_in_the_way(daemon):
    first = daemon()
    first.wait()
    first.signal(signal.SIGKILL)
    first.process.wait()
    assert first.socket.exists()  # stale
    daemon().wait()


def test_a_taken_port_is_told_before_anything_runs(fake_models, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = Settings(fake_models, tmp_path / "c", tmp_path / "run" / "s.sock", listen=f"127.0.0.1:{port}")
        with pytest.raises(Conflict, match=str(port)):
            serve(settings)
    assert not settings.socket.exists()


def test_the_times_of_a_stop_fit_into_ten_seconds():
    assert service.STOP_TIMEOUT_S < STOP_S and lifecycle.FLUSH_S + 1.0 <= lifecycle.ENGINES_S
    assert lifecycle.FAREWELL_S + lifecycle.ENGINES_S < service.STOP_TIMEOUT_S


def test_an_open_address_without_a_key_is_refused(fake_models, tmp_path):
    settings = Settings(fake_models, tmp_path / "c", tmp_path / "run" / "s.sock", listen="0.0.0.0:0")
    with pytest.raises(BadConfig, match="API key"):
        serve(settings)


async def open_streams(daemon: Daemon, count: int, max_tokens: int) -> list[Wire]:
    wires = []
    for number in range(count):
        wire = await Wire.connect(daemon.socket)
        wire.generate(1, f"s{number}", max_tokens=max_tokens)
        wires.append(wire)
    for wire in wires:
        while (await wire.next()).ev != "text":
            pass
    return wires


async def rest(wire: Wire) -> list:
    events = []
    try:
        while True:
            events.append(await wire.next())
    except (EOFError, ConnectionError):
        return events
    finally:
        await wire.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "stop", "stop, then stop now"])
def test_stop_under_load_ends_each_stream_once(daemon, fake_models, how):
    set_options(fake_models / "alpha", token_s=0.02)
    one = daemon(times={"STOP_TIMEOUT_S": 6.0})
    one.wait()

    async def under_load():
        wires = await open_streams(one, 20, 4000)
        if isinstance(how, str):
            control = await Wire.connect(one.socket)
            for timeout_s in [6] if how == "stop" else [600, 0]:
                await control.call("stop", timeout_s=timeout_s)
            await control.close()
        else:
            one.signal(how)
        return await asyncio.gather(*(rest(wire) for wire in wires))

    started_s = time.monotonic()
    answers = asyncio.run(under_load())
    assert one.process.wait(STOP_S) == 0
    assert time.monotonic() - started_s < STOP_S
    for events in answers:
        ends = [event for event in events if event.ev in TERMINAL]
        assert [(event.ev, event.data["code"]) for event in ends] == [("failed", "draining")]
        assert events[-1] is ends[0]
    assert not one.socket.exists()
    assert (fake_models / "alpha" / "flushed").exists()


def test_streams_that_end_in_time_end_well(daemon, fake_models):
    set_options(fake_models / "alpha", token_s=0.01)
    one = daemon()
    one.wait()

    async def under_load():
        wires = await open_streams(one, 3, 60)
        one.signal(signal.SIGTERM)
        return await asyncio.gather(*(rest(wire) for wire in wires))

    answers = asyncio.run(under_load())
    assert {events[-1].ev for events in answers} == {"done"} and all(text(events) for events in answers)
    assert one.process.wait(STOP_S) == 0


def test_a_second_signal_does_not_wait_for_streams(daemon, fake_models):
    set_options(fake_models / "alpha", token_s=0.02)
    one = daemon()
    one.wait()

    async def under_load():
        wires = await open_streams(one, 2, 4000)
        started_s = time.monotonic()
        one.signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        one.signal(signal.SIGTERM)
        answers = await asyncio.gather(*(rest(wire) for wire in wires))
        return answers, time.monotonic() - started_s

    answers, took_s = asyncio.run(under_load())
    assert took_s < 2.5 and {events[-1].ev for events in answers} == {"failed"}
    assert one.process.wait(STOP_S) == 0


def test_an_engine_that_does_not_flush_is_killed_in_time(daemon, fake_models):
    set_options(fake_models / "alpha", flush_s=60)
    one = daemon(times={"FLUSH_S": 0.5, "ENGINES_S": 1.0, "STOP_TIMEOUT_S": 2.0})
    one.wait()

    async def load():
        wire = await Wire.connect(one.socket)
        pid = (await wire.call("load", model="alpha"))["pid"]
        await wire.close()
        return pid

    pid = asyncio.run(load())
    started_s = time.monotonic()
    one.signal(signal.SIGTERM)
    assert one.process.wait(STOP_S) == 0 and time.monotonic() - started_s < STOP_S
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_systemd_is_told(daemon, fake_models, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        one = daemon()
        assert b"READY=1" in listener.recv(4096)
        one.wait()
        one.signal(signal.SIGTERM)
        while not (said := listener.recv(4096)).startswith(b"STOPPING=1"):
            assert said.startswith(b"WATCHDOG=1")
        assert one.process.wait(STOP_S) == 0


def test_systemd_hears_a_daemon_that_lives_and_not_one_that_hangs(daemon, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        one = daemon()
        assert b"READY=1" in listener.recv(4096)
        for _ in range(3):
            assert listener.recv(4096).startswith(b"WATCHDOG=1")
        one.signal(signal.SIGSTOP)
        listener.settimeout(1.0)
        with pytest.raises(TimeoutError):
            for _ in range(10):  # what was sent before it stood still
                listener.recv(4096)
        one.signal(signal.SIGCONT)
        listener.settimeout(10)
        assert listener.recv(4096).startswith(b"WATCHDOG=1")


def test_an_address_that_others_reach_opens_with_a_key_of_the_file(daemon, tmp_path):
    _, text = keys.add(tmp_path / "keys.json", "a")
    one = daemon(listen="0.0.0.0:0")
    one.wait()
    port = http_url(one).rpartition(":")[2]
    for key, status in ((text, 200), ("wrong", 401)):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"x-api-key": key})
        try:
            with urllib.request.urlopen(request) as answer:
                assert answer.status == status
        except urllib.error.HTTPError as exc:
            with exc:
                assert exc.code == status
    keys.remove(tmp_path / "keys.json", "a")  # the last one: such an address stays closed
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models")
    refused.value.close()


def test_a_file_without_keys_opens_no_address(fake_models, tmp_path):
    for content, error in (('{"keys": []}', BadConfig), ("{", PermissionDenied)):
        (tmp_path / "k").write_text(content)
        (tmp_path / "k").chmod(0o600)
        settings = Settings(
            fake_models, tmp_path / "c", tmp_path / "run" / "s.sock", listen="0.0.0.0:0", keys_file=tmp_path / "k"
        )
        with pytest.raises(error):
            serve(settings)


def test_no_port_is_open_that_nobody_asked_for(daemon):
    one = daemon(listen="127.0.0.1:0")
    one.wait()
    port = int(http_url(one).rpartition(":")[2])
    inodes = {os.readlink(entry) for entry in Path(f"/proc/{one.process.pid}/fd").iterdir() if entry.is_symlink()}
    listening = set()
    for family in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{one.process.pid}/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in inodes and (fields[3] == "0A" or family.startswith("udp")):
                listening.add((family, int(fields[1].rpartition(":")[2], 16)))
    assert listening == {("tcp", port)}

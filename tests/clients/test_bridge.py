"""A process in the place of the socket, alone."""

from __future__ import annotations

import sys

from tierd.clients.bridge import WORDS_BYTES, Bridge


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys, time\n{code}")


async def test_what_it_says_beside_its_work_never_stops_it() -> None:
    # A pipe that nobody reads holds 64 KiB.
    bridge = await Bridge.start(command("sys.stderr.write(('x' * 8000 + chr(10)) * 64)\nprint('ready', flush=True)"))
    assert await bridge.reader.read() == b"ready\n"
    await bridge.aclose()


async def test_of_what_it_says_the_end_is_kept() -> None:
    bridge = await Bridge.start(command("sys.stderr.write('debug1\\n' * 9999)\nsys.exit('no such host')"))
    assert await bridge.last_words() == "no such host"
    assert len(bridge.words) <= WORDS_BYTES
    await bridge.aclose()


async def test_one_that_says_nothing() -> None:
    bridge = await Bridge.start(command(""))
    assert await bridge.last_words() == "it said nothing"
    await bridge.aclose()


async def test_one_that_stays_when_its_input_ends_is_ended() -> None:
    bridge = await Bridge.start(command("print('up', flush=True)\ntime.sleep(999)"))
    assert await bridge.reader.readline() == b"up\n"
    bridge.writer.close()
    await bridge.aclose()
    assert await bridge.reader.read() == b""

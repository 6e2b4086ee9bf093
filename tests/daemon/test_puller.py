"""Pulls for clients, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import msgspec
import pytest
from front_harness import make_settings, until

from tierd.daemon import pull_process, puller
from tierd.daemon.config import Settings
from tierd.daemon.errors import BadRequest, DownloadFailed, TooBusy
from tierd.daemon.puller import Puller, check_ref

STEP = '{"stage": "download", "done": 1, "total": 2}'


@pytest.fixture
def pulls(tmp_path, monkeypatch):
    """A puller whose processes run the given code."""

    def make(code):
        monkeypatch.setattr(puller, "COMMAND", (sys.executable, "-S", "-c", code))
        return Puller(make_settings(tmp_path))

    return make


def saying(*lines):
    return f"for line in {list(lines)!r}: print(line, flush=True)"


def noting(mark):
    return f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid()))"


async def steps_of(pulls):
    return [step async for step in pulls.pull("smollm2:135m")]


async def test_steps_end_with_the_name(pulls):
    found = await steps_of(pulls(saying(STEP, '{"name": "x"}', STEP)))
    assert found == [{"stage": "download", "done": 1, "total": 2}, {"name": "x"}]


async def test_the_process_is_told_by_what_to_choose_a_format_and_no_secret(tmp_path, monkeypatch):
    code = "import sys; print('{\"name\": ' + sys.argv[1] + '}', flush=True)"
    monkeypatch.setattr(puller, "COMMAND", (sys.executable, "-S", "-c", code))
    settings = make_settings(tmp_path, weights_mem=5, ctx=77, api_key="secret")
    (told,) = await steps_of(Puller(settings))
    order = msgspec.convert(told["name"], pull_process.Order)
    assert order.settings["weights_mem"] == 5 and order.settings["ctx"] == 77 and "secret" not in str(told)
    Settings(settings.models_dir, settings.cache_dir, settings.socket, **order.settings)


async def test_an_error_of_the_process_is_raised_as_it_is(pulls):
    error = '{"error": {"code": "download_failed", "message": "no network", "hint": "plug it in"}}'
    with pytest.raises(DownloadFailed, match="no network") as caught:
        await steps_of(pulls(saying(STEP, error)))
    assert caught.value.hint == "plug it in"


async def test_a_process_that_dies_is_a_failure(pulls):
    with pytest.raises(DownloadFailed, match="without a word"):
        await steps_of(pulls("import os; os._exit(9)"))


async def test_the_process_ends_with_its_client(pulls, tmp_path):
    mark = tmp_path / "pid"
    steps = pulls(f"{noting(mark)}; print('{STEP}', flush=True); time.sleep(60)").pull("x")
    await anext(steps)
    pid = int(mark.read_text())
    await steps.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_few_at_once(pulls, monkeypatch):
    monkeypatch.setattr(puller, "MAX_PULLS", 1)
    slow = pulls(f"import time; print('{STEP}', flush=True); time.sleep(60)")
    async with contextlib.aclosing(slow.pull("x")) as first:
        await anext(first)
        with pytest.raises(TooBusy):
            await anext(slow.pull("y"))
    monkeypatch.setattr(puller, "COMMAND", (sys.executable, "-S", "-c", saying('{"name": "y"}')))
    assert await steps_of(slow) == [{"name": "y"}]


async def test_a_cancelled_pull_leaves_no_process(pulls, tmp_path):
    mark = tmp_path / "pid"
    task = asyncio.create_task(steps_of(pulls(f"{noting(mark)}; time.sleep(60)")))
    await until(lambda: mark.exists() and mark.read_text())
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


@pytest.mark.parametrize("ref", ["smollm2:135m", "smollm2-135m", "hf:owner/name", "hf:Owner/Name@main:Q4_K_M"])
def test_what_clients_may_pull(ref):
    check_ref(ref)


@pytest.mark.parametrize(
    "ref", ["/etc/passwd", "../models", "./x", "~/x", "model.gguf", "a/b", "hf:../x", "hf:a/b/c", "", ".hidden", "x\0y"]
)
def test_no_path_gets_through(ref):
    with pytest.raises(BadRequest):
        check_ref(ref)

"""The verb `doctor`: what of this machine helps or hinders, and with --measure how fast it is."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import click
import msgspec

from tierd.daemon import config
from tierd.daemon import doctor as examination
from tierd.daemon.cli_common import (
    connect_if_running,
    json_option,
    leave,
    load_settings,
    note,
    print_json,
    settings_options,
)
from tierd.daemon.config import Settings
from tierd.daemon.errors import EngineFailed, ModelNotFound
from tierd.daemon.machine import Machine, total_memory_bytes
from tierd.daemon.models import catalog
from tierd.daemon.paths import make_private_dir
from tierd.daemon.plan import rates
from tierd.daemon.settled import settle
from tierd.daemon.units import human_bytes
from tierd.daemon.version import version

MEASURE_S = 1800.0
_MARKS = {"ok": "ok", "note": "--", "warning": "!!", "problem": "XX"}


@click.command()
@click.option("--measure", is_flag=True, help="Measure memory, disk and computation, for `tierd plan`; some minutes.")
@click.option("--model", metavar="MODEL", help="With --measure: the prepared model to measure.")
@settings_options("models_dir", "cache_dir", "socket", "nvme_mem", "threads")
@json_option
def doctor(flags: dict[str, Any], measure: bool, model: str | None, as_json: bool) -> None:
    """Examine this machine. The exit code is 1 when something does not work."""
    if measure:
        _measure(load_settings(flags), model, as_json)
        return
    (settings, _), faults = config.load_anyway(flags)
    found = []
    for finding in examination.examine(settings, lambda: _running(settings), version(), faults):
        found.append(finding)
        if not as_json:
            print(f"{_MARKS[finding.state]}  {finding.name:<11} {finding.text}")
            if finding.remedy:
                print(f"    {'':<11} {finding.remedy}")
    if as_json:
        print_json({"findings": [msgspec.to_builtins(finding) for finding in found]})
    if any(finding.state is examination.State.PROBLEM for finding in found):
        leave(1)


def _running(settings: Settings) -> str | None:
    """The version of the daemon that runs, None when none does."""
    client = connect_if_running(settings)
    if client is None:
        return None
    with client:
        return str(client.call("status").get("version", "unknown"))


def _measure(settings: Settings, model: str | None, as_json: bool) -> None:
    """Have a process measure, and keep what it found."""
    request = {
        "cache_dir": str(make_private_dir(settings.cache_dir)),
        "threads": settings.threads or len(os.sched_getaffinity(0)),
        "memory_bytes": total_memory_bytes(),
        "kv_format": settle(settings, Machine(0, 0, 0))[0].kv_format,  # of the processors, which are measured
        "model_dir": _model_dir(settings, model),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tierd.daemon.engine.measure"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )  # fmt: skip
    try:
        found, _ = process.communicate(msgspec.json.encode(request), timeout=MEASURE_S)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode:
        raise EngineFailed("measuring failed, see above", hint="`tierd doctor` tells what may be wrong")
    measured = msgspec.json.decode(found, type=rates.Measured)
    place = rates.save(settings.cache_dir, measured)
    if as_json:
        print_json(msgspec.to_builtins(measured))
        return
    print(f"memory   {human_bytes(measured.memory_bytes_per_s)}/s")
    for rate in measured.disk:
        print(f"disk     {human_bytes(rate.read_bytes_per_s)}/s read, {human_bytes(rate.write_bytes_per_s)}/s written, "
              f"{human_bytes(rate.request_bytes)} at a time")  # fmt: skip
    print(f"pages    {human_bytes(measured.streaming.pages_bytes_per_s)}/s past a step")
    for name, compute in measured.compute.items():
        one, many = 1e-9 / compute.layer_s[0], 1e-9 * compute.rows[-1] / compute.layer_s[-1]
        print(f"compute  {one:.1f} G weights/s for one row, {many:.0f} for {compute.rows[-1]} ({name[:40]})")
    note(f"kept in {place}")


def _model_dir(settings: Settings, model: str | None) -> str:
    """The prepared model to measure; the default one only if it is there."""
    try:
        return str(catalog.find(settings.models_dir, model or settings.default_model)[0])
    except ModelNotFound:
        if model is not None:
            raise
        return ""

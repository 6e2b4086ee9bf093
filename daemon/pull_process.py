"""A pull in a process of its own: `python -m tierd.daemon.pull_process JSON`, progress as JSON lines.

The front starts it, so that neither the importers' memory nor their processor time is the front's. Lines: `{stage,
done, total}`, with a `text` where there is something to say, and one last line `{name}` or `{error: {code, message,
...}}`. It ends when its standard output is closed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tierd.daemon.config import Settings
from tierd.daemon.errors import to_wire
from tierd.daemon.machine import probe_machine
from tierd.daemon.models.pull import pull
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.plan.choose_format import choose_format

REPORT_S = 0.2  # the importers tell every tensor


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """What to pull. `settings`: those of the daemon by which a weight format is chosen."""

    ref: str
    models_dir: str
    cache_dir: str
    offline: bool = False
    settings: dict[str, Any] = {}


class _Reporter:
    """Progress as lines, but not too many. Threading: one thread."""

    def __init__(self) -> None:
        self._stage = ""
        self._said_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if stage != self._stage or done == total or now_s - self._said_s >= REPORT_S:
            self._stage, self._said_s = stage, now_s
            _say({"stage": stage, "done": done, "total": total})


def _say(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def main(order: Order) -> int:
    """Pull, and tell how it goes. Returns the exit code."""
    models_dir, cache_dir = Path(order.models_dir), Path(order.cache_dir)
    settings = Settings(models_dir, cache_dir, Path(), **order.settings)

    def choose(spec: ModelSpec, own_format: str, own_bytes: int) -> str | None:
        chosen = choose_format(spec, own_format, own_bytes, settings, probe_machine(cache_dir))
        if chosen.why:
            _say({"stage": "format", "done": 1, "total": 1, "text": chosen.why})
        return chosen.format

    try:
        manifest = pull(
            order.ref, models_dir, cache_dir=cache_dir, progress=_Reporter(), offline=order.offline, choose=choose
        )
    except BrokenPipeError:
        return 1  # nobody listens any more
    except Exception as exc:
        _say({"error": to_wire(exc)})
        return 1
    _say({"name": manifest.name})
    return 0


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Order)))

"""A pull in a process of its own: `python -m tierd.daemon.models.pull_process JSON`, progress as JSON lines.

The front starts it, so that neither the importers' memory nor their processor time is the front's. Lines: `{stage,
done, total}`, and one last line `{name}` or `{error: {code, message, ...}}`. It ends when its standard output is
closed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tierd.daemon.errors import to_wire
from tierd.daemon.models.pull import pull

REPORT_S = 0.2  # the importers tell every tensor


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """What to pull."""

    ref: str
    models_dir: str
    cache_dir: str
    offline: bool = False


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
    try:
        manifest = pull(
            order.ref, Path(order.models_dir), cache_dir=Path(order.cache_dir), progress=_Reporter(),
            offline=order.offline,
        )  # fmt: skip
    except BrokenPipeError:
        return 1  # nobody listens any more
    except Exception as exc:
        _say({"error": to_wire(exc)})
        return 1
    _say({"name": manifest.name})
    return 0


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Order)))

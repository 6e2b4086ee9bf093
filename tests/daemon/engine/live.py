"""A whole engine in this process: the real kernels, pager, store, loop; only the socket is missing."""

from __future__ import annotations

import faulthandler
import gc
import queue
import time
from pathlib import Path
from typing import Any

from tierd.daemon.engine.assemble import Engine, Hooks, build
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.protocol import TERMINAL, Event, Message, Sampling, Submit

TIMEOUT_S = 90.0


class Live:
    """`with Live(model_dir, cache_dir) as engine:`; sizes in pages."""

    def __init__(
        self, model_dir: Path, cache_dir: Path, *, device: int = 64, host: int = 0, nvme: int = 256, requests: int = 64,
        **more: Any,
    ) -> None:  # fmt: skip
        record = record_bytes(model_dir, more.get("kv_format", "fp32"))
        defaults: dict[str, Any] = {
            "nvme_min_free_bytes": 0, "threads": 2, "kv_format": "fp32", "context": 0,
            "device_bytes": device * record, "host_bytes": host * record, "nvme_bytes": nvme * (record + 4096),
        }  # fmt: skip
        self.config = EngineConfig(
            model_dir=str(model_dir),
            cache_dir=str(cache_dir),
            **defaults | more,
        )
        self._requests = requests  # that may run and wait
        self.progress: list[tuple[str, int, int]] = []
        self.events: queue.Queue[Event] = queue.Queue(maxsize=100_000)
        self.deaths: list[BaseException | None] = []
        self._number = 0

    def __enter__(self) -> Live:
        hooks = Hooks(
            lambda *what: self.progress.append(what),
            lambda events: [self.events.put_nowait(event) for event in events] and None,
            self.deaths.append,
        )
        self.engine: Engine = build(self.config, hooks, threads=self.config.threads, max_requests=self._requests)
        self.engine.loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.loop.stop()
        assert self.engine.loop.join(10.0)
        self.engine.close()
        del self.engine
        gc.collect()  # the map of the weights holds a descriptor

    def flush(self) -> None:
        assert self.engine.loop.flush(20.0).result(25.0) == 0

    def clear_device(self) -> None:
        """Send every idle page of the device down, as if others had needed the room."""
        pager = self.engine.pager
        self.engine.loop.call(lambda: pager.evictor.make_room(pager.device.slots)).result(10.0)
        deadline_s = time.monotonic() + 10.0
        while pager.evictor.in_motion:
            assert time.monotonic() < deadline_s, "pages never went down"
            time.sleep(0.01)

    def submit(
        self,
        *,
        tokens: list[int] | None = None,
        prompt: str | None = None,
        messages: list[tuple[str, str]] | None = None,
        resume: tuple[int, ...] = (),
        tenant: str = "",
        kv_mode: str | None = None,
        **sampling: Any,
    ) -> int:
        self._number += 1
        submit = Submit(
            model="m",
            tokens=None if tokens is None else tuple(tokens),
            prompt=prompt,
            messages=None if messages is None else tuple(Message(role, content) for role, content in messages),
            sampling=Sampling(**{"temperature": 0.0, "ignore_eos": True} | sampling),
            resume=resume,
            tenant=tenant,
            kv_mode=kv_mode,
        )
        self.engine.loop.submit(self.engine.intake.request(self._number, submit, time.monotonic()))
        return self._number

    def collect(self, *numbers: int, timeout_s: float = TIMEOUT_S) -> dict[int, tuple[list[int], Event]]:
        """Tokens and terminal event of each request, when all have ended."""
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        ends: dict[int, Event] = {}
        deadline_s = time.monotonic() + timeout_s
        while len(ends) < len(numbers):
            try:
                event = self.events.get(timeout=max(deadline_s - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"not ended: {set(tokens) - set(ends)}; {self._describe()}") from None
            if event.id in tokens and event.ev == "text":
                tokens[event.id] += event.data["tokens"]
            elif event.id in tokens and event.ev in TERMINAL:
                ends[event.id] = event
        return {number: (tokens[number], ends[number]) for number in numbers}

    def _describe(self) -> str:
        """Where everything stands, for a test that waited in vain."""
        faulthandler.dump_traceback(all_threads=True)
        streams = self.engine.loop._streams
        live = [(r.id, r.phase, r.lease, len(r.tokens), r.computed) for r in list(streams._requests.values())]
        return f"{live}, {self.deaths}, {streams.rates}, {streams.totals}, {self.engine.pager.statistics()}"

    def run(self, submits: list[dict[str, Any]], timeout_s: float = TIMEOUT_S) -> list[tuple[list[int], Event]]:
        """All at once; results in order."""
        numbers = [self.submit(**submit) for submit in submits]
        found = self.collect(*numbers, timeout_s=timeout_s)
        return [found[number] for number in numbers]


def record_bytes(model_dir: Path, kv_format: str) -> int:
    from tierd.daemon.models.catalog import load_manifest
    from tierd.kernels.layout import PageLayout

    spec = load_manifest(model_dir).spec
    return PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, kv_format).record_bytes

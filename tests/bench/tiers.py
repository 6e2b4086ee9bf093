"""What the tiers cost and bring: the engine alone, one configuration against the other in one run.

    python -m tests.bench.tiers [--only NAME,...] [--rounds 3] [--tokens 8192] [--json FILE]

    offload   decode with the context in CPU memory (4x the device arena), and streamed from the store (4x all memory),
              against all of it on the device
    restore   time to the first token of a long prefix from the store against computing it, healthy disk and throttled
    deep      the first of these for a model twice as deep, random weights
    cold      time to the first token of a prompt never seen, all tiers and write-behind on against off
    crowd     50 requests at once for one prefix of 4,096 tokens that lies in the store
    scan      a long prompt that nobody repeats against a hot system prompt of 1,024 tokens

Rounds alternate between the sides; medians and ratios are printed. Prompts are random token ids, new ones each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.daemon.engine.live import Live
from tierd.daemon.models.catalog import load_manifest
from tierd.kernels.layout import PageLayout
from tierd.tiers.links import Link
from tierd.tiers.page import Tier
from tierd.tiers.store_io import OsIO

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = 16
REQUEST_TIMEOUT_S = 1800.0  # 8,192 tokens of the deeper model on a busy machine
rng = np.random.default_rng(int(time.time()))


class Throttle:
    """Reads of store pages at no more than a given rate, all threads together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def __enter__(self) -> Throttle:
        self._whole = {name: getattr(OsIO, name) for name in ("preadv", "preadv_batch")}
        for name in self._whole:
            setattr(OsIO, name, self._slowed(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._whole.items():
            setattr(OsIO, name, method)

    def _slowed(self, name: str) -> Callable[..., Any]:
        method = self._whole[name]

        def slow(*arguments: Any) -> Any:
            found = method(*arguments)
            num_bytes = int(np.maximum(found, 0).sum())
            with self._lock:
                now_s = time.monotonic()
                self._free_s = max(self._free_s, now_s) + num_bytes / self._bytes_per_s
                wait_s = self._free_s - now_s
            time.sleep(wait_s)
            return found

        return slow


class Bench:
    def __init__(self, model: Path, work: Path, tokens: int, rounds: int) -> None:
        self.model, self.work, self.tokens, self.rounds = model, work, tokens, rounds
        self.figures: dict[str, float] = {}
        spec = load_manifest(model).spec
        self.record_bytes = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim).record_bytes

    def live(self, name: str, device: int, host: int, nvme: int, **more: Any) -> Live:
        context = min(max(self.tokens + 64, 4096 + 64), 8192)
        return Live(self.model, self.work / name, device=device, host=host, nvme=nvme, context=context, **more)

    def prompt(self, count: int) -> list[int]:
        return [int(token) for token in rng.integers(100, 40_000, count)]

    def report(self, name: str, value: float, text: str) -> None:
        self.figures[name] = value
        print(f"  {name:34} {text}", flush=True)


def ttft_s(live: Live, tokens: list[int], count: int = 1) -> tuple[float, Any]:
    ((_, end),) = live.run([{"tokens": tokens, "max_tokens": count}], timeout_s=REQUEST_TIMEOUT_S)
    assert end.ev == "done", end
    return end.data["timings"].ttft_ms / 1e3, end.data


def forget_memory(live: Live) -> None:
    """Leaves what is durable in the store only, as a restart does."""
    live.flush()
    pager = live.engine.pager

    def drop() -> None:
        for node in list(pager.index.nodes.values()):
            for tier in (Tier.DEVICE, Tier.HOST):
                if node.is_in(tier) and node.durable and not node.pins and not node.moves:
                    pager.residency.evict(node, tier)

    live.engine.loop.call(drop).result(60.0)


def offload(bench: Bench) -> None:
    """Decode speed by where the context lies."""
    tokens, pages = min(bench.tokens, 8000), -(-min(bench.tokens, 8000) // PAGE)
    prompt = bench.prompt(tokens)
    sides = {
        "all on the device": (pages + 40, 0, 0),
        "3/4 in CPU memory": (pages // 4, pages + 40, 0),
        "3/4 streamed from the store": (pages // 8, pages // 8, 2 * pages),
    }
    rates: dict[str, float] = {}
    answers = []
    for name, (device, host, nvme) in sides.items():
        with bench.live("offload-" + str(device), device, host, nvme) as live:
            count = 49 if nvme == 0 else 9
            found = []
            for _ in range(bench.rounds):
                ((said, end),) = live.run([{"tokens": prompt, "max_tokens": count}], REQUEST_TIMEOUT_S)
                found.append(end.data["timings"].decode_tokens_per_s)
            answers.append(said[:9])
            rates[name] = statistics.median(found)
            bench.report(name, rates[name], f"{rates[name]:8.2f} tokens/s")
            if nvme:
                read = live.engine.loop.call(lambda: live.engine.pager.mover.statistics()[Link.DISK_READ]).result(5)
                floor = read.bytes_per_s / ((pages - pages // 4) * bench.record_bytes)
                bench.report("streamed: floor", floor, f"{floor:8.2f} tokens/s at {read.bytes_per_s / 1e6:.0f} MB/s")
    assert all(said == answers[0] for said in answers), "tokens differ"
    first, second, third = rates.values()
    bench.report("CPU memory / device", second / first, f"{second / first:8.3f}  (wanted: at least 0.7)")
    bench.report("store / device", third / first, f"{third / first:8.3f}")


def restored(bench: Bench, live: Live, prompt: list[int]) -> float:
    """Reports the time to the first token of a prefix that only the store has, beside computing it; the latter."""
    cold, warm = [], []
    ttft_s(live, bench.prompt(600))
    for number in range(bench.rounds):
        cold.append(ttft_s(live, bench.prompt(len(prompt)) if number else prompt)[0])
        forget_memory(live)
        seconds, data = ttft_s(live, prompt)
        assert data["timings"].hit_nvme > 0.95 * len(prompt), data
        warm.append(seconds)
    compute, load = statistics.median(cold), statistics.median(warm)
    rate = live.engine.pager.mover.statistics()[Link.DISK_READ].bytes_per_s
    bench.report("computed", compute, f"{compute:8.3f} s for {len(prompt)} tokens")
    bench.report("restored", load, f"{load:8.3f} s at {rate / 1e6:.0f} MB/s")
    bench.report("restored / computed", load / compute, f"{load / compute:8.3f}  (wanted: at most 0.2)")
    return compute


def restore(bench: Bench) -> None:
    """Time to the first token of a prefix that only the store has, from a disk as it is and from a slow one."""
    pages = -(-bench.tokens // PAGE)
    prompt = bench.prompt(bench.tokens - 20)
    with bench.live("restore", pages + 40, 0, 3 * pages) as live:
        compute = restored(bench, live, prompt)
        rate = live.engine.pager.mover.statistics()[Link.DISK_READ].bytes_per_s
        for factor in (20, 200):
            with Throttle(rate / factor):
                ttft_s(live, prompt)
                slow = []
                for _ in range(bench.rounds):
                    forget_memory(live)
                    seconds, data = ttft_s(live, prompt)
                    slow.append(seconds)
                share = data["usage"].cached_tokens / len(prompt)
            name = f"disk at 1/{factor} / computed"
            ratio = statistics.median(slow) / compute
            bench.report(name, ratio, f"{ratio:8.3f}  (wanted: at most 1.03); {share:.0%} came from the disk")


def deep(bench: Bench) -> None:
    """Time to the first token of a prefix that only the store has, for a model with twice the layers."""
    import torch
    import transformers

    from tests.daemon.engine.families import prepare

    spec = load_manifest(bench.model).spec
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=spec.intermediate,
        num_hidden_layers=2 * spec.num_layers, num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads,
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    prepared = prepare(transformers.LlamaForCausalLM(config).float().eval(), bench.work / "deep", "int4-g32")
    deeper = Bench(prepared, bench.work / "deep-cache", bench.tokens, max(bench.rounds // 2, 1))
    pages = -(-bench.tokens // PAGE)
    with deeper.live("deep", pages + 40, 0, 3 * pages) as live:
        restored(deeper, live, bench.prompt(bench.tokens - 20))
    bench.figures |= {f"deep: {name}": value for name, value in deeper.figures.items()}


def cold(bench: Bench) -> None:
    """What tiers and write-behind cost a prompt that nobody has asked before."""
    pages = -(-2048 // PAGE)
    found: dict[str, list[float]] = {"on": [], "off": []}
    with bench.live("cold-on", 3 * pages, 3 * pages, 40 * pages) as on, bench.live("cold-off", 3 * pages, 0, 0) as off:
        for number in range(2 * bench.rounds + 1):
            for name, live in (("on", on), ("off", off)) if number % 2 else (("off", off), ("on", on)):
                seconds, _ = ttft_s(live, bench.prompt(2000), 17)
                if number:
                    found[name].append(seconds)
        stats = on.engine.loop.call(on.engine.pager.statistics).result(10.0)
        store = on.engine.pager.store
        assert store is not None
        on.flush()
        kept = stats.written_pages * PAGE
        written = store.statistics().bytes_written
        bench.report("bytes written / kept token", written / max(kept, 1), f"{written / max(kept, 1):8.0f}")
    ratio = statistics.median(found["on"]) / statistics.median(found["off"])
    bench.report("cold: tiers on / off", ratio, f"{ratio:8.3f}  (wanted: at most 1.03)")


def crowd(bench: Bench) -> None:
    """Many requests for one prefix that lies in the store."""
    prompt = bench.prompt(4096)
    with bench.live("crowd", 700, 0, 600, max_streams=64) as live:
        ttft_s(live, prompt)
        forget_memory(live)
        store = live.engine.pager.store
        assert store is not None
        before = store.statistics().pages_read
        held = threading.Event()
        live.engine.loop.call(held.wait)  # all are there when the first is looked at
        numbers = [live.submit(tokens=[*prompt, number + 100], max_tokens=2) for number in range(50)]
        began_s = time.monotonic()
        for request in list(live.engine.loop._inbox.queue):
            if hasattr(request, "times"):
                request.times.arrived_s = began_s
        held.set()
        ended = live.collect(*numbers, timeout_s=REQUEST_TIMEOUT_S)
        ttfts = sorted(end.data["timings"].ttft_ms for _, end in ended.values())
        read = store.statistics().pages_read - before
        bench.report("crowd: pages read", read, f"{read:8d} for {len(prompt) // PAGE} pages")
        ratio = ttfts[-1] / ttfts[0]
        bench.report("crowd: last TTFT / first", ratio, f"{ratio:8.3f}  (wanted: at most 1.5); {ttfts[-1]:.0f} ms")


def scan(bench: Bench) -> None:
    """A prompt that nobody repeats must not flush one that everybody uses."""
    hot = bench.prompt(1024)
    with bench.live("scan", 128, 64, 0) as live:
        for number in range(3):
            ttft_s(live, [*hot, 100 + number])
        for _ in range(4):  # as many tokens, in prompts that fit beside the hot one
            ttft_s(live, bench.prompt(1900))
        _, data = ttft_s(live, [*hot, 999])
        share = data["usage"].cached_tokens / len(hot)
        bench.report("scan: hot prompt still hit", share, f"{share:8.1%}  (device and CPU memory only)")
    with bench.live("scan-nvme", 128, 64, 700) as live:
        for number in range(3):
            ttft_s(live, [*hot, 100 + number])
        ttft_s(live, bench.prompt(bench.tokens - 64))
        _, data = ttft_s(live, [*hot, 999])
        share = data["usage"].cached_tokens / len(hot)
        bench.report("scan: with a store", share, f"{share:8.1%}")


def main() -> None:
    parts: dict[str, Callable[[Bench], None]] = {
        "offload": offload, "restore": restore, "deep": deep, "cold": cold, "crowd": crowd, "scan": scan
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(parts))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, default=REPOSITORY / ".cache" / "test-models" / "smollm2-135m")
    parser.add_argument("--work", type=Path, default=REPOSITORY / ".cache")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tiers-bench-", dir=options.work) as work:
        bench = Bench(options.model, Path(work), options.tokens, options.rounds)
        for name in options.only.split(","):
            print(f"{name}: {parts[name].__doc__}")
            parts[name](bench)
    if options.json is not None:
        options.json.write_text(json.dumps(bench.figures, indent=2))


if __name__ == "__main__":
    main()

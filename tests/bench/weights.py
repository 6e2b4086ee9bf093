"""Models larger than their memory: decoding with all weights resident, half of them, and none, in one run.

    python -m tests.bench.weights [--model DIR] [--random DIR] [--tokens 12] [--rounds 3] [--batches 1,8,32]
        [--json FILE]

`--model` is a prepared model; `--random` prepares a Llama-shaped one of 1.5 billion random int4 weights there first, if
it isn't yet. Each placement runs in a process of its own, so that its memory can be told. The rate of the disk is
measured before and after each measured stretch, by reading the same file in the same way without computing. The floor
of a step is what takes longer: reading its bytes at that rate, or computing its rows, which is what the same step takes
with all weights resident.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from tests.daemon.engine.live import Live
from tierd.daemon.models import catalog
from tierd.daemon.models.catalog import Manifest, RecordEntry, Sampling, TensorEntry, load_manifest
from tierd.daemon.models.digests import model_digest, text_digest
from tierd.daemon.models.placement import MAX_SLOTS, DoesNotFit, place
from tierd.daemon.models.records import RECORD_ALIGN_BYTES, TENSOR_ALIGN_BYTES, plan_records
from tierd.daemon.models.spec import ModelSpec
from tierd.kernels.packing import WeightFormat, packed_bytes, sections
from tierd.tiers.mover import DISK_THREADS
from tierd.tiers.store_io import huge_block
from tierd.tiers.weights_file import WeightFile
from tierd.tiers.weights_ring import WeightRing

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_ROWS = 512  # the prompts of all streams in one step: from then on all of them decode
PART_BYTES = 4 << 20
PROMPT_TOKENS = 12


def random_model(directory: Path, tokenizer: Path) -> None:
    """A prepared model of the shape of a small Llama, 1.5 billion weights, int4-g32."""
    like = load_manifest(tokenizer)
    spec = msgspec.structs.replace(
        like.spec, num_layers=28, hidden=2048, intermediate=5632, heads=16, kv_heads=4, head_dim=128, tied=False
    )
    assert isinstance(spec, ModelSpec)
    directory.mkdir(parents=True)
    rng, entries, offset = np.random.default_rng(0), [], 0
    with (directory / catalog.WEIGHTS).open("wb") as file:
        for record in plan_records(spec):
            start, tensors, blocks = offset, [], []
            for tensor in record.tensors:
                kind = WeightFormat.FP32 if tensor.vector else WeightFormat.INT4_G32
                block = (
                    np.ones(tensor.cols, np.float32).view(np.uint8) if tensor.vector
                    else _random_int4(rng, tensor.rows, tensor.cols)
                )  # fmt: skip
                tensors.append(TensorEntry(tensor.name, kind.value, tensor.rows, tensor.cols, offset, block.nbytes))
                blocks.append(block)
                offset += block.nbytes
                gap = -offset % TENSOR_ALIGN_BYTES
                blocks.append(np.zeros(gap, np.uint8))
                offset += gap
            gap = -offset % RECORD_ALIGN_BYTES
            blocks.append(np.zeros(gap, np.uint8))
            offset += gap
            whole = np.concatenate(blocks)
            file.write(whole.data)
            digest = xxhash.xxh3_128_hexdigest(whole.data)
            entries.append(RecordEntry(record.name, start, offset - start, digest, tuple(tensors)))
    text = (tokenizer / catalog.TOKENIZER).read_text()
    (directory / catalog.TOKENIZER).write_text(text)
    manifest = Manifest(
        version=catalog.MANIFEST_VERSION, name=directory.name, source="random", source_digest="0", weights="int4-g32",
        spec=spec, format="int4-g32", context=spec.context,
        digest=model_digest(spec, tuple(entries), b"random", text_digest(text), None), bytes=offset,
        created_s=time.time(), records=tuple(entries), tokenizer_digest=text_digest(text), template_digest=None,
        eos_ids=like.eos_ids, bos_id=like.bos_id, add_bos=like.add_bos, sampling=Sampling(),
    )  # fmt: skip
    (directory / catalog.MANIFEST).write_bytes(msgspec.json.encode(manifest))


def _random_int4(rng: np.random.Generator, rows: int, cols: int) -> np.ndarray:
    """Random 4-bit integers; scales and minimums that give weights of variance 1 / cols."""
    at = sections(WeightFormat.INT4_G32, rows, cols)
    block = np.zeros(packed_bytes(WeightFormat.INT4_G32, rows, cols), np.uint8)
    block[: at.quants_bytes] = np.frombuffer(rng.bytes(at.quants_bytes), np.uint8)
    scale = np.float16(1 / (4.6 * np.sqrt(cols)))
    block[at.scales_offset : at.scales_offset + at.scales_bytes].view(np.float16)[:] = scale
    block[at.minimums_offset : at.minimums_offset + at.minimums_bytes].view(np.float16)[:] = np.float16(-7.5) * scale
    return block


def link_rate(file: WeightFile, ring: WeightRing) -> float:
    """Bytes per second that the disk gives for what a pass reads, with as many reads at once as the mover has.

    The very same bytes: a virtual disk has a cache of its own, and gives some ranges faster than others.
    """
    spans = [span for piece in ring.pieces for span in piece.spans]
    parts = iter([
        (span.blocks_offset + at, min(PART_BYTES, span.blocks_bytes - at))
        for span in spans for at in range(0, span.blocks_bytes, PART_BYTES)
    ])  # fmt: skip
    lock = threading.Lock()

    def read() -> None:
        block = huge_block(PART_BYTES)
        while True:
            with lock:
                part = next(parts, None)
            if part is None:
                return
            file.read([(part[0], block[: part[1]])])

    threads = [threading.Thread(target=read) for _ in range(DISK_THREADS)]
    begun_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(span.blocks_bytes for span in spans) / (time.perf_counter() - begun_s)


def rss_bytes(which: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(which)


def cached_bytes(path: Path) -> int:
    """How much of a file lies in the page cache."""
    answer = subprocess.run(["fincore", "-b", "-n", "-o", "RES", str(path)], capture_output=True, text=True, check=True)
    return int(answer.stdout)


def stretch(live: Live, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float, float]:
    """Answers, tokens per second and seconds per step of pure decoding: from each first token to the last one."""
    found = live.run([{"tokens": prompt, "max_tokens": tokens} for prompt in prompts])
    assert all(end.ev == "done" for _, end in found), found
    rate = sum(end.data["timings"].decode_tokens_per_s for _, end in found)
    return [answer for answer, _ in found], rate, len(prompts) / rate


def child(options: argparse.Namespace) -> None:
    """One placement, in a process of its own; prints figures as JSON."""
    model = Path(options.child)
    file = WeightFile(model / catalog.WEIGHTS)
    before_bytes = rss_bytes()
    rng = np.random.default_rng(1)
    prompts = [[int(t) for t in rng.integers(100, 30_000, PROMPT_TOKENS)] for _ in range(max(options.batches))]
    figures: dict[str, Any] = {"answers": {}, "batches": {}}
    with tempfile.TemporaryDirectory(dir=REPOSITORY / ".cache") as work, Live(
        model, Path(work), device=4 * max(options.batches) + 16, nvme=0, context=128, max_streams=max(options.batches),
        max_batch_rows=MAX_ROWS, weights_bytes=options.memory, requests=2 * max(options.batches), speculate="off",
    ) as live:  # fmt: skip
        weights = live.engine.weights
        pass_bytes = weights.statistics().pass_bytes
        for batch in options.batches:
            rounds = []
            for _ in range(options.rounds):
                ring = weights._ring
                before = link_rate(file, ring) if ring is not None else 0.0
                answers, rate, step_s = stretch(live, prompts[:batch], options.tokens)
                after = link_rate(file, ring) if ring is not None else 0.0
                link = (before + after) / 2
                rounds.append((rate, step_s, link, pass_bytes / link if link else 0.0))
            figures["answers"][batch] = answers
            names = ("tokens_per_s", "step_s", "link_bytes_per_s", "reading_s")
            figures["batches"][batch] = dict(
                zip(names, (statistics.median(values) for values in zip(*rounds, strict=True)), strict=True)
            )
        figures["weights"] = msgspec.to_builtins(live.engine.loop.call(weights.statistics).result(60))
        figures["rss_bytes"] = rss_bytes()
        figures["arena_bytes"] = live.engine.pager.device.slots * live.engine.pager.device.record_bytes
        figures["before_bytes"] = before_bytes
        figures["cached_bytes"] = cached_bytes(model / catalog.WEIGHTS)
    file.close()
    print(json.dumps(figures))


def parent(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    manifest = load_manifest(model)
    everything = manifest.bytes
    floor = next(size for size in range(1 << 20, everything, 1 << 20) if _fits(manifest, size))
    sides: dict[str, int | None] = {"all resident": None, "half": everything // 2, "all from the disk": floor}
    found: dict[str, Any] = {}
    print(f"{model.name}: {everything / 1e6:.0f} MB of weights", flush=True)
    for name, memory in sides.items():
        # What an earlier process left in the page cache must not serve this one.
        subprocess.run(["dd", f"of={model / catalog.WEIGHTS}", "oflag=nocache", "conv=notrunc,fdatasync", "count=0"],
                       capture_output=True, check=True)  # fmt: skip
        command = [sys.executable, "-m", "tests.bench.weights", "--child", str(model), "--tokens", str(options.tokens),
                   "--rounds", str(options.rounds), "--batches", ",".join(map(str, options.batches))]  # fmt: skip
        if memory is not None:
            command += ["--memory", str(memory)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        figures = found[name] = json.loads(done.stdout.splitlines()[-1])
        for batch, of in figures["batches"].items():
            of["computing_s"] = found["all resident"]["batches"][batch]["step_s"]
            of["floor_share"] = max(of["reading_s"], of["computing_s"]) / of["step_s"]
        _report(name, memory, figures)
    same = all(found[name]["answers"] == found["all resident"]["answers"] for name in found)
    print(f"  the same tokens everywhere: {same}", flush=True)
    return {name: {k: v for k, v in figures.items() if k != "answers"} for name, figures in found.items()}


def _fits(manifest: Manifest, size: int) -> bool:
    try:
        return place(manifest, size, MAX_ROWS).slots == MAX_SLOTS
    except DoesNotFit:
        return False


def _report(name: str, memory: int | None, figures: dict[str, Any]) -> None:
    weights = figures["weights"]
    taken = figures["rss_bytes"] - figures["before_bytes"] - figures["arena_bytes"]
    cap = "no bound" if memory is None else f"cap {memory / 1e6:.0f} MB"
    print(
        f"  {name}: {cap}, held {weights['memory_bytes'] / 1e6:.0f} MB, "
        f"read per pass {weights['pass_bytes'] / 1e6:.0f} MB, "
        f"grown by {taken / 1e6:.0f} MB beside the arena, page cache {figures['cached_bytes'] / 1e6:.0f} MB"
    )
    alone = next(iter(figures["batches"].values()))
    for batch, of in figures["batches"].items():
        times = of["tokens_per_s"] / alone["tokens_per_s"]
        print(
            f"    {batch:>3} streams: {of['tokens_per_s']:8.2f} tokens/s ({times:.1f} times the first), "
            f"step {1e3 * of['step_s']:7.1f} ms; reading {1e3 * of['reading_s']:.1f}, "
            f"computing {1e3 * of['computing_s']:.1f}, {100 * of['floor_share']:.0f}% of the floor; "
            f"disk {of['link_bytes_per_s'] / 1e9:.2f} GB/s", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--random", type=Path)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=lambda text: [int(word) for word in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    models = [options.model] if options.model else []
    if options.random:
        if not (options.random / catalog.MANIFEST).exists():
            random_model(options.random, REPOSITORY / ".cache" / "test-models" / "smollm2-135m")
        models.append(options.random)
    found = {model.name: parent(options, model) for model in models}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

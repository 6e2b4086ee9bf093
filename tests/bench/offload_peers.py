"""tierd beside `accelerate.disk_offload` and AirLLM: one model in fp32, weights on the disk, same prompts, one run.

    python -m tests.bench.offload_peers [--tokens 8] [--rounds 3] [--batches 1,8,32] [--airllm DIR] [--json FILE]
                                        [--limit-mb 700]

`pip install accelerate` first; AirLLM takes part where `--airllm` names a directory that it was installed to with
`pip install --no-deps --target DIR airllm sentencepiece scipy` (that needs torch, transformers and accelerate besides).
The model is the prepared SmolLM2-135M, its weights unpacked to fp32 once. Each side is a process of its own and lives
through the whole run; rounds alternate between them.

tierd runs more than once: with the least memory that it can stream with, every pass from the disk past the page cache,
in fp32 and in narrower formats, and with as much memory as the process of accelerate was seen to take, where fp32 fits.
The peers read through maps of files and are left the page cache, which holds the whole model after the first pass: they
are not made to read the disk, so what is said of them is what they reach at best. With `--limit-mb` every process lives
in a memory cgroup of its own with that limit once it has loaded, page cache included, as if the model did not fit the
machine; that takes the right to make one. Beside tokens a second stands what a
token takes of the processors, prompts included, which depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from tests.bench.weights import MAX_ROWS, PROMPT_TOKENS, REPOSITORY, rss_bytes

PREPARED = REPOSITORY / ".cache" / "test-models" / "smollm2-135m"
START_S = 600.0
# rows, answers, tokens a second while they decode
Measure = Callable[[list[list[int]], int], tuple[list[list[int]], float]]


# -- the peers --------------------------------------------------------------------------------------------------------


def transformers_measure(generate: Callable[..., Any]) -> Measure:
    """Greedy answers by transformers' own loop; the clock starts with the first token."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def measure(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
        clock, rows = Clock(), torch.tensor(prompts)
        with torch.inference_mode():
            found = generate(
                rows, attention_mask=torch.ones_like(rows), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, use_cache=True, pad_token_id=0, stopping_criteria=StoppingCriteriaList([clock]),
            )  # fmt: skip
        seconds = clock.times[-1] - clock.times[0]
        return found[:, rows.shape[1] :].tolist(), len(prompts) * (tokens - 1) / seconds

    return measure


def accelerate_measure(source: Path, work: Path) -> Measure:
    """All parameters as maps of files, put into the modules as they are needed."""
    import torch
    from accelerate import disk_offload
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    disk_offload(model, str(work / "offload"), execution_device=torch.device("cpu"))
    return transformers_measure(model.generate)


def airllm_measure(source: Path, work: Path, where: str) -> Measure:
    """One file of safetensors for each layer, read before it runs and dropped after it."""
    import torch

    sys.path.append(where)
    from airllm import AutoModel

    model = AutoModel.from_pretrained(
        str(source), device="cpu", dtype=torch.float32, layer_shards_saving_path=str(work / "shards")
    )
    return transformers_measure(model.generate)


# -- the processes ----------------------------------------------------------------------------------------------------


def serve(said: TextIO, measure: Measure, facts: Callable[[], dict[str, Any]]) -> None:
    """Answer orders of the parent, a line each, until its end of the pipe is closed."""
    print(json.dumps({"ready": True}), file=said, flush=True)
    for line in sys.stdin:
        order, begun_s = json.loads(line), time.process_time()
        answers, rate = measure(order["prompts"], order["tokens"])
        cpu_s = (time.process_time() - begun_s) / (len(answers) * order["tokens"])
        print(json.dumps({"answers": answers, "rate": rate, "cpu_s": cpu_s} | facts()), file=said, flush=True)


def child(options: argparse.Namespace) -> None:
    source, work = Path(options.source), Path(options.work)
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is not for the parent
    if options.child.startswith("tierd"):
        tierd_child(said, options, source, work)
        return
    import torch

    torch.set_num_threads(options.threads)
    measure = (
        accelerate_measure(source, work) if options.child == "accelerate"
        else airllm_measure(source, work, options.airllm)
    )  # fmt: skip
    serve(said, measure, lambda: {"rss_bytes": rss_bytes(), "peak_bytes": rss_bytes("VmHWM")})


def tierd_child(said: TextIO, options: argparse.Namespace, source: Path, work: Path) -> None:
    from tests.bench.weights import stretch
    from tests.daemon.engine.live import Live
    from tierd.daemon.models.catalog import load_manifest
    from tierd.daemon.models.importer import import_model
    from tierd.daemon.models.placement import MAX_SLOTS, DoesNotFit, place

    model = work / "models" / options.child.replace(" ", "-")
    import_model(source, model.parent, model.name, options.format, lambda *_: None)
    manifest = load_manifest(model)
    memory = options.memory
    if memory is None:  # the least with which a pass never waits for a slot
        def streams(size: int) -> bool:
            try:
                return place(manifest, size, MAX_ROWS).slots == MAX_SLOTS
            except DoesNotFit:
                return False

        memory = next(size for size in range(1 << 20, manifest.bytes, 1 << 20) if streams(size))
    most = max(options.batches)
    with Live(
        model, work, device=4 * most + 16, nvme=0, context=128, max_streams=most, max_batch_rows=MAX_ROWS,
        weights_bytes=memory, threads=options.threads,
    ) as live:  # fmt: skip
        def measure(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
            answers, rate, _ = stretch(live, prompts, tokens)
            return answers, rate

        def facts() -> dict[str, Any]:
            status = live.engine.loop.call(live.engine.weights.statistics).result(60)
            return {
                "rss_bytes": rss_bytes(), "peak_bytes": rss_bytes("VmHWM"), "weights_bytes": status.memory_bytes,
                "pass_bytes": status.pass_bytes,
            }  # fmt: skip

        serve(said, measure, facts)


class Cage:
    """A memory cgroup, of either version, for one process; what it reads counts, too."""

    def __init__(self, name: str) -> None:
        root = Path("/sys/fs/cgroup")
        first = (root / "memory").is_dir()
        self._at = (root / "memory" if first else root) / f"tierd-bench-{os.getpid()}-{name}"
        self._limit = self._at / ("memory.limit_in_bytes" if first else "memory.max")
        self._at.mkdir()

    def take(self, process: int) -> None:
        (self._at / "cgroup.procs").write_text(str(process))

    def limit(self, size: int) -> None:
        """What is over it has to leave. Raises OSError when memory of the process itself is."""
        self._limit.write_text(str(size))

    def close(self) -> None:
        self._at.rmdir()


class Side:
    """A child, spoken to by lines."""

    def __init__(self, name: str, options: argparse.Namespace, source: Path, work: Path, *more: str) -> None:
        self.name = name
        self.rates: dict[int, list[float]] = {}
        self.cpu_s: dict[int, list[float]] = {}  # of a token, prompts included
        self.last: dict[str, Any] = {}
        self._log = (work / f"{name.replace(' ', '-')}.log").open("w+")
        command = [
            sys.executable, "-m", "tests.bench.offload_peers", "--child", name, "--source", str(source),
            "--work", str(work / name.replace(" ", "-")), "--threads", str(options.threads),
            "--batches", ",".join(map(str, options.batches)), *more,
        ]  # fmt: skip
        (work / name.replace(" ", "-")).mkdir()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=REPOSITORY
        )
        self._cage = Cage(name.replace(" ", "-")) if options.limit_mb else None
        if self._cage:
            self._cage.take(self._process.pid)
        self._line()
        if self._cage:
            self._cage.limit(options.limit_mb << 20)

    def run(self, prompts: list[list[int]], tokens: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        self.last = self._line()
        self.rates.setdefault(len(prompts), []).append(self.last["rate"])
        self.cpu_s.setdefault(len(prompts), []).append(self.last["cpu_s"])
        what = f"{self.last['rate']:.2f} tokens/s, {1e3 * self.last['cpu_s']:.1f} ms of processors a token"
        print(f"  {self.name}, batch {len(prompts)}: {what}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Forget what was measured so far."""
        self.rates.clear()
        self.cpu_s.clear()

    def rate(self, batch: int) -> float:
        return statistics.median(self.rates[batch])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()
        if self._cage:
            self._cage.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended:\n{self._log.read()[-1500:]}")
        found: dict[str, Any] = json.loads(line)
        return found


def unpacked(work: Path) -> Path:
    """The model as transformers saves it, in fp32."""
    from tests.reference_model import load_reference

    source = work / "source"
    load_reference(PREPARED).save_pretrained(source)
    shutil.copy(PREPARED / "tokenizer.json", source / "tokenizer.json")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return source


def sides_of(options: argparse.Namespace, source: Path, work: Path, prompts: list[list[int]]) -> list[Side]:
    """All of them, started. One that can't start is told, and left out."""
    sides = [Side("accelerate", options, source, work)]
    sides[0].run(prompts[:1], 2)  # it has touched all weights then
    peer_bytes = sides[0].last["peak_bytes"]
    sides[0].clear()
    if options.airllm:
        try:
            sides.append(Side("airllm", options, source, work, "--airllm", options.airllm))
        except RuntimeError as exc:
            print(f"airllm does not run here: {exc}", flush=True)
    formats = ("fp32", "int8-g32", "int4-g32")
    sides += [Side(f"tierd {format}", options, source, work, "--format", format) for format in formats]
    sides[-3].run(prompts[:1], 2)
    beside = sides[-3].last["peak_bytes"] - sides[-3].last["weights_bytes"]
    sides[-3].clear()
    room = max(peer_bytes - beside, 0)
    print(f"accelerate's process took {peer_bytes / 1e6:.0f} MB; {room / 1e6:.0f} MB of them for weights", flush=True)
    sides.append(Side("tierd same memory", options, source, work, "--format", "fp32", "--memory", str(room)))
    return sides


def report(sides: list[Side], batches: list[int]) -> None:
    peers = [side for side in sides if not side.name.startswith("tierd")]
    head = "".join(f"{f'batch {batch}':>12}" for batch in batches)
    print(f"{'tokens/s, median':24}{head}{'peak MB':>10}{'read/step':>11}")
    for side in sides:
        rates = "".join(f"{side.rate(batch):12.2f}" for batch in batches)
        read = f"{side.last['pass_bytes'] / 1e6:8.0f} MB" if "pass_bytes" in side.last else ""
        print(f"{side.name:24}{rates}{side.last['peak_bytes'] / 1e6:10.0f}{read:>11}")
        spent = "".join(f"{1e3 * statistics.median(side.cpu_s[batch]):12.1f}" for batch in batches)
        print(f"  {'CPU ms a token':22}{spent}")
        for peer in peers if side not in peers else ():
            ratios = "".join(f"{side.rate(batch) / peer.rate(batch):11.1f}x" for batch in batches)
            print(f"  {'over ' + peer.name:22}{ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=lambda text: [int(word) for word in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--airllm", metavar="DIR", default="", help="where AirLLM was installed to")
    parser.add_argument("--json", type=Path, help="write every rate of every round here")
    parser.add_argument("--limit-mb", type=int, help="memory of each process, page cache included, by a cgroup")
    for hidden in ("--child", "--source", "--work", "--format"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    rng = np.random.default_rng(1)
    prompts = [[int(t) for t in rng.integers(100, 30_000, PROMPT_TOKENS)] for _ in range(max(options.batches))]
    with tempfile.TemporaryDirectory(dir=REPOSITORY / ".cache") as directory:
        work = Path(directory)
        sides = sides_of(options, unpacked(work), work, prompts)
        try:
            answers: dict[int, dict[str, Any]] = {}
            for _ in range(options.rounds):
                for batch in options.batches:
                    for side in sides:
                        side.run(prompts[:batch], options.tokens)
                        answers.setdefault(batch, {})[side.name] = side.last["answers"]
            report(sides, options.batches)
            for batch, of in answers.items():
                same = [name for name in of if of[name] == of["accelerate"]]
                print(f"batch {batch}: the tokens of accelerate also from {', '.join(same[1:]) or 'nobody'}")
        finally:
            for side in sides:
                side.close()
    if options.json:
        found = {side.name: {"tokens_per_s": side.rates, "cpu_s": side.cpu_s} for side in sides}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

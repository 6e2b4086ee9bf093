"""tierd, llama.cpp and transformers side by side: same GGUF, same token ids, same number of threads, one run.

    python -m tests.bench.peers [--rounds 3] [--threads 2] [--json FILE] [--skip transformers]

tierd is measured through its socket, as a client sees it. llama.cpp is measured through `llama-cpp-python` in this
process (install it to include it), which is kinder to it than a server would be. Rounds alternate between the peers, so
that a machine whose speed drifts drifts for both; medians and ratios are printed. Prompts are slices of the standard
library's `pydoc_data.topics`, a new one each round, so that nothing is reused unless the row says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from tierd.clients.blocking import Client
from tierd.daemon.protocol import Sampling, Submit

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
NEW_TOKENS = 48
WARM = 5  # asked so often: one takes 30 ms, in which a machine may do something else


class Peer(Protocol):
    """What every peer can be asked; all token ids are prompt ids of the same vocabulary."""

    name: str

    def ttft_s(self, tokens: list[int]) -> float: ...

    def decode_tokens_per_s(self, tokens: list[int], count: int) -> float: ...

    def parallel_tokens_per_s(self, prompts: list[list[int]], count: int) -> float: ...

    def restart(self) -> None: ...

    def close(self) -> None: ...


class Tierd:
    """The daemon in a directory of its own, killed with SIGKILL on `restart`."""

    name = "tierd"

    def __init__(self, models_dir: Path, threads: int) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="tierd-bench-")
        root = self._home.name
        self._env = os.environ | {
            "TIERD_MODELS_DIR": str(models_dir),
            "XDG_CACHE_HOME": f"{root}/cache", "XDG_STATE_HOME": f"{root}/state", "XDG_CONFIG_HOME": f"{root}/config",
            "XDG_RUNTIME_DIR": f"{root}/run", "TIERD_LISTEN": "", "TIERD_THREADS": str(threads),
        }
        os.makedirs(f"{root}/run", mode=0o700)
        self._command = [sys.executable, "-m", "tierd.daemon.cli"]
        self._start()

    def _start(self) -> None:
        start = [*self._command, "start", "--model", MODEL]
        subprocess.run(start, env=self._env, check=True, stdout=subprocess.DEVNULL)
        self.socket = Path(self._env["XDG_RUNTIME_DIR"]) / "tierd" / "tierd.sock"

    def _generate(self, tokens: list[int], count: int) -> tuple[float, float, int]:
        """Time to the first token, time of the last, tokens received."""
        sampling = Sampling(temperature=0.0, max_tokens=count, ignore_eos=True)
        with Client(self.socket) as client:
            begun, first, received = time.perf_counter(), 0.0, 0
            for event in client.generate(Submit(model=MODEL, tokens=tuple(tokens), sampling=sampling)):
                if event.ev == "text":
                    received += len(event.data["tokens"])
                    first = first or time.perf_counter() - begun
            return first, time.perf_counter() - begun, received

    def ttft_s(self, tokens: list[int]) -> float:
        return self._generate(tokens, 1)[0]

    def decode_tokens_per_s(self, tokens: list[int], count: int) -> float:
        first, last, received = self._generate(tokens, count)
        return (received - 1) / (last - first)

    def parallel_tokens_per_s(self, prompts: list[list[int]], count: int) -> float:
        threads = [threading.Thread(target=self._generate, args=(prompt, count)) for prompt in prompts]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(prompts) * count / (time.perf_counter() - begun)

    def settle(self, seconds: float = 3.0) -> None:
        """Lets write-behind finish."""
        time.sleep(seconds)

    def restart(self) -> None:
        status = [*self._command, "status", "--json"]
        answer = subprocess.run(status, env=self._env, check=True, capture_output=True)
        os.kill(json.loads(answer.stdout)["pid"], signal.SIGKILL)
        time.sleep(0.5)
        self._start()

    def close(self) -> None:
        subprocess.run([*self._command, "stop"], env=self._env, check=False, stdout=subprocess.DEVNULL)
        self._home.cleanup()


class LlamaCpp:
    """llama.cpp through the C API that llama-cpp-python exposes; greedy by argmax, flash attention on."""

    name = "llama.cpp"
    CONTEXT = 8192
    STREAMS = 8

    def __init__(self, gguf: Path, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        self._silence = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self._silence, None)
        self._model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), llama_cpp.llama_model_default_params())
        self._threads = threads
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(self.CONTEXT, 0, 1)
        self._open()

    def _open(self) -> None:
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self.CONTEXT * 2, 2048, 512
        params.n_threads = params.n_threads_batch = self._threads
        params.n_seq_max = self.STREAMS
        if hasattr(params, "kv_unified"):
            params.kv_unified = True
        self._context = self._api.llama_init_from_model(self._model, params)
        self._memory = self._api.llama_get_memory(self._context)
        self._held: list[int] = []

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Runs rows of (token, position, sequence, wants logits); answers the greedy token of each that wants one."""
        picked: list[int] = []
        for start in range(0, len(rows), 2048):
            part = rows[start : start + 2048]
            for i, (token, position, sequence, wanted) in enumerate(part):
                self._batch.token[i], self._batch.pos[i], self._batch.n_seq_id[i] = token, position, 1
                self._batch.seq_id[i][0], self._batch.logits[i] = sequence, wanted
            self._batch.n_tokens = len(part)
            if self._api.llama_decode(self._context, self._batch):
                raise RuntimeError("llama_decode failed")
            for i, row in enumerate(part):
                if row[3]:
                    logits = self._api.llama_get_logits_ith(self._context, i)
                    picked.append(int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax()))
        return picked

    def _prompt(self, tokens: list[int], sequence: int = 0, keep: int = 0) -> int:
        last = len(tokens) - 1
        return self._decode([(tokens[i], i, sequence, i == last) for i in range(keep, len(tokens))])[0]

    def ttft_s(self, tokens: list[int]) -> float:
        """Keeps the common prefix with the last prompt, as its server does."""
        keep = 0
        while keep < min(len(tokens) - 1, len(self._held)) and tokens[keep] == self._held[keep]:
            keep += 1
        self._api.llama_memory_seq_rm(self._memory, 0, keep, -1)
        begun = time.perf_counter()
        self._prompt(tokens, keep=keep)
        self._held = list(tokens)
        return time.perf_counter() - begun

    def decode_tokens_per_s(self, tokens: list[int], count: int) -> float:
        self._api.llama_memory_clear(self._memory, True)
        token, self._held = self._prompt(tokens), []
        begun = time.perf_counter()
        for step in range(count - 1):
            token = self._decode([(token, len(tokens) + step, 0, True)])[0]
        return (count - 1) / (time.perf_counter() - begun)

    def parallel_tokens_per_s(self, prompts: list[list[int]], count: int) -> float:
        self._api.llama_memory_clear(self._memory, True)
        self._held = []
        begun = time.perf_counter()
        newest = [self._prompt(prompt, sequence) for sequence, prompt in enumerate(prompts)]
        for step in range(count - 1):
            newest = self._decode([(token, len(prompts[s]) + step, s, True) for s, token in enumerate(newest)])
        return len(prompts) * count / (time.perf_counter() - begun)

    def restart(self) -> None:
        self._api.llama_free(self._context)
        self._open()

    def close(self) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


class Transformers:
    """transformers' own Llama in fp32 with the same weights, KV cache on."""

    name = "transformers"

    def __init__(self, model_dir: Path, threads: int) -> None:
        import torch

        from tests.reference_model import load_reference

        self._torch = torch
        torch.set_num_threads(threads)
        self._model = load_reference(model_dir)

    def ttft_s(self, tokens: list[int]) -> float:
        with self._torch.inference_mode():
            begun = time.perf_counter()
            self._model(self._torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
            return time.perf_counter() - begun

    def decode_tokens_per_s(self, tokens: list[int], count: int) -> float:
        with self._torch.inference_mode():
            out = self._model(self._torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
            begun = time.perf_counter()
            for _ in range(count - 1):
                newest = out.logits[:, -1:].argmax(-1)
                out = self._model(newest, past_key_values=out.past_key_values, use_cache=True)
            return (count - 1) / (time.perf_counter() - begun)

    def parallel_tokens_per_s(self, prompts: list[list[int]], count: int) -> float:
        with self._torch.inference_mode():
            begun = time.perf_counter()
            out = self._model(self._torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            for _ in range(count - 1):
                newest = out.logits[:, -1:].argmax(-1)
                out = self._model(newest, past_key_values=out.past_key_values, use_cache=True)
            return len(prompts) * count / (time.perf_counter() - begun)

    def restart(self) -> None:
        """Nothing is kept anyway."""

    def close(self) -> None:
        """Nothing to give back."""


def prompts(models_dir: Path) -> Iterator[Callable[[int], list[int]]]:
    """Answers functions that cut prompts nobody has seen yet."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models_dir / MODEL / "tokenizer.json"))
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text[:900_000], add_special_tokens=False).ids
    position = 0

    def cut(count: int) -> list[int]:
        nonlocal position
        if position + count > len(ids):
            position = 7  # another alignment: no page of the first pass fits
        position += count
        return ids[position - count : position]

    yield cut


Row = dict[str, list[float]]


def one_round(peer: Peer, cut: Callable[[int], list[int]], row: Row) -> None:
    """Everything once, on prompts of its own."""

    def note(name: str, value: float) -> None:
        row.setdefault(name, []).append(value)

    note("prefill 512, tok/s", 512 / peer.ttft_s(cut(512)))
    note("prefill 2048, tok/s", 2048 / peer.ttft_s(cut(2048)))
    note("decode at 64, tok/s", peer.decode_tokens_per_s(cut(64), NEW_TOKENS))
    note("decode at 2000, tok/s", peer.decode_tokens_per_s(cut(2000), NEW_TOKENS))
    note("8 streams, tok/s", peer.parallel_tokens_per_s([cut(64) for _ in range(8)], NEW_TOKENS))
    prompt = cut(1585)
    note("TTFT 1585 cold, s", peer.ttft_s(prompt))
    note("TTFT 1585 warm, s", statistics.median(peer.ttft_s(prompt) for _ in range(WARM)))
    if isinstance(peer, Tierd):
        peer.settle()
    peer.restart()
    note("TTFT 1585 after kill -9, s", peer.ttft_s(prompt))


def report(results: dict[str, Row]) -> None:
    """Medians of each peer, and tierd as a ratio of each (above 1 is better for tok/s, below 1 for seconds)."""
    others = [name for name in results if name != "tierd"]
    heads = "".join(f"{name:>14}" for name in results) + "".join(f"{'x ' + name:>16}" for name in others)
    print(f"{'median':28}{heads}")
    for metric in results["tierd"]:
        medians = {name: statistics.median(row[metric]) for name, row in results.items() if metric in row}
        line = f"{metric:28}" + "".join(f"{medians.get(name, float('nan')):14.3f}" for name in results)
        print(line + "".join(f"{medians['tierd'] / medians[name]:16.3f}" for name in others if name in medians))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    prepared = Path(os.environ.get("TIERD_TEST_MODELS", REPOSITORY / ".cache/test-models"))
    parser.add_argument("--models-dir", type=Path, default=prepared)
    parser.add_argument("--gguf", type=Path, help="what the prepared model was made from; needed for llama.cpp")
    parser.add_argument("--skip", action="append", default=[], choices=["llama.cpp", "transformers"])
    parser.add_argument("--json", type=Path, help="write every figure of every round here")
    options = parser.parse_args()
    peers: list[Peer] = []
    with contextlib.ExitStack() as running:

        def enter(peer: Peer) -> None:
            peers.append(peer)
            running.callback(peer.close)

        enter(Tierd(options.models_dir, options.threads))
        if options.gguf and "llama.cpp" not in options.skip:
            enter(LlamaCpp(options.gguf, options.threads))
        if "transformers" not in options.skip:
            sys.path.insert(0, str(REPOSITORY))
            enter(Transformers(options.models_dir / MODEL, options.threads))
        results: dict[str, Row] = {peer.name: {} for peer in peers}
        cut = next(prompts(options.models_dir))
        for _ in range(options.rounds):
            for peer in peers:
                one_round(peer, cut, results[peer.name])
    report(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

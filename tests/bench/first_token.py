"""The first token of a short chat, alone and beside long prefills, as a client of the socket sees it.

    python -m tests.bench.first_token [--rounds 24] [--long 8] [--tokens 4000] [--threads 2]

Each round asks one short chat while nothing else runs, then one while `--long` prompts of `--tokens` tokens are being
prefilled without a pause; prompts are new each time. Prints medians, and what the long ones lose to it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import threading
import time
from pathlib import Path

from tierd.clients.blocking import Client
from tierd.daemon.errors import TierdError
from tierd.daemon.protocol import Message, Sampling, Submit

from .peers import MODEL, REPOSITORY, Tierd

GREEDY = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)


def first_token_s(socket: Path, submit: Submit) -> float:
    with Client(socket) as client:
        begun = time.perf_counter()
        for event in client.generate(submit):
            if event.ev == "text":
                return time.perf_counter() - begun
    raise RuntimeError("no token came")


class Long:
    """Threads that prefill one long prompt after the other, each."""

    def __init__(self, socket: Path, count: int, tokens: int, rng: random.Random) -> None:
        self._socket = socket
        self._stop = threading.Event()
        self.ended = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(socket, tokens, random.Random(rng.random()))) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def settle(self) -> None:
        """Returns when the engine has all of them."""
        with Client(self._socket) as client:
            while client.call("status")["queue"]["live"] < len(self._threads):
                time.sleep(0.05)  # no event tells of it

    def _run(self, socket: Path, tokens: int, rng: random.Random) -> None:
        while not self._stop.is_set():
            prompt = tuple(rng.randrange(1000, 40000) for _ in range(tokens))
            try:
                first_token_s(socket, Submit(model=MODEL, tokens=prompt, sampling=GREEDY))
            except (TierdError, OSError):
                if self._stop.is_set():
                    return  # cut off
                raise
            with self._lock:
                self.ended += 1

    def stop(self, tierd: Tierd) -> None:
        """Cut them off: to let them end would take minutes."""
        self._stop.set()
        tierd.close()
        for thread in self._threads:
            thread.join()


def short(rng: random.Random, words: list[str]) -> Submit:
    question = "What is " + " ".join(rng.sample(words, 8)) + "?"
    return Submit(model=MODEL, messages=(Message(role="user", content=question),), sampling=GREEDY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--long", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    models = Path(os.environ.get("TIERD_TEST_MODELS", REPOSITORY / ".cache" / "test-models"))
    rng = random.Random(7)
    words = [word for word in Path(__file__).read_text().split() if word.isalpha()]
    tierd = Tierd(models, asked.threads)
    long = None
    try:
        for _ in range(3):
            first_token_s(tierd.socket, short(rng, words))
        alone = [first_token_s(tierd.socket, short(rng, words)) for _ in range(asked.rounds)]
        long = Long(tierd.socket, asked.long, asked.tokens, rng)
        long.settle()
        begun, beside = time.perf_counter(), []
        for _ in range(asked.rounds):
            beside.append(first_token_s(tierd.socket, short(rng, words)))
            time.sleep(rng.uniform(0.2, 0.6))  # so that it comes at any moment of a step
        took_s, ended = time.perf_counter() - begun, long.ended
    finally:
        if long is not None:
            long.stop(tierd)
        else:
            tierd.close()
    one, other = statistics.median(alone), statistics.median(beside)
    print(f"alone  {one * 1e3:6.0f} ms (median of {len(alone)}, {min(alone) * 1e3:.0f} to {max(alone) * 1e3:.0f})")
    print(f"beside {other * 1e3:6.0f} ms (median of {len(beside)}, {min(beside) * 1e3:.0f} to {max(beside) * 1e3:.0f})")
    print(f"ratio  {other / one:6.2f}; long prompts ended in {took_s:.0f} s: {ended}")


if __name__ == "__main__":
    main()

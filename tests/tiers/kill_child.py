"""The process that the kill tests kill.

Each line on standard input, `directory seed point k when`, forks a child that opens the store and writes, rewrites,
removes and reads pages until it is killed. It says before and after each step what it does, one line each:
`w numbers version` / `W` (written, acknowledged), `r numbers` / `R`, and `X text` for whatever must never happen. When
the child is gone its parent prints `end`. Forking from a process that has imported everything makes a cycle cheap.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from pathlib import Path

from tests.tiers.faults import KillIO
from tests.tiers.pages import holds, key, open_store, page
from tierd.tiers.store import Store

STEPS = 100  # a named point that is not met by then is not met at all
NUMBERS = range(40)  # eight more than the slots there are


def say(text: str) -> None:
    """One line, one write: a kill can't tear it."""
    os.write(1, f"{text}\n".encode())


def work(directory: Path, seed: int, io: KillIO) -> None:
    rng = random.Random(seed)
    store = open_store(directory, io=io.as_io())
    stored = {found.key: found.hits for found in store.pages()}
    held = {number: stored[key(number)] for number in NUMBERS if key(number) in stored}
    say(f"open {len(held)}")
    for _ in range(STEPS):
        step(store, rng, held)
    say("done")


def step(store: Store, rng: random.Random, held: dict[int, int]) -> None:
    choice = rng.random()
    if choice < 0.5:
        numbers = rng.sample(NUMBERS, rng.randrange(1, 6))
        version = rng.randrange(1, 1 << 30)
        if len(numbers) > store.free_slots:
            remove(store, rng.sample(sorted(held), min(len(held), 8)), held)
        say(f"w {' '.join(map(str, numbers))} {version}")
        store.write([page(number, version) for number in numbers])
        say("W")
        held |= dict.fromkeys(numbers, version)
    elif choice < 0.65 and held:
        remove(store, rng.sample(sorted(held), rng.randrange(1, len(held) + 1) // 3 + 1), held)
    elif choice < 0.97 and held:
        number = rng.choice(sorted(held))
        store.touch({key(number): (held[number], float(held[number]))})
        if not holds(store, number, held[number]):
            say(f"X page {number} is lost")
    elif choice < 0.99:
        store.gc()
    elif findings := store.check():
        say(f"X {findings}")


def remove(store: Store, numbers: list[int], held: dict[int, int]) -> None:
    if not numbers:
        return
    say(f"r {' '.join(map(str, numbers))}")
    store.remove([key(number) for number in numbers])
    say("R")
    for number in numbers:
        del held[number]


def main() -> None:
    for line in sys.stdin:
        directory, seed, point, k, when = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                work(Path(directory), int(seed), KillIO(point, int(k), when))
            except BaseException:
                say(f"X {traceback.format_exc()!r}")
            os._exit(1)
        say(f"pid {pid}")
        os.waitpid(pid, 0)
        say("end")


if __name__ == "__main__":
    main()

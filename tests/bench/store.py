"""What the store costs beside the bare disk: restoring pages through the mover, and streaming them by sections.

    python -m tests.bench.store [--pages 512] [--rounds 7] [--depth 8]

Each round reads the same pages of the same slab file in several ways, one after the other: with plain `os.preadv`
(O_DIRECT, aligned, as many threads), then with `Store.read_many` through the mover, checks included, then as a lease of
a pager, from its `fetch` until it is ready. Figures are medians over the rounds; a ratio is the median of the rounds'
ratios. The files lie under `.cache` of the repository, so on its disk, and are removed afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tierd.tiers.arena import Arena
from tierd.tiers.keys import page_key, root_key
from tierd.tiers.links import Link
from tierd.tiers.loader import PAGES_PER_JOB
from tierd.tiers.mover import Job, JobClass, Mover
from tierd.tiers.page import PageKey, Tier
from tierd.tiers.pager import Pager
from tierd.tiers.staging import Staging
from tierd.tiers.store import PageMeta, Store
from tierd.tiers.store_io import Bytes

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ROOT = root_key("bench")
SECTIONS = 30  # of SmolLM2-135M
SECTION_BYTES = 24_576
WRITE_GROUP = 32
PAGE_TOKENS = 16
SPARE_SLOTS = 32  # of the arena: a pager keeps some free


def in_threads(count: int, call: Callable[[int], object], depth: int) -> float:
    """Seconds for call(0) to call(count - 1) on `depth` threads that take the next number as they come."""
    numbers = itertools.count()

    def work() -> None:
        while (number := next(numbers)) < count:
            call(number)

    threads = [threading.Thread(target=work) for _ in range(depth)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start_s


def written_bytes() -> int:
    """What this process has had written to disks so far."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("write_bytes"))


class Bench:
    """A store full of random pages, and memory for all of them."""

    def __init__(self, directory: Path, pages: int, depth: int) -> None:
        self.pages, self.depth = pages, depth
        self.record_bytes = SECTIONS * SECTION_BYTES
        self.arena = Arena("bench", pages + SPARE_SLOTS, self.record_bytes)
        self.arena.array[:] = 1  # so that no page of memory is faulted in while the clock runs
        self.store = Store.open(
            directory,
            record_bytes=self.record_bytes,
            namespace=ROOT,
            capacity_bytes=(pages + 1) * (self.record_bytes + 4096),
            sections=SECTIONS,
            section_bytes=SECTION_BYTES,
        )
        self.slot_bytes = self.store.statistics().slot_bytes
        self.mover = Mover(disk_threads=depth)
        self.pager: Pager | None = None
        self.keys: list[PageKey] = []
        self.fd = -1
        self.directory = directory

    def write(self) -> None:
        """Fill the store and say how fast and how much."""
        rng = np.random.default_rng(1)
        parent, batch, took_s = ROOT, [], 0.0
        before = written_bytes()
        for number in range(self.pages):
            row = self.arena.row(number)
            row[:] = np.frombuffer(rng.bytes(len(row)), np.uint8)
            tokens = tuple(range(number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS))
            key = page_key(parent, b"".join(token.to_bytes(4, "little") for token in tokens))
            batch.append((PageMeta(key, parent, tokens, 0, 0.0), row))
            self.keys.append(key)
            parent = key
            if len(batch) == WRITE_GROUP or number == self.pages - 1:
                start_s = time.perf_counter()
                self.store.write(batch)
                took_s += time.perf_counter() - start_s
                batch = []
        written = (written_bytes() - before) / self.pages
        rate = self.pages * self.slot_bytes / took_s / 1e6
        print(f"write: {rate:.0f} MB/s in groups of {WRITE_GROUP}, each synced")
        print(f"bytes written for a page of {self.record_bytes:,}: {written:,.0f} ({written / self.record_bytes:.4f}x)")
        self.fd = os.open(self.directory / "slab-00000.pages", os.O_RDONLY | os.O_DIRECT)

    def plain_pages(self) -> float:
        """Seconds to read every slot with plain preadv."""
        rows = [row.data for row in self.arena.array[: self.pages]]
        return in_threads(
            self.pages, lambda n: os.preadv(self.fd, [rows[n]], n * self.slot_bytes + 4096), self.depth
        )

    def restore(self, group: int) -> float:
        """Seconds to read every page through the mover, `group` pages in a job."""
        start_s = time.perf_counter()
        jobs = 0
        for first in range(0, self.pages, group):
            keys = self.keys[first : first + group]
            rows = [self.arena.row(number) for number in range(first, first + len(keys))]
            call = partial(self._read, keys, rows)
            assert self.mover.submit(Job(call, Link.DISK_READ, len(keys) * self.record_bytes), JobClass.NOW)
            jobs += 1
        while jobs:
            self.mover.wait(1.0)
            for done in self.mover.drain():
                assert done.error is None
                jobs -= 1
        return time.perf_counter() - start_s

    def lease(self) -> float:
        """Seconds from the fetch of a lease on all pages until it is ready. The pager forgets them again."""
        if self.pager is None:
            self.pager = Pager(
                layout_record_bytes=self.record_bytes, page_tokens=PAGE_TOKENS, root=ROOT, device=self.arena,
                host=None, store=self.store, mover=self.mover, clock=time.perf_counter,
                events=lambda name, fields: print(name, fields),
            )  # fmt: skip
        pager, tokens = self.pager, list(range(self.pages * PAGE_TOKENS + 1))
        lease = pager.match(tokens)
        assert lease.hit_nvme == self.pages * PAGE_TOKENS
        start_s = time.perf_counter()
        pager.fetch(lease, float("inf"))
        while not lease.ready:
            self.mover.wait(1.0)
            pager.poll(pager.clock())
        took_s = time.perf_counter() - start_s
        pager.release(lease, tokens[:-1])
        for node in list(pager.index.nodes.values()):
            pager.residency.evict(node, Tier.DEVICE)
        return took_s

    def _read(self, keys: list[PageKey], rows: list[Bytes]) -> None:
        if len(keys) == 1:
            self.store.read_into(keys[0], rows[0])
        else:
            assert not any(self.store.read_many(keys, rows))

    def plain_sections(self, count: int) -> float:
        """Seconds to read all pages by `count` sections at a time, layer by layer, with plain preadv."""
        size = count * SECTION_BYTES
        block = self.arena.array.reshape(-1)[: self.pages * size].reshape(self.pages, size)
        rows = [row.data for row in block]

        def read(number: int) -> None:
            stage, page = divmod(number, self.pages)
            os.preadv(self.fd, [rows[page]], page * self.slot_bytes + 4096 + stage * size)

        return in_threads(SECTIONS // count * self.pages, read, self.depth)

    def stream(self, staging: Staging) -> float:
        """Seconds to stage all sections of all pages."""
        start_s = time.perf_counter()
        with staging.open(self.keys) as flow:
            for section in range(SECTIONS):
                flow.section(section, float("inf"))
        return time.perf_counter() - start_s

    def close(self) -> None:
        """Stop the threads and close the files."""
        self.mover.close()
        self.store.close()
        if self.fd >= 0:
            os.close(self.fd)


def timed(call: Callable[[], float]) -> tuple[float, float]:
    """Seconds that a call says it took, and seconds of all processors."""
    start_s = time.process_time()
    return call(), time.process_time() - start_s


def compare(name: str, plain: Callable[[], float], ours: Callable[[], float], total_bytes: int, rounds: int) -> None:
    """Run both in turn and print medians and the ratio. The load of the machine goes with it: other work counts."""
    pairs = [(*timed(plain), *timed(ours)) for _ in range(rounds)]
    plain_s, plain_cpu_s, ours_s, ours_cpu_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = [round_[0] / round_[2] for round_ in pairs]
    rates = f"plain {total_bytes / plain_s / 1e6:5.0f} MB/s, tierd {total_bytes / ours_s / 1e6:5.0f} MB/s"
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{name}: {rates}, ratio {statistics.median(ratios):.3f} ({spread}); ", end="")
    print(f"processors {plain_cpu_s:.3f} and {ours_cpu_s:.3f} s; load {os.getloadavg()[0]:.1f}", flush=True)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--groups", type=int, nargs="*", default=[1, PAGES_PER_JOB], help="pages of a restoring job")
    parser.add_argument("--sections", type=int, nargs="*", default=[1, 2, 5], help="sections of a read")
    arguments = parser.parse_args()
    (REPOSITORY / ".cache").mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="bench-store-", dir=REPOSITORY / ".cache"))
    try:
        bench = Bench(directory, arguments.pages, arguments.depth)
        try:
            print(f"{arguments.pages} pages, {arguments.depth} threads, direct {bench.store.statistics().direct_io}")
            bench.write()
            total = arguments.pages * bench.record_bytes
            for group in arguments.groups:
                name = f"restore, {group} pages a job"
                compare(name, bench.plain_pages, partial(bench.restore, group), total, arguments.rounds)
            compare("restore, a lease", bench.plain_pages, bench.lease, total, arguments.rounds)
            for count in arguments.sections:
                staging = Staging(
                    bench.store, bench.mover, SECTIONS, SECTION_BYTES, read_bytes=count * SECTION_BYTES
                )
                name = f"stream by {count} sections ({staging.bytes_for(arguments.pages) >> 20} MiB)"
                plain, ours = partial(bench.plain_sections, count), partial(bench.stream, staging)
                compare(name, plain, ours, total, arguments.rounds)
        finally:
            bench.close()
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()

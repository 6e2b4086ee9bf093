"""What a machine was measured to do, kept beside the caches with a fingerprint of the machine.

Filled in by `daemon.engine.measure` (`tierd doctor --measure`), read by the cost model. Without a measurement there are
`ASSUMED` figures, and everything predicted from them says so. A file of another machine, another number of threads or
another version counts as none.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tierd.daemon.machine import total_memory_bytes
from tierd.daemon.paths import nearest_existing

FILE_NAME = "measured.json"
FORMAT_VERSION = 2
MAX_FILE_BYTES = 1 << 20
_SPELLED = re.compile(r"\\([0-7]{3})")  # a space in the name of a mount point


class Fingerprint(msgspec.Struct, frozen=True):
    """What has to be the same for a measurement to hold."""

    cpu: str
    threads: int
    memory_bytes: int
    disk: str  # of the cache directory: kind of file system, and what is mounted; device numbers change at a boot


class DiskRate(msgspec.Struct, frozen=True):
    """Bytes per second of reads and writes of so many bytes each, past the page cache."""

    request_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float


class Compute(msgspec.Struct, frozen=True):
    """Seconds that the decoder takes, taken apart.

    A pass takes `pass_s`, and for each matrix element of the layers (of the head) the seconds of `layer_s` (`head_s`)
    at its number of rows, `rows` being the numbers that were measured. Attention takes, for each row, layer, token it
    looks at, head and element of a head, `attend_s` for rows of different sequences and `attend_many_s` for rows of
    one prompt, by page format.
    """

    format: str  # of the weights: most of their bytes
    rows: tuple[int, ...]
    layer_s: tuple[float, ...]
    head_s: tuple[float, ...]
    attend_s: dict[str, float]
    attend_many_s: dict[str, float]
    pass_s: float = 0.0

    def layer_element_s(self, rows: float) -> float:
        """Seconds of one matrix element in a pass of so many rows."""
        return _between(self.rows, self.layer_s, rows)

    def head_element_s(self, rows: float) -> float:
        """The same for the head, and rows of logits."""
        return _between(self.rows, self.head_s, rows) if rows else 0.0

    def attention_s(self, format: str, *, prompt: bool) -> float:
        """Seconds of one row, layer, token, head and element; the dearest measured one for other page formats."""
        table = self.attend_many_s if prompt else self.attend_s
        return table.get(format) or max(table.values())


class Loop(msgspec.Struct, frozen=True):
    """Seconds around a pass: of each step, and of each stream in it (sampling, text, events)."""

    step_s: float
    stream_s: float
    request_s: float  # of a request, from its submission to its first step


class Streaming(msgspec.Struct, frozen=True):
    """What is read past a running step: bytes per second with nothing else to do, and what a byte costs the processors.

    Pages are read by some layers at a time and by many at once, weights in large pieces one after the other.
    """

    pages_bytes_per_s: float
    page_byte_s: float
    weights_bytes_per_s: float
    weight_byte_s: float


class Measured(msgspec.Struct, frozen=True):
    """All of it. `compute` by weight format, and by `model:` and digest for prepared models.

    `assumed`: nothing was measured.
    """

    version: int
    fingerprint: Fingerprint
    taken_s: float  # since the epoch
    memory_bytes_per_s: float
    disk: tuple[DiskRate, ...]
    compute: dict[str, Compute]
    loop: Loop
    streaming: Streaming
    assumed: bool = False

    def compute_for(self, digest: str, format: str) -> tuple[Compute, str]:
        """The rates that describe a model best, and what they were measured on."""
        if (own := self.compute.get(f"model:{digest}")) is not None:
            return own, "this model"
        if (same := self.compute.get(format)) is not None:
            return same, f"a random model in {format}"
        nearest = min(self.compute, key=lambda name: abs(BITS.get(name, 99.0) - BITS.get(format, 16.0)))
        return self.compute[nearest], f"a model in {self.compute[nearest].format}, not {format}"


# Bits of a weight, scales included: to find the format that is most alike.
BITS = {
    "fp32": 32.0, "bf16": 16.0, "int8": 8.0, "int8-g32": 8.5, "int4-g32": 5.0, "int5-g32": 6.0, "int4-k": 4.5,
    "int5-k": 5.5, "int8-k": 8.6,
}  # fmt: skip

# Seconds of one matrix element in a pass of so many rows, of one core: Zen 3 with AVX2, from `docs/kernels.md`.
_ASSUMED_ROWS = (1, 8, 64, 512)
_ASSUMED_CORE_S = (8.5e-11, 5.0e-10, 2.1e-9, 1.55e-8)


def assumed(fingerprint: Fingerprint) -> Measured:
    """Figures for a machine that nobody has measured: an ordinary core, two channels of memory, a slow NVMe drive."""
    cores = max(1, min(fingerprint.threads, 16))
    memory_bytes_per_s = 20e9
    compute = {}
    for name, bits in BITS.items():
        floor_s = bits / 8 / memory_bytes_per_s  # a pass reads every weight once
        seconds = tuple(max(core_s / cores, floor_s) for core_s in _ASSUMED_CORE_S)
        attend = {"fp32": 1.1e-10 / cores, "fp16": 1.2e-10 / cores, "bf16": 1.2e-10 / cores}
        many = {page: 0.4 * second for page, second in attend.items()}
        compute[name] = Compute(name, _ASSUMED_ROWS, seconds, seconds, attend, many, 2e-4)
    disk = tuple(DiskRate(size, 1e9, 4e8) for size in (128 << 10, 1 << 20))
    return Measured(
        FORMAT_VERSION, fingerprint, 0.0, memory_bytes_per_s, disk, compute, Loop(5e-4, 2e-4, 5e-3),
        Streaming(1e9, 5e-10, 1.5e9, 2e-10), True,
    )  # fmt: skip


def fingerprint(cache_dir: Path, threads: int, memory_bytes: int) -> Fingerprint:
    """That of this machine, for a computation with so many threads and caches in this directory."""
    return Fingerprint(_cpu_name(), threads, memory_bytes, disk_name(nearest_existing(cache_dir)))


def disk_name(place: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """What a directory lies on: `ext4 /dev/nvme0n1p2`. Where nobody tells, the number of the device."""
    found, best = f"{place.stat().st_dev:x}", -1
    resolved = place.resolve()
    try:
        lines = mounts.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        where, _, what = line.partition(" - ")
        if len(where.split()) > 4 and len(what.split()) > 1:
            point = _SPELLED.sub(lambda octal: chr(int(octal[1], 8)), where.split()[4])
            if resolved.is_relative_to(point) and len(point) >= best:  # of two at one place the later one is seen
                found, best = " ".join(what.split()[:2]), len(point)
    return found


def load(cache_dir: Path, wanted: Fingerprint) -> Measured | None:
    """The measurement of this machine, None where there is none that holds."""
    try:
        with (cache_dir / FILE_NAME).open("rb") as file:
            found = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=Measured)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    sound = found.compute and found.disk and all(map(_sound, found.compute.values()))
    return found if sound and found.version == FORMAT_VERSION and found.fingerprint == wanted else None


def of_this_machine(cache_dir: Path, threads: int) -> Measured:
    """What to plan with here: the measurement, or what is assumed where there is none that holds."""
    here = fingerprint(cache_dir, threads, total_memory_bytes())
    return load(cache_dir, here) or assumed(here)


def save(cache_dir: Path, measured: Measured) -> Path:
    """Keep a measurement; whole or not at all. Raises OSError."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=FILE_NAME + ".", dir=cache_dir)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(measured), indent=1))
        os.replace(name, cache_dir / FILE_NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return cache_dir / FILE_NAME


def _sound(compute: Compute) -> bool:
    """Whether a table can be computed with: a file may have been edited."""
    lengths = {len(compute.rows), len(compute.layer_s), len(compute.head_s)}
    numbers = [*compute.rows, *compute.layer_s, *compute.head_s, *compute.attend_s.values(),
               *compute.attend_many_s.values()]  # fmt: skip
    ascending = all(low < high for low, high in zip(compute.rows, compute.rows[1:], strict=False))
    tables = compute.attend_s and compute.attend_many_s
    return bool(lengths == {len(compute.rows)} and compute.rows and ascending and tables and min(numbers) > 0)


def _between(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    """A straight line between the measured points, and beyond the last one in proportion to the rows."""
    if x <= xs[0]:
        return ys[0]
    for index in range(1, len(xs)):
        if x <= xs[index]:
            share = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
            return ys[index - 1] + share * (ys[index] - ys[index - 1])
    return ys[-1] * x / xs[-1]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith(("model name", "Model", "Hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return os.uname().machine

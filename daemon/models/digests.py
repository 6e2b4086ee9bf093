"""Digests of model files: what a source is, what a prepared model is, and whether it still is that."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from tierd.daemon.models.catalog import TEMPLATE, TOKENIZER, WEIGHTS, Manifest, RecordEntry
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.file_reader import FileReader
from tierd.daemon.models.hub import Progress
from tierd.daemon.models.safetensors_file import model_files
from tierd.daemon.models.spec import ModelSpec

_CHUNK_BYTES = 4 << 20
_DIGEST_BYTES = 16
# Besides the weights, the files of a model directory that an import reads.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


class Digest(Protocol):
    """What is needed of a digest of `hashlib`."""

    def update(self, data: memoryview | bytes, /) -> None:
        """More bytes."""

    def digest(self) -> bytes:
        """Of all bytes so far."""

    def hexdigest(self) -> str:
        """The same as text."""


def read_chunks(reader: FileReader, offset: int, count_bytes: int) -> Iterator[memoryview]:
    """The bytes of a range of a file, a few MB at a time."""
    end = offset + count_bytes
    while offset < end:
        size = min(_CHUNK_BYTES, end - offset)
        yield reader.read(offset, size, "the data").data
        offset += size


def record_digest(reader: FileReader, offset: int, count_bytes: int, whole: Digest) -> str:
    """Hex XXH3-128 of a record of `weights.bin`, whose bytes go into the digest of the whole file on the way."""
    part = xxhash.xxh3_128()
    for chunk in read_chunks(reader, offset, count_bytes):
        part.update(chunk)
        whole.update(chunk)
    return part.hexdigest()


def new_digest() -> Digest:
    """BLAKE2b-128 of nothing yet."""
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def file_digest(path: Path) -> bytes:
    """BLAKE2b-128 of a file. Raises ModelFileError if it can't be read."""
    digest = new_digest()
    with FileReader(path) as reader:
        for chunk in read_chunks(reader, 0, reader.size_bytes):
            digest.update(chunk)
    return digest.digest()


def source_digest(source: Path) -> str:
    """What a source is made of: hex BLAKE2b-128 over the names and contents of the files that an import reads."""
    if source.is_dir():
        files = [source / n for n in SIDE_FILES if (source / n).is_file()] + model_files(source)
    else:
        files = [source]
    digest = new_digest()
    for path in files:
        # A lone file's name says nothing: it may have been downloaded under another one.
        name = path.name.encode() if len(files) > 1 else b""
        digest.update(len(name).to_bytes(4, "little") + name + file_digest(path))
    return digest.hexdigest()


def text_digest(text: str) -> str:
    """Hex BLAKE2b-128 of a text."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def model_digest(
    spec: ModelSpec, records: tuple[RecordEntry, ...], weights: bytes, tokenizer: str, template: str | None
) -> str:
    """The identity of a prepared model: spec, layout, weight content, tokenizer and template."""
    digest = new_digest()
    for part in (_encoded(spec), msgspec.json.encode(records), weights, tokenizer.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update((template or "none").encode())
    return digest.hexdigest()


def _encoded(spec: ModelSpec) -> bytes:
    """Without the fields that came later, where they say nothing: models keep the digest that they had before."""
    fields = msgspec.to_builtins(spec)
    for part, later in (
        (fields["rope"], {"truncate": True}),
        (fields["experts"] or {}, {"bias": False, "limit": 0.0, "slope": 0.0}),
        (fields, {"experts": None, "sink_logits": False}),
    ):
        for name, nothing in later.items():
            if name in part and part[name] == nothing:
                del part[name]
    return msgspec.json.encode(fields)


def verify(
    directory: Path, manifest: Manifest, progress: Progress = lambda stage, done, total: None
) -> list[str]:
    """Compare every byte of a prepared model with its digests; a sentence for each difference, none if all is well."""
    findings: list[str] = []
    whole = new_digest()
    try:
        with FileReader(directory / WEIGHTS) as reader:
            for record in manifest.records:
                progress("verify", record.offset, manifest.bytes)
                if record_digest(reader, record.offset, record.bytes, whole) != record.digest:
                    findings.append(f"record {record.name} of {WEIGHTS} differs from its digest")
    except ModelFileError as exc:
        findings.append(str(exc))
    findings += verify_texts(directory, manifest)
    computed = model_digest(
        manifest.spec, manifest.records, whole.digest(), manifest.tokenizer_digest, manifest.template_digest
    )
    if not findings and computed != manifest.digest:
        findings.append("the manifest differs from its digest")
    return findings


def verify_texts(directory: Path, manifest: Manifest) -> list[str]:
    """The same for the tokenizer and the template alone."""
    findings: list[str] = []
    texts = [(TOKENIZER, manifest.tokenizer_digest)]
    texts += [(TEMPLATE, manifest.template_digest)] if manifest.template_digest else []
    for name, expected in texts:
        try:
            if file_digest(directory / name).hex() != expected:
                findings.append(f"{name} differs from its digest")
        except ModelFileError as exc:
            findings.append(str(exc))
    return findings

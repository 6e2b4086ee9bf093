"""What `tierd plan MODEL` means: a prepared model, a `config.json`, or a shape from the built-in table."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tierd.daemon.errors import ModelNotFound, suggest
from tierd.daemon.models import catalog
from tierd.daemon.plan.from_config import read_config, shape_from_config
from tierd.daemon.plan.known import KNOWN, known_name, known_shape
from tierd.daemon.plan.shape import Shape, shape_from_spec
from tierd.daemon.plan.weights import WeightBytes, prepared_bytes, weight_bytes

# Of models that aren't prepared: the most exact format first.
SHAPE_FORMATS = ("bf16", "int8-g32", "int4-g32")
SHAPE_SUFFIX = "-shape"


class Subject(NamedTuple):
    """A model to plan for. `formats`: weight formats that may be chosen, with their bytes, the most exact one first."""

    name: str
    source: str
    shape: Shape
    formats: tuple[tuple[str, WeightBytes], ...]
    digest: str = ""
    context: int = 0
    manifest: catalog.Manifest | None = None


def find_subject(text: str, models_dir: Path, weights: str | None = None) -> Subject:
    """The model that `text` means. `weights`: a format that it shall have, None or `auto` for any.

    Raises ModelNotFound, and BadRequest for a file that is no config.json.
    """
    formats = SHAPE_FORMATS if weights in (None, "auto") else (str(weights),)
    if "/" in text or text.endswith(".json"):
        path = Path(text).expanduser()
        if not text.startswith("hf:"):
            shape = shape_from_config(read_config(path), path.parent.name if path.suffix == ".json" else path.name)
            return _of_shape(shape, str(path), formats)
    name = known_name(text)
    if not text.endswith(SHAPE_SUFFIX):
        try:
            directory, manifest = catalog.find(models_dir, text)
        except ModelNotFound as exc:
            if name is None:
                near = suggest(text.lower(), list(KNOWN))
                hint = near or f"`tierd plan --shapes` lists the built-in ones; or {exc.hint or 'give a config.json'}"
                raise ModelNotFound(f"no model and no built-in shape is called {text!r}", hint=hint) from None
        else:
            if weights in (None, "auto", manifest.format):
                return prepared_subject(directory, manifest)
            shape = shape_from_spec(manifest.spec, manifest.name)
            return _of_shape(shape, f"{directory}, in other formats", formats)
    if name is None:
        raise ModelNotFound(f"no built-in shape is called {text!r}", hint="`tierd plan --shapes` lists them")
    return _of_shape(known_shape(name), f"config.json of {KNOWN[name].source}", formats)


def prepared_subject(directory: Path, manifest: catalog.Manifest) -> Subject:
    """A prepared model as it is."""
    return Subject(
        name=manifest.name,
        source=str(directory),
        shape=shape_from_spec(manifest.spec, manifest.name),
        formats=((manifest.format, prepared_bytes(manifest)),),
        digest=manifest.digest,
        context=manifest.context,
        manifest=manifest,
    )


def _of_shape(shape: Shape, source: str, formats: tuple[str, ...]) -> Subject:
    return Subject(
        shape.name, source, shape, tuple((name, weight_bytes(shape, name)) for name in formats), context=shape.context
    )

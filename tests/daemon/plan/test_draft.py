"""What a draft model takes, and which one the settings mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from tests.daemon.plan.decoders import allocated_bytes
from tierd.daemon.card_memory import CardMemory
from tierd.daemon.config import load
from tierd.daemon.errors import ModelNotFound
from tierd.daemon.machine import Machine, auto_weights
from tierd.daemon.models.catalog import Manifest, RecordEntry, TensorEntry, load_manifest
from tierd.daemon.models.spec import ModelSpec
from tierd.daemon.plan import draft as plan_draft
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES, choose_sizes
from tierd.daemon.plan.draft import (
    KV_FORMAT,
    MAX_SEATS,
    SEAT_TOKENS,
    Draft,
    card_draft_bytes,
    choose_card_draft,
    choose_draft,
    draft_bytes,
    max_rows,
    seats,
    wanted,
)
from tierd.daemon.plan.known import known_shape
from tierd.kernels.layout import PageLayout


def test_its_memory_does_not_grow_with_the_context(model_dir: Path) -> None:
    manifest = load_manifest(model_dir)
    spec = manifest.spec
    found = draft_bytes(manifest, 4, 2)
    longer = msgspec.structs.replace(manifest, context=1 << 20, spec=msgspec.structs.replace(spec, context=1 << 20))
    assert draft_bytes(longer, 4, 2) == found
    record = PageLayout(spec.num_layers, spec.kv_heads, spec.head_dim, KV_FORMAT).record_bytes
    assert found.weights == manifest.bytes and found.pages == 4 * SEAT_TOKENS // 16 * record
    assert found.total == found.weights + found.pages + found.workspace
    decoder = allocated_bytes(spec, max_rows(4), 2)
    assert decoder <= found.workspace <= decoder + 4 * SEAT_TOKENS * spec.head_dim + 4 * 4 * (spec.vocab + 16)


def test_the_requests_that_it_guesses_for_are_bounded() -> None:
    assert [seats(count) for count in (1, MAX_SEATS, 1000)] == [1, MAX_SEATS, MAX_SEATS]


def test_the_one_that_the_settings_name(models_dir: Path, tmp_path: Path) -> None:
    flags = {"models_dir": str(models_dir), "draft": "smollm2:135m"}
    env = {"TIERD_RUNTIME_DIR": str(tmp_path), "TIERD_CONFIG": ""}
    found = wanted(load(flags, env).settings, 2)
    assert found is not None and found.directory == models_dir / "smollm2-135m" and found.total_bytes > 80_000_000
    assert wanted(load(flags | {"speculate": "off"}, env).settings, 2) is None
    assert wanted(load(flags | {"draft": ""}, env).settings, 2) is None
    with pytest.raises(ModelNotFound, match="draft model 'nobody' isn't prepared") as caught:
        wanted(load(flags | {"draft": "nobody"}, env).settings, 2)
    assert caught.value.param == "draft" and "tierd pull" in (caught.value.hint or "")


def test_none_beside_itself_and_none_where_weights_lack_its_memory(models_dir: Path, tmp_path: Path) -> None:
    flags = {"models_dir": str(models_dir), "draft": "smollm2:135m"}
    env = {"TIERD_RUNTIME_DIR": str(tmp_path), "TIERD_CONFIG": ""}
    settings, machine = load(flags, env).settings, Machine(4 << 30, 4 << 30, 0)
    found = wanted(settings, 2)
    assert found is not None
    most_bytes = auto_weights(machine.total_ram, LEAST_ARENA_BYTES, 0)

    def choose(weights_bytes: int, name: str = "large", **changes: int) -> Draft:
        return choose_draft(dataclasses.replace(settings, **changes), models_dir / name, weights_bytes, machine, 2)

    assert choose(most_bytes // 2) == Draft(found)
    assert choose(most_bytes // 2, "smollm2-135m") == Draft()
    assert choose_draft(dataclasses.replace(settings, draft=""), None, 1, machine, 2) == Draft()
    assert choose(most_bytes - found.total_bytes).model
    assert choose(most_bytes + 1).model  # layers are read from the disk without it, too
    for weights_bytes in (most_bytes - found.total_bytes + 1, most_bytes):
        off = choose(weights_bytes)
        assert off.model is None and off.ram_bytes == 0 and "smollm2-135m, which takes" in off.off_reason
        assert choose(weights_bytes, weights_mem=most_bytes).model  # asked for


GB = 10**9


def manifest_of(spec: ModelSpec, weights_bytes: int, like: Manifest) -> Manifest:
    """Layers of one matrix that take so many bytes together, and small ends."""
    names = ["embed", *(f"layer.{number}" for number in range(spec.num_layers)), "final", "head"]
    rows, records = weights_bytes // spec.num_layers // 8192, []
    for name in names:
        tensor = TensorEntry("matrix", "bf16", rows if name.startswith("layer.") else 1, 4096, 0, 0)
        size = 2 * tensor.rows * tensor.cols
        records.append(RecordEntry(name, 0, size, "", (msgspec.structs.replace(tensor, bytes=size),)))
    total = sum(record.bytes for record in records)
    return msgspec.structs.replace(like, spec=spec, records=tuple(records), bytes=total)


def test_on_a_card_or_beside_it(models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"models_dir": str(models_dir), "draft": "smollm2:135m"}
    settings = load(flags, {"TIERD_RUNTIME_DIR": str(tmp_path), "TIERD_CONFIG": ""}).settings
    spec, like = known_shape("llama-3-8b").spec, load_manifest(models_dir / "smollm2-135m")
    assert spec is not None

    def choose(weights_bytes: int, ram_bytes: int = 64 * GB, name: str = "large", **changes: int) -> Draft:
        asked = dataclasses.replace(settings, **changes)
        machine = Machine(ram_bytes, ram_bytes, 0, CardMemory("a card", 24 * GB, 24 * GB))

        def sizes(left: Machine) -> object:
            return choose_sizes(asked, left, spec, weights_bytes, 2048, 2, weights_bytes)

        manifest = manifest_of(spec, weights_bytes, like)
        return choose_card_draft(asked, models_dir / name, manifest, machine, 2, sizes)

    here = choose(5 * GB)
    taken = card_draft_bytes(like, settings.max_streams)
    assert here.on_card and not here.why and here.ram_bytes == 0 and here.card_bytes == taken.total > 80_000_000
    assert choose(5 * GB, name="smollm2-135m") == Draft()  # not for itself
    machine = Machine(8 * GB, 8 * GB, 0, CardMemory("a card", 24 * GB, 24 * GB))
    whole = choose_sizes(settings, machine, spec, 5 * GB, 2048, 2, 5 * GB)
    most = whole.card_usable_bytes - whole.card_workspace_bytes - LEAST_ARENA_BYTES
    for weights_bytes in (most - taken.total + GB // 100, most):  # all of them would stay but for it
        beside = choose(weights_bytes)
        assert beside.model and not beside.on_card and "is computed by the processors: of the card" in beside.why
        assert beside.card_bytes == 0 and beside.ram_bytes == beside.model.total_bytes
    assert choose(most - taken.total - GB // 100).on_card
    assert choose(most, weights_mem=most // 2).on_card  # layers are streamed as somebody asked
    assert choose(40 * GB).on_card  # they come over the link in any case
    assert choose(40 * GB, 8 * GB).ram_bytes  # and these from the disk
    none = choose(most, GB // 10)
    assert none.model is None and none.off_reason.endswith("that smollm2-135m takes there")
    monkeypatch.setattr(plan_draft, "refused_by_card", lambda _spec: "its heads are odd")
    odd = choose(5 * GB)
    assert odd.model and not odd.on_card and odd.why.endswith("the card's kernels do not take it")

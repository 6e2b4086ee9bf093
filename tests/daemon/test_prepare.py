"""What an engine is given."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest
from front_harness import SPEC, make_model, make_settings, running

from tierd.daemon import kv_quota
from tierd.daemon.card_memory import CardMemory
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import BadConfig, ModelNotFound
from tierd.daemon.machine import Machine
from tierd.daemon.models.catalog import MANIFEST, Manifest
from tierd.daemon.models.placement_card import refused_by_card
from tierd.daemon.plan.shape import shape_from_spec
from tierd.daemon.plan.weights import weight_bytes
from tierd.daemon.prepare import Preparer
from tierd.daemon.supervisor import Model
from tierd.daemon.units import human_bytes


async def test_the_configuration_of_an_engine(fake_models, tmp_path):
    settings = make_settings(tmp_path, device_mem=1 << 28, nvme_mem=1 << 29)
    other = settings.cache_dir / "kv" / ("b" * 32)
    other.mkdir(parents=True)
    (other / "slab").write_bytes(b"x" * (1 << 20))
    prepare = Preparer(settings)
    config = msgspec.json.decode(await prepare(Model("alpha", fake_models / "alpha"), {}), type=EngineConfig)
    assert config.model_dir == str(fake_models / "alpha") and config.device_bytes == 1 << 28
    assert (1 << 29) - (2 << 20) < config.nvme_bytes <= (1 << 29) - (1 << 20)
    kv_quota.note_owner(prepare.root, other.name, kv_quota.Owner("alpha", "fp32"))
    config = msgspec.json.decode(await prepare(Model("alpha", fake_models / "alpha"), {}), type=EngineConfig)
    assert config.nvme_bytes == 1 << 29


async def test_no_disk_tier_means_none(fake_models, tmp_path):
    config = await Preparer(make_settings(tmp_path, nvme_mem=0))(Model("alpha", fake_models / "alpha"), {})
    assert msgspec.json.decode(config, type=EngineConfig).nvme_bytes == 0


async def test_the_store_of_an_engine_is_remembered(front):
    await front.service.load("alpha")
    (namespace,) = kv_quota.namespaces(front.settings.cache_dir / "kv")
    assert namespace.model == "alpha" and namespace.open


async def test_what_was_chosen_is_told_with_its_reasons(tmp_path):
    make_model(tmp_path / "models", "large", weights_bytes=40 << 20)
    async with running(make_settings(tmp_path, weights_mem=30 << 20)) as front:
        await front.service.load("large")
        (row,) = (await front.service.status())["engines"]
    chosen = row["chosen"]
    assert chosen["weights_bytes"] == 30 << 20 and chosen["weights_format"] == "fp32"
    assert chosen["max_streams"] == 16 and chosen["kv_format"] == "fp32"
    (why,) = chosen["why"]
    exact = human_bytes(weight_bytes(shape_from_spec(SPEC, "large"), "int8-g32").total)
    assert f"as int8-g32 they would take {exact} and fit" in why and "--weights int8-g32" in why


async def test_the_draft_model_has_its_memory_beside_the_others(tmp_path):
    models = tmp_path / "models"
    make_model(models, "large", weights_bytes=400 << 20)
    make_model(models, "small", weights_bytes=40 << 20)
    settings = make_settings(tmp_path, draft="small")
    machine = Machine(8 << 30, 8 << 30, 10 << 30)

    async def prepared(name, ram, **changes):
        prepare = Preparer(dataclasses.replace(settings, **changes), lambda _dir: machine._replace(available_ram=ram))
        return msgspec.json.decode(await prepare(Model(name, models / name), {}), type=EngineConfig)

    with_it = await prepared("large", 2 << 30)
    without = await prepared("large", 2 << 30, draft="")
    assert with_it.draft_dir == str(models / "small") and without.draft_dir == ""
    used, free = (one.device_bytes + one.host_bytes + one.weights_bytes for one in (with_it, without))
    assert used < free - (36 << 20)
    assert (await prepared("small", 2 << 30)).draft_dir == ""  # it does not guess for itself
    assert (await prepared("large", 2 << 30, speculate="off")).draft_dir == ""
    tight = await prepared("large", (540 << 20), host_mem=0)
    assert tight.draft_dir == "" and "not all weights would stay in memory" in tight.draft_off_reason
    with pytest.raises(ModelNotFound, match="draft model"):
        await prepared("large", 2 << 30, draft="nobody")


def with_heads(directory, head_dim):
    """A prepared model with heads of another size; its specification."""
    manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    spec = msgspec.structs.replace(manifest.spec, head_dim=head_dim)
    (directory / MANIFEST).write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, spec=spec)))
    return spec


@pytest.fixture
def card_models(fake_models):
    """Models that a card takes."""
    for directory in fake_models.iterdir():
        with_heads(directory, 16)
    return fake_models


CARD = CardMemory("a card", 24 << 30, 20 << 30)
WITH_CARD = Machine(32 << 30, 32 << 30, 100 << 30, CARD)


async def test_sizes_on_a_card_are_planned_from_its_memory(card_models, tmp_path):
    alpha = Model("alpha", card_models / "alpha")

    async def prepared(**changes):
        prepare = Preparer(make_settings(tmp_path, **changes), lambda _dir: WITH_CARD)
        return msgspec.json.decode(await prepare(alpha, {}), type=EngineConfig)

    found = await prepared(device_mem=None)
    assert found.card and found.kv_format == "bf16" and found.host_weights_bytes > 0
    assert 15 << 30 < found.device_bytes < CARD.free_bytes - (1 << 30)  # what its small weights leave
    assert (await prepared(device_mem=1 << 28, kv_format="fp16")).device_bytes == 1 << 28
    off = await prepared(card="off", device_mem=None)
    assert not off.card and off.kv_format == "fp32" and off.device_bytes <= 8 * 10**9


async def test_the_draft_model_has_its_memory_on_the_card(card_models, tmp_path):
    make_model(tmp_path / "models", "large", weights_bytes=400 << 20)
    large = Model("large", tmp_path / "models" / "large")
    with_heads(large.directory, 16)

    async def prepared(**changes):
        settings = make_settings(tmp_path, device_mem=None, **changes)
        prepare = Preparer(settings, lambda _dir: WITH_CARD)
        config = msgspec.json.decode(await prepare(large, {}), type=EngineConfig)
        return config, prepare.books.held["large"]

    (with_it, held), (without, alone) = await prepared(draft="alpha"), await prepared()
    assert with_it.draft_on_card and with_it.draft_dir.endswith("alpha") and not without.draft_on_card
    taken = held.workspace - alone.workspace
    assert taken > 64 << 20 and with_it.device_bytes == without.device_bytes - taken and held.total == alone.total
    odd = with_heads(card_models / "alpha", 72)
    assert refused_by_card(odd)
    beside, held = await prepared(draft="alpha")
    assert beside.draft_dir and not beside.draft_on_card and held.workspace == alone.workspace
    assert beside.host_bytes + beside.host_weights_bytes < without.host_bytes + without.host_weights_bytes


async def test_a_model_that_the_card_does_not_take_is_computed_by_the_processors(card_models, tmp_path):
    odd = with_heads(card_models / "beta", 72)
    assert refused_by_card(odd).endswith("a multiple of 16 up to 256, not of 72")
    for name, on_card in (("alpha", True), ("beta", False)):
        prepare = Preparer(make_settings(tmp_path), lambda _dir: WITH_CARD)
        config = msgspec.json.decode(await prepare(Model(name, card_models / name), {}), type=EngineConfig)
        assert (config.card, config.kv_format) == (on_card, "bf16" if on_card else "fp32")
        assert on_card == (config.host_weights_bytes is not None)


async def test_the_format_of_pages_follows_the_card_from_load_to_load(card_models, tmp_path):
    machines = [WITH_CARD, WITH_CARD._replace(card=None), WITH_CARD]
    prepare = Preparer(make_settings(tmp_path, nvme_mem=1 << 29), lambda _dir: machines[0])
    alpha = Model("alpha", card_models / "alpha")
    for number, (format, on_card) in enumerate([("bf16", True), ("fp32", False), ("bf16", True)]):
        config = msgspec.json.decode(await prepare(alpha, {}), type=EngineConfig)
        assert (config.kv_format, config.card) == (format, on_card)
        # As the engine tells it, whose namespace has the format and the card in it.
        name = ("a" if on_card else "b") * 32
        (prepare.root / name).mkdir(parents=True, exist_ok=True)
        prepare.note(SimpleNamespace(model="alpha", info={"namespace": name}))
        owners = {one.name: one.kv_format for one in kv_quota.namespaces(prepare.root)}
        assert owners[name] == format and len(owners) == min(number + 1, 2)
        machines.append(machines.pop(0))


async def test_pages_that_had_to_make_do_grow_when_others_have_left_the_card(card_models, tmp_path):
    filled = WITH_CARD._replace(card=CARD._replace(free_bytes=4 << 30))
    for reserve, booked in ((0, False), (1 << 30, True)):
        prepare = Preparer(
            make_settings(tmp_path, device_mem=8 << 30, yield_device_mem=reserve), lambda _dir: filled
        )
        config = msgspec.json.decode(await prepare(Model("alpha", card_models / "alpha"), {}), type=EngineConfig)
        assert 1 << 30 < config.device_bytes < (4 << 30) - reserve
        assert prepare.device_bytes("alpha") == (8 << 30 if booked else config.device_bytes)
        assert prepare.books.yielded.get("alpha") == (config.device_bytes if booked else None)


async def test_memory_below_a_card_needs_a_card(card_models, tmp_path):
    machine = WITH_CARD._replace(card=None)
    prepare = Preparer(make_settings(tmp_path, host_weights_mem=1 << 30), lambda _dir: machine)
    with pytest.raises(BadConfig, match="host_weights_mem"):
        await prepare(Model("alpha", card_models / "alpha"), {})


@pytest.mark.parametrize(
    ("formats", "hint"),
    [({"kv_format": "k8v4"}, "give --kv-format fp16"), ({"store_format": "k8v8"}, "leave --store-format at same")],
)
async def test_pages_that_a_models_heads_do_not_take_are_a_matter_of_the_configuration(tmp_path, formats, hint):
    make_model(tmp_path / "models", "narrow")  # heads of 8
    async with running(make_settings(tmp_path, **formats)) as front:
        with pytest.raises(BadConfig, match="does not go with the model: .* takes heads of a multiple of 16") as caught:
            await front.service.load("narrow")
    assert caught.value.hint == hint and caught.value.param == next(iter(formats))

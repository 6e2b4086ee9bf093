"""What an engine is given."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from front_harness import SPEC, make_model, make_settings, running

from tierd.daemon import kv_quota
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import ModelNotFound
from tierd.daemon.machine import Machine
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
    kv_quota.note_owner(prepare.root, other.name, kv_quota.Owner("alpha", settings.kv_format))
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

"""What an engine is given."""

from __future__ import annotations

import msgspec
from front_harness import make_settings

from tierd.daemon import kv_quota
from tierd.daemon.config import EngineConfig
from tierd.daemon.prepare import Preparer
from tierd.daemon.supervisor import Model


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

"""The store that is opened for an engine's pages, which may be packed more there than in memory."""

from __future__ import annotations

from pathlib import Path

from tierd.daemon.engine_config import EngineConfig
from tierd.kernels.cpu.quant import PageCodec
from tierd.kernels.layout import PageLayout
from tierd.tiers.errors import StoreError
from tierd.tiers.repacked import RepackedStore
from tierd.tiers.store import Store


def open_store(
    config: EngineConfig, layout: PageLayout, stored: PageLayout, root: bytes
) -> tuple[Store | None, list[str]]:
    """The NVMe tier, or None and why: serving goes on without it."""
    if config.nvme_bytes < stored.record_bytes:
        return None, [f"the disk tier is off: {config.nvme_off_reason}"] if config.nvme_off_reason else []
    directory = Path(config.cache_dir) / root.hex()
    try:
        if stored != layout:
            PageCodec.compile()
            store: Store = RepackedStore.open_packed(
                PageCodec(layout, stored), directory, namespace=root,
                capacity_bytes=config.nvme_bytes, min_free_bytes=config.nvme_min_free_bytes,
            )  # fmt: skip
        else:
            store = Store.open(
                directory, record_bytes=layout.record_bytes, sections=layout.num_layers,
                section_bytes=layout.layer_bytes, namespace=root, capacity_bytes=config.nvme_bytes,
                min_free_bytes=config.nvme_min_free_bytes,
            )  # fmt: skip
    except StoreError as exc:
        return None, [f"the disk tier is off: {exc}"]
    return store, list(store.notes)

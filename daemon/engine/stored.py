"""How pages lie on the disk: in which format, and the store that is opened for them."""

from __future__ import annotations

from pathlib import Path

from tierd.daemon.engine_config import SAME, EngineConfig
from tierd.daemon.errors import BadConfig
from tierd.daemon.units import human_bytes
from tierd.kernels.cpu.quant import PageCodec
from tierd.kernels.layout import PageLayout
from tierd.tiers.errors import StoreError
from tierd.tiers.repacked import RepackedStore
from tierd.tiers.store import Store


def stored_layout(config: EngineConfig, layout: PageLayout, model: str) -> PageLayout:
    """What a page is in the store, whose pages are `layout` in memory. Raises BadConfig for what saves nothing."""
    if config.store_format in (SAME, layout.format):
        return layout
    try:
        found = PageLayout(layout.num_layers, layout.kv_heads, layout.head_dim, config.store_format)
    except ValueError as exc:
        raise BadConfig(f"{model}: {exc}", hint="leave --store-format at same", param="store_format") from exc
    if found.record_bytes >= layout.record_bytes:
        raise BadConfig(
            f"a page of {model} takes {human_bytes(found.record_bytes)} as {found.format} and "
            f"{human_bytes(layout.record_bytes)} as {layout.format}, as it is in memory: storing it so saves nothing",
            hint="leave --store-format at same, or choose one of fewer bits",
            param="store_format",
        )
    return found


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

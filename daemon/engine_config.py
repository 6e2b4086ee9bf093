"""What the front tells an engine process: settings and sizes as one frozen map, handed over as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tierd.daemon.config import Settings
from tierd.daemon.errors import TierdError
from tierd.daemon.machine import Sizes
from tierd.daemon.paths import make_private_dir
from tierd.daemon.settled import kv_root

ENGINE_CONFIG_VARIABLE = "TIERD_ENGINE_CONFIG"  # how an `EngineConfig` gets to its process


SAME = "same"  # as a format of the store: that of memory


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that an engine process is told, as JSON. Sizes in bytes, paths absolute."""

    model_dir: str
    cache_dir: str  # the root of the page stores: one directory a namespace below it
    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    nvme_min_free_bytes: int
    threads: int  # 0: every core
    kv_format: str
    context: int  # 0: what the model was trained for
    store_format: str = SAME  # of pages on the disk
    max_batch_rows: int = 512
    max_streams: int = 16
    throughput: bool = False  # nobody looks on: prompts take whole steps
    max_requests: int = 1024  # running and waiting
    nvme_daily_writes_bytes: int = 0  # of all engines below `cache_dir` together; 0: no bound
    weights_bytes: int | None = None  # in memory, or on the card; None: all of them
    host_weights_bytes: int | None = None  # in CPU memory, of what the card does not take; None: all of that
    kv_exact_first: int = 0  # tokens that are kept exact beside packed pages, see `kernels.rows.Ladder`
    kv_exact_last: int = 0  # 0: none
    speculate: str = "auto"  # on, off
    missing_experts: str = "auto"  # fetch: the processors compute none of those that a card misses
    draft_dir: str = ""  # of the draft model; empty: none
    draft_off_reason: str = ""  # why there is none although one was asked for
    draft_on_card: bool = False  # the card computes it too; else the processors do
    nvme_off_reason: str = ""  # why there is no disk tier although nobody turned it off
    card: bool = False  # the sizes are those of a card's memory
    log_level: str = "info"


def _why_no_disk(settings: Settings, sizes: Sizes) -> str:
    if settings.nvme_mem is not None or sizes.nvme_bytes:
        return ""
    try:
        make_private_dir(kv_root(settings))
    except (OSError, TierdError) as exc:
        why = (exc.strerror if isinstance(exc, OSError) else None) or exc
        return f"{kv_root(settings)} can't be made ({why}); choose another --cache-dir"
    return (
        f"the disk of {kv_root(settings)} has too little free space (it takes a tenth of what is free); choose another "
        "--cache-dir, or say with --nvme-mem how much it may take"
    )


def engine_config(
    settings: Settings, sizes: Sizes, model_dir: Path, draft_dir: Path | None = None, draft_off_reason: str = "",
    draft_on_card: bool = False,
) -> EngineConfig:  # fmt: skip
    """The config of an engine for one model. `draft_dir`: where its draft model lies."""
    return EngineConfig(
        model_dir=str(model_dir),
        cache_dir=str(kv_root(settings)),
        device_bytes=sizes.device_bytes,
        host_bytes=sizes.host_bytes,
        nvme_bytes=sizes.nvme_bytes,
        nvme_min_free_bytes=sizes.nvme_min_free_bytes,
        threads=settings.threads,
        kv_format=settings.kv_format,
        store_format=settings.store_format,
        context=settings.ctx,
        max_batch_rows=settings.max_batch,
        max_streams=settings.max_streams,
        max_requests=settings.max_streams + settings.max_queue,
        nvme_daily_writes_bytes=settings.nvme_daily_writes,
        weights_bytes=sizes.weights_bytes,
        host_weights_bytes=sizes.host_weights_bytes,
        card=sizes.host_weights_bytes is not None,
        kv_exact_first=settings.kv_exact_first,
        kv_exact_last=settings.kv_exact_last,
        speculate=settings.speculate,
        missing_experts=settings.missing_experts,
        draft_dir="" if draft_dir is None else str(draft_dir),
        draft_off_reason=draft_off_reason,
        draft_on_card=draft_on_card,
        nvme_off_reason=_why_no_disk(settings, sizes),
        log_level=settings.log_level,
    )

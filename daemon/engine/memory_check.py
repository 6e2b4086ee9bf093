"""Whether an engine's memory is there, before it is asked for, and its weights; with the number that would do.

Sizes that the daemon chose fit; these are for those that somebody asked for, and for a machine that has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tierd.daemon.card_memory import probe_card
from tierd.daemon.engine.backend import Backend
from tierd.daemon.engine.model.held import HeldWeights
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import BadConfig, OutOfSpace
from tierd.daemon.models.catalog import Manifest, load_manifest
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.models.placement_card import CardPlacement, DoesNotFitHost, place_on_card, refused_by_card
from tierd.daemon.plan.draft import card_draft_bytes
from tierd.daemon.plan.workspace import COPY_FORMAT, exact_bytes
from tierd.daemon.units import human_bytes
from tierd.tiers.mover import Mover


def check_memory(config: EngineConfig, manifest: Manifest, total_bytes: int) -> None:
    """What lies in RAM: all of it, where no card computes. Asking for more than there is would map, and be killed when
    the pages fill. Raises BadConfig.
    """
    weights_bytes = min(config.weights_bytes or 0, manifest.bytes)  # those that nobody bounds may leave it any time
    sizes = {"device_mem": config.device_bytes, "host_mem": config.host_bytes}
    if config.card:
        placed = _placed(config, manifest)
        sizes = {"host_mem": config.host_bytes}
        sizes |= {"host_weights_mem": placed.host_bytes} if placed.host_bytes else {}
    elif weights_bytes:
        sizes["weights_mem"] = weights_bytes
    if not config.card and (copies_bytes := _copies_bytes(config, manifest, COPY_FORMAT)):
        sizes["kv_exact_last"] = copies_bytes
    if sum(sizes.values()) <= total_bytes:
        return
    alone = [name for name, size in sizes.items() if size > total_bytes]
    blamed = alone or list(sizes)
    asked = " and ".join(f"{name} of {human_bytes(sizes[name])}" for name in blamed)
    raise BadConfig(
        f"{asked} {'is' if len(blamed) == 1 else 'are'} more than this machine's memory of {human_bytes(total_bytes)}",
        hint=f"give less with {' and '.join(flag_of(name) for name in blamed)}"
        f"{'' if 'kv_exact_last' in blamed else ', or auto'}",  # that is a number and nothing else
        param=blamed[0],
    )


def check_device(config: EngineConfig, manifest: Manifest, backend: Backend, notes: list[str]) -> None:
    """What lies on the card, and whether there is one. Raises BadConfig."""
    if not config.card:
        if not backend.on_card and (found := probe_card(installed=lambda _name: True)) is not None:
            why = refused_by_card(manifest.spec) or "`tierd doctor` and `tierd config show` tell why"
            notes.append(f"{found.name} is not computed on: {why}")
        return
    if not backend.on_card:
        why = notes[-1] if notes else "it is not there any more"
        raise BadConfig(f"this engine was to compute on a card: {why}", hint="`--card off` computes on the processors")
    free_bytes, weights_bytes = backend.device_memory[0], _placed(config, manifest).device_bytes
    copies_bytes, draft_bytes = _copies_bytes(config, manifest, backend.copy_format), _draft_bytes(config)
    if config.device_bytes + weights_bytes + copies_bytes + draft_bytes <= free_bytes:
        return
    fits = max(free_bytes - weights_bytes - copies_bytes - draft_bytes, 0)
    beside = f", {human_bytes(copies_bytes)} of exact tokens" if copies_bytes else ""
    beside += f", {human_bytes(draft_bytes)} of the draft model" if draft_bytes else ""
    raise BadConfig(
        f"device_mem of {human_bytes(config.device_bytes)}{beside} and {human_bytes(weights_bytes)} of weights are "
        f"more than the {human_bytes(free_bytes)} that the card has free",
        hint=f"--device-mem {fits // 2**20}MiB fits" if fits >> 20 else "give less with --weights-mem, or auto",
        param="device_mem",
    )


def _copies_bytes(config: EngineConfig, manifest: Manifest, copy_format: str) -> int:
    ladder = config.kv_exact_first, config.kv_exact_last
    return exact_bytes(
        manifest.spec, config.kv_format, ladder, config.max_batch_rows, config.max_streams, copy_format
    )


def _draft_bytes(config: EngineConfig) -> int:
    """Of the card, that the draft model takes."""
    if not config.draft_on_card:
        return 0
    try:
        return card_draft_bytes(load_manifest(Path(config.draft_dir)), config.max_streams).total
    except (ModelFileError, ValueError):
        return 0  # who loads it says what is wrong with it


def _placed(config: EngineConfig, manifest: Manifest) -> CardPlacement:
    try:
        return place_on_card(manifest, config.weights_bytes, config.host_weights_bytes)
    except DoesNotFitHost as exc:
        raise _too_little_host(config, manifest, exc) from None
    except DoesNotFit as exc:
        raise _too_little(config, manifest, exc) from None


def _too_little_host(config: EngineConfig, manifest: Manifest, exc: DoesNotFit) -> BadConfig:
    return BadConfig(
        f"host_weights_mem of {config.host_weights_bytes} bytes is too little for {manifest.name}: what the card has "
        f"no room for needs {exc.needed_bytes} to pass through, read from the disk",
        hint=f"give at least --host-weights-mem {-(-exc.needed_bytes // 2**20)}MiB",
        param="host_weights_mem",
    )


def _too_little(config: EngineConfig, manifest: Manifest, exc: DoesNotFit) -> BadConfig:
    return BadConfig(
        f"weights_mem of {config.weights_bytes} bytes is too little for {manifest.name}: its weights have "
        f"{manifest.bytes} bytes, and even streamed they need {exc.needed_bytes} for the pieces that are computed "
        "on and read meanwhile",
        hint=f"give at least --weights-mem {-(-exc.needed_bytes // 2**20)}MiB",
        param="weights_mem",
    )


def load_weights(
    config: EngineConfig, manifest: Manifest, mover: Mover, max_rows: int, backend: Backend,
    progress: Callable[[int, int], None],
) -> HeldWeights:  # fmt: skip
    """The weights of an engine's model. Raises BadConfig where the sizes leave no memory for them, or nothing can
    compute them, and OutOfSpace where it is not to be had."""
    try:
        return backend.weights(config, manifest, max_rows, mover, progress)
    except DoesNotFitHost as exc:
        raise _too_little_host(config, manifest, exc) from None
    except DoesNotFit as exc:
        raise _too_little(config, manifest, exc) from None
    except ValueError as exc:
        raise BadConfig(f"{backend.name} can't run {manifest.name}: {exc}") from exc
    except OSError as exc:
        raise OutOfSpace(
            f"there is no memory for the weights of {manifest.name}: {exc.strerror or exc}",
            hint="give less with --weights-mem or --device-mem, or make room",
        ) from exc


def flag_of(setting: str) -> str:
    """How a setting is written on the command line."""
    return "--" + setting.replace("_", "-")

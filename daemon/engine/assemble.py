"""Builds an engine from its configuration: kernels, weights, store, pager, intake, step loop.

Imports the kernels, so it is itself imported only after the worker has set where Numba keeps its compiled code.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from tierd.daemon.engine import draft
from tierd.daemon.engine.arenas import Copies, arenas, ladders
from tierd.daemon.engine.backend import Backend, CpuBackend, OwnDecoder, choose
from tierd.daemon.engine.chat import ChatTemplate
from tierd.daemon.engine.embed import Pooling
from tierd.daemon.engine.foresight import Foresight
from tierd.daemon.engine.guesses import Guesses
from tierd.daemon.engine.intake import Facts, Intake
from tierd.daemon.engine.memory_check import check_device, check_memory, load_weights
from tierd.daemon.engine.model import rope
from tierd.daemon.engine.model.held import HeldWeights
from tierd.daemon.engine.model.load import HINT, Vector
from tierd.daemon.engine.runner import Runner
from tierd.daemon.engine.scheduler import MIN_PREFILL_ROWS, Limits
from tierd.daemon.engine.speculate import Speculate, Speculator
from tierd.daemon.engine.status import StatusBoard
from tierd.daemon.engine.step import StepLoop
from tierd.daemon.engine.stored import open_store
from tierd.daemon.engine.streams import Streams
from tierd.daemon.engine.tokens import Vocabulary
from tierd.daemon.engine.top import Beside, TopBoard
from tierd.daemon.engine.turns import FILE_NAME as TURNS_NAME
from tierd.daemon.engine.turns import Turns
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import BadConfig, EngineFailed, ModelInvalid
from tierd.daemon.kv_mode import Kind
from tierd.daemon.machine import total_memory_bytes
from tierd.daemon.models.catalog import TEMPLATE, TOKENIZER, Manifest, load_manifest
from tierd.daemon.models.digests import verify_texts
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.plan.workspace import page_layout, stored_layout
from tierd.daemon.protocol import Event
from tierd.kernels.cpu.step import CpuDecoder
from tierd.kernels.layout import PageLayout
from tierd.kernels.rows import Ladder
from tierd.tiers import budget, upkeep
from tierd.tiers.arena import Arena
from tierd.tiers.errors import WeightsLost
from tierd.tiers.keys import root_key
from tierd.tiers.mover import Mover
from tierd.tiers.pager import Pager
from tierd.tiers.picking import Picker
from tierd.tiers.pins_file import FILE_NAME as PINNED_NAME
from tierd.tiers.prefixes import Prefixes
from tierd.tiers.roots_file import FILE_NAME as TENANTS_NAME
from tierd.tiers.staging import Staging
from tierd.tiers.store import Store

# In the name of every page: raise it when the kernels' arithmetic or the meaning of a record changes.
KV_VERSION = 3
MIN_PAGES = 1  # on the device: rows are written there

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What an engine tells its process. All but `progress` are called on the step thread."""

    progress: Progress
    emit: Callable[[list[Event]], None]
    died: Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class Engine:
    """A built engine. `close` after the loop has ended."""

    model: str
    context: int
    namespace: str  # hex: also the name of the store's directory
    intake: Intake
    loop: StepLoop
    pager: Pager
    board: StatusBoard
    prefixes: Prefixes
    top: TopBoard
    weights: HeldWeights
    on_card: bool  # its device arena is memory of a card
    copies_bytes: int  # memory of exact copies beside packed pages
    position_tokens: int  # what the position tables reach: no sequence is longer, however its memory grows
    notes: tuple[str, ...]
    resources: contextlib.ExitStack

    def close(self) -> None:
        """Give back threads, files and the store's lock."""
        self.resources.close()


def build(
    config: EngineConfig, hooks: Hooks, *, threads: int, max_requests: int, make_decoder: type[CpuDecoder] = CpuDecoder
) -> Engine:
    """Load everything. Raises TierdError of some kind when the model or the configuration does not allow it.

    `make_decoder`: the decoder, or one that watches it.
    """
    directory = Path(config.model_dir)
    try:
        manifest = load_manifest(directory)
    except ModelFileError as exc:
        raise ModelInvalid(f"model {directory.name!r} is broken: {exc}") from exc
    if findings := verify_texts(directory, manifest):
        raise ModelInvalid(f"model {directory.name!r} is broken: {'; '.join(findings)}", hint=HINT)
    check_memory(config, manifest, total_memory_bytes())
    hooks.progress("kernels", 0, 1)
    resources = contextlib.ExitStack()
    notes: list[str] = []
    try:
        backend = choose(threads, notes.append, make_decoder, config.card)
        resources.callback(backend.close)
        check_device(config, manifest, backend, notes)
        if not (backend.on_card and (config.draft_on_card or not config.draft_dir)):
            CpuDecoder.warm_up(lambda done, total: hooks.progress("kernels", done, total))
        return _build(config, hooks, manifest, resources, threads, max_requests, backend, notes)
    except BaseException:
        resources.close()
        raise


def _build(
    config: EngineConfig, hooks: Hooks, manifest: Manifest, resources: contextlib.ExitStack, threads: int,
    max_requests: int, backend: Backend, notes: list[str],
) -> Engine:  # fmt: skip
    spec, directory, clock = manifest.spec, Path(config.model_dir), time.monotonic
    layout = page_layout(spec, config.kv_format, model=manifest.name)
    stored = stored_layout(spec, layout, config.store_format, manifest.name)
    slots = config.device_bytes // layout.record_bytes
    if slots < MIN_PAGES:
        raise BadConfig(
            f"device_mem of {config.device_bytes} bytes holds {slots} pages of {manifest.name}, it needs {MIN_PAGES}",
            hint=f"give at least --device-mem {MIN_PAGES * layout.record_bytes // 2**20 + 1}MiB",
        )
    host_slots = config.host_bytes // layout.record_bytes
    context = _context(config.context or manifest.context, manifest)
    max_rows = max(config.max_batch_rows, config.max_streams + MIN_PREFILL_ROWS)
    window = max(spec.windows, default=0) if all(spec.windows) and Kind.WINDOW in backend.modes else 0
    limits = Limits(max_rows, config.max_streams, layout.page_tokens, throughput=config.throughput, window=window)
    frequencies = rope.frequencies(spec, context)
    root = root_key(_namespace(manifest, layout, stored, frequencies, backend))

    closing_last = resources.enter_context(contextlib.ExitStack())  # the store: the mover's jobs end before it
    loops: list[StepLoop] = []  # the mover comes before the loop it wakes
    mover = backend.mover(lambda: loops[0].wake() if loops else None)
    resources.callback(mover.close)
    weights = load_weights(config, manifest, mover, max_rows, backend, partial(hooks.progress, "weights"))
    resources.callback(weights.close)
    hooks.progress("store", 0, 1)
    store, store_notes = open_store(config, layout, stored, root)
    notes += store_notes
    if store is not None:
        closing_last.callback(store.close)
    on_disk = store.capacity_slots if store is not None else 0
    capacity_tokens = (slots + host_slots + on_disk) * layout.page_tokens
    position_tokens = min(context, capacity_tokens)
    cos, sin = rope.tables(frequencies, position_tokens)
    device, host = arenas(slots, host_slots, layout, backend)
    exact = ladders(config, layout, limits, backend)
    decoder = _decoder(backend, weights, layout, (cos, sin), frequencies, limits.max_rows, hooks, exact is not None)
    resources.callback(decoder.close)
    host.retire(min(host.slots, backend.ready_host_bytes(host.block) // layout.record_bytes))
    vocabulary = Vocabulary.load(directory / TOKENIZER)
    template = ChatTemplate.load(directory / TEMPLATE, vocabulary, _special(manifest, vocabulary))
    facts = _facts(manifest, context, capacity_tokens, backend, weights.shape.windows, exact and exact.ladders.most)
    remembered = Path(config.cache_dir) / root.hex() / TURNS_NAME if store is not None else None
    intake = Intake(facts, vocabulary, template, Turns(remembered))
    resources.callback(intake.close)

    pager = Pager(
        layout_record_bytes=layout.record_bytes,
        page_tokens=layout.page_tokens,
        root=root,
        device=device,
        host=host,
        store=store,
        mover=mover,
        clock=clock,
        events=lambda kind, data: hooks.emit([Event(0, kind, data)]),
        stored_record_bytes=stored.record_bytes,
    )
    resources.callback(pager.close)
    hooks.progress("store", 1, 1)
    runner = _runner(decoder, layout, (device, host), weights, store, mover, backend, exact)
    upkeep.warm(pager)
    prefixes = _keep_rules(config, pager, root)
    speculator = _speculator(config, manifest, vocabulary, backend, mover, resources, threads, notes.append)
    streams = Streams(pager, runner, limits, clock, prefixes, speculator, exact and exact.ladders)
    board = StatusBoard(manifest.name, context, streams, pager, clock, weights.statistics)
    loop = StepLoop(
        streams, pager, emit=hooks.emit, published=board.publish, died=hooks.died, clock=clock,
        max_requests=max_requests,
    )  # fmt: skip
    loops.append(loop)
    # It plans for processors: beside what a card measures its figures would mislead.
    foresight = None if backend.on_card else Foresight(config, manifest, threads, context)
    top = TopBoard(streams, pager, prefixes, config.kv_format, Beside(board.figures, weights, foresight))
    return Engine(
        manifest.name, context, root.hex(), intake, loop, pager, board, prefixes, top, weights, backend.on_card,
        exact.num_bytes if exact is not None else 0, position_tokens, tuple(notes), resources,
    )  # fmt: skip


def _facts(
    manifest: Manifest, context: int, capacity_tokens: int, backend: Backend, windows: Sequence[int],
    ladder: Ladder | None,
) -> Facts:  # fmt: skip
    """What requests are checked against."""
    return Facts(
        vocab=manifest.spec.vocab,
        context=context,
        capacity_tokens=capacity_tokens,
        end_ids=frozenset(manifest.eos_ids),
        bos_id=manifest.bos_id, add_bos=manifest.add_bos,
        pooling=Pooling(manifest.pooling),
        modes=backend.modes, windows=windows, ladder=ladder,
        sampling={name: x for name, x in msgspec.structs.asdict(manifest.sampling).items() if x is not None},
    )


def _speculator(
    config: EngineConfig, manifest: Manifest, vocabulary: Vocabulary, backend: Backend, mover: Mover,
    resources: contextlib.ExitStack, threads: int, note: Callable[[str], None],
) -> Speculator:  # fmt: skip
    """What drafts, with the draft model where there is one. Raises BadConfig when that does not go with this model."""
    mode = Speculate(config.speculate)
    if config.draft_off_reason:
        note(f"the draft model is off: {config.draft_off_reason}")
    if not config.draft_dir or mode is Speculate.OFF:
        return Speculator(mode, None)
    where = backend if config.draft_on_card or not backend.on_card else CpuBackend(threads)
    model = draft.load(config, manifest, vocabulary, where, mover, resources, threads=threads, clock=time.monotonic)
    return Speculator(mode, Guesses(model, mode, time.monotonic))


def _keep_rules(config: EngineConfig, pager: Pager, root: bytes) -> Prefixes:
    """What the user wants of the disk: how much is written to it in a day, and which prefixes stay."""
    if pager.store is None:
        return Prefixes(pager, None)
    stores = Path(config.cache_dir)
    pager.writeback.admission.budget = budget.WriteBudget(config.nvme_daily_writes_bytes, stores / budget.FILE_NAME)
    pager.shares.remember(stores / root.hex() / TENANTS_NAME)
    return Prefixes(pager, stores / root.hex() / PINNED_NAME)


def _decoder(
    backend: Backend, weights: HeldWeights, layout: PageLayout, tables: tuple[Vector, Vector],
    frequencies: rope.Frequencies, max_rows: int, hooks: Hooks, copies: bool,
) -> OwnDecoder:  # fmt: skip
    """The decoder on what it computes on. Raises BadConfig for what that can't do, EngineFailed without its weights."""

    def progress(done: int, total: int) -> None:
        hooks.progress("kernels", done, total)

    try:
        return backend.decoder(weights, layout, *tables, max_rows, progress, partial(rope.angles, frequencies), copies)
    except ValueError as exc:
        raise BadConfig(f"{backend.name} can't run this: {exc}") from exc
    except WeightsLost as exc:
        raise EngineFailed(f"the first pass could not be computed: {exc}", hint="try again; `tierd logs`") from exc


def _context(wanted: int, manifest: Manifest) -> int:
    longest = max(rope.max_context(manifest.spec), manifest.context)
    if wanted > longest:
        raise BadConfig(
            f"a context of {wanted} tokens was asked for, {manifest.name} reaches {longest}", hint=f"--ctx {longest}"
        )
    return wanted


def _runner(
    decoder: OwnDecoder, layout: PageLayout, arenas: tuple[Arena, ...], weights: HeldWeights, store: Store | None,
    mover: Mover, backend: Backend, exact: Copies | None,
) -> Runner:  # fmt: skip
    """The decoder with what its pages lie in, and with who reads those in the store."""
    memories = [*(arena.memory for arena in arenas), *([exact.nowhere] if exact is not None else [])]
    staging = picker = None
    if store is not None:
        staging = Staging(store, mover, layout.num_layers, layout.layer_bytes, allocate=backend.ring)
        picker = Picker(store, mover, allocate=backend.ring)
    return Runner(
        decoder, layout, memories, staging, weights=weights, picker=picker,
        copies=exact and exact.ladders.pages.arena.memory,
        selections=partial(backend.selection, layout, weights.shape),
    )  # fmt: skip


def _namespace(
    manifest: Manifest, layout: PageLayout, stored: PageLayout, frequencies: rope.Frequencies, backend: Backend
) -> str:
    """Everything that makes pages comparable. Content of weights, tokenizer and template are in the model's digest.

    Two backends round differently: a sequence that began on one would not go on as it began. Nor would one whose pages
    come back from the store as others.
    """
    where = " card" if backend.on_card else ""
    kept = "" if stored == layout else f" stored {stored.format}"
    return f"tierd {KV_VERSION} {manifest.digest} {layout.describe()} {frequencies.describe()}{where}{kept}"


def _special(manifest: Manifest, vocabulary: Vocabulary) -> dict[str, str]:
    """The special tokens that chat templates write by name."""
    named = {"bos_token": manifest.bos_id, "eos_token": manifest.eos_ids[0] if manifest.eos_ids else None}
    texts = {name: vocabulary.token_text(token) for name, token in named.items() if token is not None}
    return {name: text for name, text in texts.items() if text is not None}

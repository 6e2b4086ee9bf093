"""The verb `plan`: how a model would run here, or on a card, before anything is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import click
import msgspec

from tierd.daemon.cli_common import json_option, load_settings, print_json, print_table, settings_options
from tierd.daemon.config import Settings
from tierd.daemon.config_values import context_tokens
from tierd.daemon.engine_config import SAME
from tierd.daemon.errors import BadRequest
from tierd.daemon.machine import probe_machine
from tierd.daemon.models.placement import DoesNotFit
from tierd.daemon.plan import answer as told
from tierd.daemon.plan import rates
from tierd.daemon.plan.auto import choose_sizes
from tierd.daemon.plan.cards import CARDS, find_card
from tierd.daemon.plan.draft import choose_draft
from tierd.daemon.plan.known import KNOWN, known_shape
from tierd.daemon.plan.kv import ENGINE_FORMATS, KV_FORMATS, token_bytes
from tierd.daemon.plan.scenario import Limits, Load, card_memory, card_task, cpu_task
from tierd.daemon.plan.subject import Subject, find_subject
from tierd.daemon.plan.weights import weight_formats
from tierd.daemon.settled import resolve_sizes, settle
from tierd.daemon.units import human_bytes

_ANSWER_TOKENS = 256
_WEIGHTS = ("auto", *weight_formats())


@click.command()
@click.argument("model", required=False)
@click.option("--ctx", "context", metavar="TOKENS", help="Tokens of a sequence, prompt and answer together.")
@click.option("--answer", type=click.IntRange(1, 1 << 20), help="Tokens of them that are an answer, instead of 256.")
@click.option("--streams", type=click.IntRange(1, 1024), default=1, show_default=True, help="Answers at once.")
@click.option("--goal", type=click.Choice(("latency", "throughput")), default="latency", show_default=True,
              help="Short steps, or as many tokens a second as can be had.")  # fmt: skip
@click.option("--gpu", metavar="NAME", help="Plan for this card instead of this machine's processors.")
@click.option("--weights", type=click.Choice(_WEIGHTS), default="auto", help="Weight format.")
@click.option("--kv-format", "kv_format", type=click.Choice(tuple(KV_FORMATS)), help="Numbers in a page.")
@click.option("--cards", is_flag=True, help="List the cards that are known.")
@click.option("--shapes", is_flag=True, help="List the built-in shapes.")
@settings_options("models_dir", "cache_dir", "device_mem", "host_mem", "nvme_mem", "weights_mem", "threads", "draft")
@json_option
def plan(
    flags: dict[str, Any], model: str | None, context: str | None, answer: int | None, streams: int, goal: str,
    gpu: str | None, weights: str, kv_format: str | None, cards: bool, shapes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Tell how MODEL would run: bytes in each tier, speed, and why.

    MODEL is a prepared model, a built-in shape such as llama-3-70b, or a path to a config.json.
    """
    if cards or shapes:
        _list_cards(as_json) if cards else _list_shapes(as_json)
        return
    if model is None:
        raise BadRequest("name a model", hint="for example: tierd plan llama-3-70b --gpu rtx4090")
    settings = load_settings(flags)
    subject = find_subject(model, settings.models_dir, weights)
    load = _load(subject, settings, context, answer, streams, goal)
    gpu = gpu or _own_card(settings)
    found = _on_card(subject, load, settings, gpu, kv_format) if gpu else _here(subject, load, settings, kv_format)
    if found.context > subject.context:
        beyond = f"{found.model} reaches {subject.context:,} tokens: tierd refuses more"
        found = msgspec.structs.replace(found, why=(*found.why, beyond))
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        print("\n".join(told.lines(found)))
    if not found.fits:
        raise click.exceptions.Exit(1)


def _load(
    subject: Subject, settings: Settings, context: str | None, answer: int | None, streams: int, goal: str
) -> Load:
    try:
        tokens = context_tokens(context) if context is not None else settings.ctx
    except ValueError as exc:
        raise BadRequest(f"--ctx must be {exc}", hint=f"not {context!r}", param="ctx") from None
    tokens = tokens or min(subject.context, 8192)
    if answer is None:
        answer = min(_ANSWER_TOKENS, max(tokens // 4, 1))
    if answer >= tokens:
        what = f"an answer of {answer} tokens leaves no room for a prompt in {tokens}"
        raise BadRequest(what, hint="give more --ctx, or less --answer", param="ctx")
    return Load(tokens - answer, answer, streams, goal == "throughput")


def _own_card(settings: Settings) -> str | None:
    """The name of this machine's card, if the daemon would compute on it and its data sheet is known."""
    card = settle(settings, probe_machine(settings.cache_dir))[1].card
    with contextlib.suppress(BadRequest):
        return None if card is None else find_card(card.name).name
    return None


def _here(subject: Subject, load: Load, settings: Settings, kv_format: str | None) -> told.Plan:
    """On this machine's processors, with the sizes that `tierd serve` would take."""
    threads = settings.threads or len(os.sched_getaffinity(0))
    settings, computer = settle(settings, probe_machine(settings.cache_dir)._replace(card=None))
    measured = rates.of_this_machine(settings.cache_dir, threads)
    pages = kv_format or settings.kv_format
    context = load.prompt_tokens + load.answer_tokens
    # Pages asked for here may be exact ones, beside which nothing is kept, or smaller than those that would be stored.
    ladder, store_format = (settings.kv_exact_first, settings.kv_exact_last), settings.store_format
    if pages != settings.kv_format:
        ladder, store_format = (0, 0), SAME
    streams = max(settings.max_streams, load.streams)
    limits = Limits(pages, settings.max_batch, streams, threads, context, store_format, ladder)
    spec = subject.shape.spec
    runs = spec is not None and pages in ENGINE_FORMATS
    if spec is not None and runs:
        smallest = min(found.total for _, found in subject.formats)
        asked = dataclasses.replace(
            settings, kv_format=pages, store_format=store_format, kv_exact_first=ladder[0], kv_exact_last=ladder[1]
        )
        directory = Path(subject.source) if subject.manifest is not None else None
        draft = choose_draft(settings, directory, smallest, computer, threads)
        sizes, remarks = choose_sizes(asked, draft.beside(computer), spec, smallest, context, threads)[:2]
        if draft.model is not None:
            remarks = (*remarks, f"the draft model {draft.model.name} takes {human_bytes(draft.ram_bytes)}")
        elif draft.off_reason:
            remarks = (*remarks, f"there is no draft model: {draft.off_reason}")
    else:
        sizes, remarks = resolve_sizes(settings, computer), ()
    short = ""
    try:
        task = cpu_task(subject, load, sizes, computer, measured, limits)
    except DoesNotFit as exc:
        short = f"--weights-mem {-(-exc.needed_bytes // 2**20)}MiB"
        task = cpu_task(subject, load, sizes._replace(weights_bytes=exc.needed_bytes), computer, measured, limits)
    found = told.make(task, subject, "this machine's processors", "", remarks, runs=runs)
    basis = "assumed, not measured: `tierd doctor --measure` measures this machine"
    if not measured.assumed:
        basis = f"measured here, on {measured.compute_for(subject.digest, found.weight_format)[1]}"
    found = msgspec.structs.replace(found, rates=basis)
    if not short:
        return found
    missing = f"weights_mem of {human_bytes(sizes.weights_bytes)} is too little to stream them through"
    return msgspec.structs.replace(found, fits=False, nearest=short, why=(*found.why, missing))


def _on_card(subject: Subject, load: Load, settings: Settings, gpu: str, kv_format: str | None) -> told.Plan:
    """On a card by its data sheet, in this computer."""
    card = find_card(gpu)
    computer = probe_machine(settings.cache_dir)
    measured = rates.of_this_machine(settings.cache_dir, settings.threads or len(os.sched_getaffinity(0)))
    usable = min(computer.available_ram, computer.total_ram)
    host = usable - usable // 10 if settings.host_mem is None else settings.host_mem
    disk = computer.free_disk if settings.nvme_mem is None else settings.nvme_mem
    task = card_task(
        subject, load, card, measured, device_bytes=card_memory(card, settings.device_mem), host_bytes=host,
        disk_bytes=disk, kv_formats=(kv_format or "fp16",), max_batch=settings.max_batch,
    )  # fmt: skip
    basis = f"data sheet of {card.name}; disk and CPU memory {'assumed' if measured.assumed else 'measured here'}"
    return told.make(task, subject, card.name, basis, (), runs=False)


def _list_cards(as_json: bool) -> None:
    if as_json:
        print_json({"cards": [card._asdict() for card in CARDS.values()]})
        return
    print_table(
        ("CARD", "MEMORY", "GB/S", "FP16 TFLOPS", "LINK GB/S"),
        (
            (card.name, human_bytes(card.memory_bytes), f"{card.bytes_per_s / 1e9:.0f}",
             f"{card.fp16_flops / 1e12:.4g}{'' if card.printed else ' *'}", f"{card.link_bytes_per_s / 1e9:.1f}")
            for card in CARDS.values()
        ),
    )  # fmt: skip
    print("* twice the fp32 rate: NVIDIA prints none")


def _list_shapes(as_json: bool) -> None:
    found = [(name, known_shape(name), known.source) for name, known in KNOWN.items()]
    if as_json:
        print_json({"shapes": [
            {"name": name, "parameters": shape.parameters, "context": shape.context, "source": source,
             "kv_token_bytes": token_bytes(shape, "bf16"), "runs": shape.spec is not None}
            for name, shape, source in found
        ]})  # fmt: skip
        return
    print_table(
        ("SHAPE", "PARAMETERS", "CONTEXT", "KV BF16", "RUNS", "CONFIG.JSON OF"),
        (
            (name, f"{shape.parameters / 1e9:.3g} B", shape.context, human_bytes(token_bytes(shape, "bf16")),
             "yes" if shape.spec is not None else "no", source)
            for name, shape, source in found
        ),
    )  # fmt: skip

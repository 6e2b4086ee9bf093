"""A plan as it is told: a frozen record for programs, and lines for people."""

from __future__ import annotations

import msgspec

from tierd.daemon.plan import kv
from tierd.daemon.plan.cost import weights_in_host
from tierd.daemon.plan.planner import Outcome, Task, least, nearest, plan
from tierd.daemon.plan.subject import Subject
from tierd.daemon.units import counted, human_bytes

_BOUND = {
    "device": "the computation",
    "host": "attention on the processors",
    "link": "the link between CPU memory and the card",
    "disk": "the disk",
}


class Tier(msgspec.Struct, frozen=True):
    """What lies in one tier. Bytes; `layers` of weights, `kv_tokens` of all sequences together."""

    weights: int
    layers: int
    kv: int
    kv_tokens: int
    workspace: int = 0


class Speed(msgspec.Struct, frozen=True):
    """What is predicted. Tokens a second of all streams together; seconds that each resource needs for a step."""

    decode_tokens_per_s: float
    step_s: float
    ttft_s: float
    prefill_tokens_per_s: float
    with_prompts_tokens_per_s: float
    seconds: dict[str, float]
    bound: str


class Plan(msgspec.Struct, frozen=True):
    """A plan. `tiers`: `device`, `host`, `disk`; without a card the device is CPU memory and there is no `host`."""

    model: str
    source: str
    device: str
    fits: bool
    goal: str
    context: int
    prompt_tokens: int
    answer_tokens: int
    wanted_streams: int
    streams: int
    weight_format: str
    kv_format: str
    kv_token_bytes: int
    tiers: dict[str, Tier]
    speed: Speed | None
    rates: str  # what the prediction rests on
    why: tuple[str, ...]
    nearest: str = ""  # for one that doesn't fit: what to change
    runs: bool = True  # whether tierd can run it today


def make(task: Task, subject: Subject, device: str, rates: str, remarks: tuple[str, ...], *, runs: bool) -> Plan:
    """Plan a task. When nothing fits the answer says what is missing, and how the nearest plan that fits looks."""
    outcome = plan(task)
    if outcome is not None:
        return _told(task, subject, outcome, device, rates, remarks + _why(task, outcome), runs=runs)
    needs = least(task)
    missing = (
        f"beside pages it needs {human_bytes(needs.device)} of {device}, which gives "
        f"{human_bytes(needs.device_there)}; pages of one sequence take {human_bytes(needs.pages)}, and there is room "
        f"for {human_bytes(needs.pages_there)}"
    )
    change = nearest(task)
    if change is None:
        return _told(task, subject, None, device, rates, (*remarks, missing), runs=runs)
    found = _told(change.task, subject, change.outcome, device, rates, (*remarks, missing), runs=runs)
    return msgspec.structs.replace(found, fits=False, nearest=change.what)


def _told(
    task: Task, subject: Subject, outcome: Outcome | None, device: str, rates: str, why: tuple[str, ...], *, runs: bool
) -> Plan:
    format = outcome.format if outcome is not None else task.formats[-1]
    return Plan(
        model=subject.name,
        source=subject.source,
        device=device,
        fits=outcome is not None,
        goal="throughput" if task.throughput else "latency",
        context=task.context,
        prompt_tokens=task.prompt_tokens,
        answer_tokens=task.answer_tokens,
        wanted_streams=task.streams,
        streams=outcome.streams if outcome is not None else 0,
        weight_format=format.weights,
        kv_format=format.kv,
        kv_token_bytes=kv.token_bytes(task.shape, format.kv),
        tiers=_tiers(task, outcome) if outcome is not None else {},
        speed=_speed(task, outcome) if outcome is not None else None,
        rates=rates,
        why=why,
        runs=runs,
    )


def _tiers(task: Task, outcome: Outcome) -> dict[str, Tier]:
    """What lies where. Layers are whole: their bytes are those of the first ones, in the order of the file."""
    at, work, sizes, placed = outcome.placement, outcome.work, outcome.format.bytes, task.placed
    count, tokens = len(sizes.layers), outcome.streams * task.context
    workspace = task.workspace(outcome.streams)
    kv_ring = round(at.kv_disk * work.kv_ring_bytes)
    if placed is not None:
        streamed = sum(name.startswith("layer.") for name in placed.streamed)
        here = placed.resident_bytes + placed.experts_bytes
        weights = [(here, count - streamed), (0, 0), (sizes.total - here, streamed)]
        workspace += placed.ring_bytes + placed.rows_bytes
    elif work.mirrored:
        places, in_host = at.device * work.weights_bytes, weights_in_host(work, at) * work.weights_bytes
        weights = [
            (round(places) + work.fixed_bytes - workspace, count),
            (round(in_host) + work.fixed_host_bytes, 0),
            (work.weights_bytes - round(in_host), 0),
        ]
        workspace += work.slots_bytes
    else:
        device, host = round(at.device * count), round(at.host * count)
        weights = [
            (sum(sizes.layers[:device]) + work.fixed_bytes - workspace, device),
            (sum(sizes.layers[device : device + host]) + work.fixed_host_bytes, host),
            (sum(sizes.layers[device + host :]), count - device - host),
        ]
        workspace += work.slots_bytes if device < count else 0
    shares = (at.kv_device, at.kv_host, at.kv_disk)
    tiers = {
        name: Tier(bytes, layers, round(share * work.kv_bytes), round(share * tokens))
        for name, (bytes, layers), share in zip(("device", "host", "disk"), weights, shares, strict=True)
    }
    tiers["disk"] = msgspec.structs.replace(tiers["disk"], kv=round(at.kv_disk * work.kv_disk_bytes))
    tiers["device"] = msgspec.structs.replace(tiers["device"], workspace=workspace + kv_ring)
    if task.machine.unified:
        del tiers["host"]
    return tiers


def _speed(task: Task, outcome: Outcome) -> Speed:
    return Speed(
        decode_tokens_per_s=outcome.decode_tokens_per_s,
        step_s=outcome.step.step,
        ttft_s=outcome.ttft_s,
        prefill_tokens_per_s=task.prompt_tokens / max(outcome.ttft_s, 1e-9),
        with_prompts_tokens_per_s=outcome.tokens_per_s(task.answer_tokens),
        seconds={name: getattr(outcome.step, name) for name in ("device", "host", "link", "disk", "filling")},
        bound=outcome.step.bound,
    )


def _why(task: Task, outcome: Outcome) -> tuple[str, ...]:
    """The choices, in sentences."""
    at, work, step, lines = outcome.placement, outcome.work, outcome.step, []
    count = len(outcome.format.bytes.layers)
    if len(task.formats) > 1:
        reason = "the most exact one with which nothing moves" if not outcome.moves else "the fastest one"
        lines.append(f"of {len(task.formats)} formats this is {reason}")
    if outcome.streams < task.streams and not task.throughput:
        lines.append(f"pages of {outcome.streams} of {task.streams} sequences fit at once: the others wait")
    if work.mirrored:
        there, fetched = round(at.device * work.layers), human_bytes((at.host + at.disk) * work.step_bytes)
        below = f", {human_bytes(at.disk * work.step_bytes)} of it from the disk" if at.disk else ""
        lines.append(
            f"the card has places for {there} of {counted(work.layers, 'expert')}: a step fetches {fetched}{below}, if "
            "all are used alike"
        )
    elif at.host:
        lines.append(f"{round(at.host * count)} of {count} layers pass from CPU memory to the card in every step")
    if at.disk and work.step_bytes and not work.mirrored:
        layers = round(at.disk * count)
        if task.placed is not None:
            layers = sum(name.startswith("layer.") for name in task.placed.streamed)
        read = human_bytes(at.disk * work.step_bytes)
        if task.placed is not None and task.placed.expert_slots:
            slots = counted(task.placed.expert_slots, "expert")
            lines.append(f"{slots} at a time lie in memory: a step reads {read} from the disk if all are used alike")
        else:
            lines.append(f"{layers} of {count} layers are read from the disk in every step: {read} with the rest")
    if at.kv_disk:
        lines.append(f"{human_bytes(at.kv_disk * work.kv_disk_bytes)} of pages are read from the disk in every step")
    if at.kv_attended:
        lines.append(f"{at.kv_attended:.0%} of the pages are attended by the processors, where they lie")
    parts = ", ".join(
        f"{name} {time(getattr(step, name))}" for name in ("device", "host", "link", "disk") if getattr(step, name)
    )
    lines.append(f"a step waits for {_BOUND[step.bound]} ({parts})")
    return tuple(lines)


def time(seconds: float) -> str:
    """`3.1 ms`, `2.4 s`, `12 min`."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:,.0f} min"


def rate(count: float) -> str:
    """Three digits, and no power of ten."""
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def lines(found: Plan) -> list[str]:
    """A plan for people."""
    said = [f"{found.model} on {found.device}: {found.source}"]
    if not found.fits:
        said.append("does not fit: " + found.why[-1])
        if found.speed is None:
            return said
        said.append(f"the nearest plan that fits: {found.nearest}")
    names = {"device": "memory" if "host" not in found.tiers else "card", "host": "CPU memory", "disk": "disk"}
    said.append(f"weights    {found.weight_format:<10}" + _where(found, names, "weights"))
    said.append(
        f"KV pages   {found.kv_format:<10}" + _where(found, names, "kv")
        + f" ({human_bytes(found.kv_token_bytes)} a token, {found.streams} x {found.context:,} tokens)"
    )  # fmt: skip
    said.append(f"workspace  {human_bytes(found.tiers['device'].workspace)}")
    speed = found.speed
    assert speed is not None
    said.append(
        f"decode     {rate(speed.decode_tokens_per_s)} tokens/s"
        + (f" in {found.streams} streams" if found.streams > 1 else "")
        + f", {time(speed.step_s)} a step"
    )
    said.append(
        f"prompt     {time(speed.ttft_s)} to the first token after {found.prompt_tokens:,} tokens "
        f"({rate(speed.prefill_tokens_per_s)} tokens/s)"
    )
    said += [f"why        {line}" for line in (found.why if found.fits else ())]
    said.append(f"rates      {found.rates}")
    if not found.runs:
        said.append("note       tierd can't run this today: these are figures alone")
    return said


def _where(found: Plan, names: dict[str, str], part: str) -> str:
    pieces = []
    for tier, name in names.items():
        if tier in found.tiers and (count := getattr(found.tiers[tier], part)):
            layers = found.tiers[tier].layers
            detail = f" ({layers} layers)" if part == "weights" and layers else ""
            pieces.append(f"{human_bytes(count)} {'on' if tier == 'disk' else 'in'} {name}{detail}")
    return ", ".join(pieces) or "nothing"

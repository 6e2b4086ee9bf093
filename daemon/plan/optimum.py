"""The best placement of one step's weights and pages: a linear program, solved by HiGHS.

Eight variables: the shares of `cost.Placement`, and the time of the slowest resource, which is minimized together with
the filling. Layers are whole, so the solution is rounded both ways and solved again with the layers where they are.
HiGHS is imported when it is needed: it brings numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tierd.daemon.plan.cost import Machine, Placement, Work, seconds

_DEVICE, _HOST, _DISK, _KV_DEVICE, _KV_HOST, _KV_DISK, _ATTENDED, _TIME = range(8)
_INFINITY = math.inf


class Row(NamedTuple):
    """`lower <= sum of coefficients x variables <= upper`; coefficients by number of the variable."""

    lower: float
    upper: float
    coefficients: dict[int, float]


class Program(NamedTuple):
    """A linear program to be minimized: cost and bounds of each variable, and rows."""

    costs: Sequence[float]
    bounds: Sequence[tuple[float, float]]
    rows: Sequence[Row]


def best(work: Work, machine: Machine) -> Placement | None:
    """The placement with the shortest step, in whole layers; None when there is none that fits."""
    # Slots for streamed layers are taken only if something is streamed: so first without either.
    whole = solve(program(work, machine, streamed=False))
    if whole is not None:
        return whole
    found = solve(program(work, machine, streamed=True))
    if found is None:
        return None
    beside = not machine.unified
    if work.mirrored:
        return spread_below(work, machine, found)
    candidates = [
        solve(program(work, machine, streamed=True, layers=layers)) for layers in _roundings(found, work, beside)
    ]
    placed = [placement for placement in candidates if placement is not None]
    return min(placed, key=lambda at: seconds(work, machine, at).step) if placed else None


def spread_below(work: Work, machine: Machine, at: Placement) -> Placement:
    """A solution for mirrored weights, in whole layers on the device. CPU memory has as much of all of them as there is
    room for beside pages, and so as large a part of what the device misses; the program was more hopeful."""
    device = math.floor(at.device * work.layers + 1e-9) / work.layers
    room = max(machine.host_bytes - work.fixed_host_bytes - at.kv_host * work.kv_bytes, 0.0)
    in_host = min(room / work.weights_bytes, 1.0)
    return at._replace(device=device, host=(1.0 - device) * in_host, disk=(1.0 - device) * (1.0 - in_host))


def _roundings(at: Placement, work: Work, beside: bool) -> Iterator[tuple[float, float, float]]:
    """Whole layers near a solution: on the device, in CPU memory, on disk, as shares."""
    count = work.layers
    for device in {math.floor(at.device * count + 1e-9), math.ceil(at.device * count - 1e-9)}:
        hosts = {math.floor(at.host * count + 1e-9), math.ceil(at.host * count - 1e-9), count - device}
        for host in hosts if beside else {0}:
            if 0 <= device and 0 <= host and device + host <= count:
                yield device / count, host / count, (count - device - host) / count


def program(
    work: Work, machine: Machine, *, streamed: bool, layers: tuple[float, float, float] | None = None
) -> Program:
    """The program of a step. `streamed`: weights may leave the device; `layers`: their shares are these."""
    w, kv, step, stored = work.weights_bytes, work.kv_bytes, work.step_bytes, work.kv_disk_bytes
    beside = not machine.unified
    attend = machine.host_attend and beside
    device_bytes = machine.device_bytes - work.fixed_bytes - work.slots_bytes * streamed
    host_bytes = machine.host_bytes - work.fixed_host_bytes
    weights_s, pages_s = step / machine.disk_bytes_per_s, stored / machine.page_disk_bytes_per_s  # of the disk, for all
    costs = [0.0] * 8
    costs[_TIME], costs[_DISK], costs[_KV_DISK] = 1.0, work.filling_s(weights_s, 0.0), work.filling_s(0.0, pages_s)
    open_share, closed = (0.0, 1.0), (0.0, 0.0)
    bounds = [
        (work.least_device, 1.0) if streamed else (1.0, 1.0),
        open_share if streamed and beside else closed,
        open_share if streamed else closed,
        open_share,
        open_share if beside else closed,
        open_share,
        open_share if attend else closed,
        (0.0, _INFINITY),
    ]
    if layers is not None:
        bounds[:3] = [(share, share) for share in layers]
    taken_in = {_DISK: -step * machine.read_cost_s, _KV_DISK: -stored * machine.page_read_cost_s}
    rows = [
        Row(1.0, 1.0, {_DEVICE: 1.0, _HOST: 1.0, _DISK: 1.0}),
        Row(1.0, 1.0, {_KV_DEVICE: 1.0, _KV_HOST: 1.0, _KV_DISK: 1.0}),
        Row(-_INFINITY, device_bytes, {_DEVICE: w, _KV_DEVICE: kv, _KV_DISK: work.kv_ring_bytes}),
        Row(-_INFINITY, machine.disk_bytes, {_KV_DISK: stored}),
        Row(-_INFINITY, machine.kv_bytes, {_KV_DEVICE: kv, _KV_HOST: kv}),
        Row(-_INFINITY, machine.weights_bytes, {_DEVICE: w, _HOST: w}),
        # Each resource ends within the time.
        Row(work.compute_s + work.attend_s, _INFINITY, {_TIME: 1.0, _ATTENDED: work.attend_s, **taken_in}),
        Row(0.0, _INFINITY, {_TIME: 1.0, _DISK: -weights_s, _KV_DISK: -pages_s}),
    ]
    if beside:
        link_s = 1.0 / machine.link_bytes_per_s
        moved = {_HOST: -step * link_s, _DISK: -step * link_s, _KV_HOST: -kv * link_s, _KV_DISK: -kv * link_s}
        rows += [
            Row(-_INFINITY, host_bytes, {_HOST: w, _KV_HOST: kv}),
            Row(0.0, _INFINITY, {_TIME: 1.0, **moved, _ATTENDED: kv * link_s}),
            Row(0.0, _INFINITY, {_KV_HOST: 1.0, _ATTENDED: -1.0}),
            Row(0.0, _INFINITY, {_TIME: 1.0, _ATTENDED: -work.host_attend_s}),
        ]
    return Program(costs, bounds, rows)


def solve(program: Program) -> Placement | None:
    """The optimum, None when nothing fits. Bytes are scaled, so that coefficients are of like size."""
    import highspy  # brings numpy: 0.2 s that only a plan pays

    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.silent()
    highs.setOptionValue("threads", 1)
    for lower, upper in program.bounds:
        highs.addVar(lower, upper)
    for index, cost in enumerate(program.costs):
        highs.changeColCost(index, cost)
    for row in program.rows:
        scale = max(map(abs, row.coefficients.values())) or 1.0
        if row.upper < 0 <= min(row.coefficients.values()):
            return None  # less than nothing is left
        indices, values = list(row.coefficients), [value / scale for value in row.coefficients.values()]
        highs.addRow(row.lower / scale, row.upper / scale, len(indices), indices, values)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    shares = [min(max(float(value), 0.0), 1.0) for value in highs.getSolution().col_value[:_TIME]]
    return Placement(*shares)

"""What a step costs, given where weights and pages lie: some resources work at once, the slowest of which decides.

    device     matrices, attention over pages that it reads, and for each byte from the disk what taking it in costs
               where the device is this machine's processors
    host       attention over pages in CPU memory, in place (a card only)
    link       weights and pages on their way from CPU memory, or from the disk through it, to a card
    disk       weights and pages read from it

    step = max(all of them) + filling: the first part of what the disk streams overlaps with nothing

Everything is linear in the shares of weights and pages that lie somewhere, which is what `optimum` makes use of.
FlexGen's model (arXiv 2303.06865, section 4.3) has the same shape; attention on the CPU, formats, partial overlap and
the processors' share of reading are added.
"""

from __future__ import annotations

from typing import NamedTuple

RESOURCES = ("device", "host", "link", "disk")


class Machine(NamedTuple):
    """Memories and links. Bytes, bytes per second.

    Args:
        unified: the device computes in CPU memory (no card): `device_bytes` is that memory, there is no link.
        device_bytes: what weights, pages and workspace may take.
        host_bytes: the same of CPU memory beside a card.
        kv_bytes: what pages may take of the memories together.
        weights_bytes: what weights may take of them.
        disk_bytes: what pages may take of the disk; weights lie there in any case.
        disk_bytes_per_s, page_disk_bytes_per_s: of weights, and of pages.
        read_cost_s, page_read_cost_s: of the device's time, for each byte of them that comes from the disk.
        host_attend: whether CPU and card share attention.
    """

    unified: bool
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    link_bytes_per_s: float
    disk_bytes_per_s: float
    page_disk_bytes_per_s: float
    read_cost_s: float = 0.0
    page_read_cost_s: float = 0.0
    kv_bytes: int = 1 << 62
    weights_bytes: int = 1 << 62
    host_attend: bool = False


class Work(NamedTuple):
    """One step of a block of sequences, before anything is placed. Bytes and seconds of all layers.

    Args:
        fixed_bytes: of the device: embedding and head, workspace.
        fixed_host_bytes: of CPU memory beside a card: the embedding where it is apart.
        slots_bytes: of the device, for streamed layers to pass through, if any is.
        weights_bytes: of all layers, on whatever tier.
        step_bytes: of them, what the step reads; less than all with experts.
        kv_bytes: of the block's pages.
        layers: streamed in so many parts.
        compute_s: matrices and what is around them, on the device.
        attend_s: all attention, on the device.
        host_attend_s: all attention, on the CPU beside a card.
        kv_ring_bytes: of the device, for all pages to pass through; for a part of them so much less.
        kv_parts: pages are streamed in so many parts, each of some layers; 0: layer by layer.
        kv_stored: bytes on the disk for each byte of pages in memory.
        least_device: the share of the weights that the device has at least, if not all.
        mirrored: what the device has of the weights lies below it, too: in CPU memory or on the disk, as much of it as
            of what it has not.
    """

    fixed_bytes: int
    fixed_host_bytes: int
    slots_bytes: int
    weights_bytes: int
    step_bytes: float
    kv_bytes: int
    layers: int
    compute_s: float
    attend_s: float
    host_attend_s: float = 0.0
    kv_ring_bytes: float = 0.0
    kv_parts: int = 0
    kv_stored: float = 1.0
    least_device: float = 0.0
    mirrored: bool = False

    @property
    def kv_disk_bytes(self) -> float:
        """Of the block's pages, on the disk."""
        return self.kv_bytes * self.kv_stored

    def filling_s(self, weights_s: float, pages_s: float) -> float:
        """The time of the first parts, of what the disk takes for all of them."""
        return weights_s / self.layers + pages_s / (self.kv_parts or self.layers)


class Placement(NamedTuple):
    """Shares, each between 0 and 1: of the layers and of the pages on the device, in CPU memory, on disk.

    `kv_attended`: the part of the pages that CPU attention reads where they lie; at most `kv_host`.
    """

    device: float
    host: float
    disk: float
    kv_device: float
    kv_host: float
    kv_disk: float
    kv_attended: float = 0.0


class Seconds(NamedTuple):
    """What each resource needs for a step, and the step as a whole."""

    device: float
    host: float
    link: float
    disk: float
    filling: float

    @property
    def step(self) -> float:
        """The step."""
        return max(self.device, self.host, self.link, self.disk) + self.filling

    @property
    def bound(self) -> str:
        """The resource that decides."""
        return max(RESOURCES, key=lambda name: float(getattr(self, name)))


def seconds(work: Work, machine: Machine, at: Placement) -> Seconds:
    """What a step takes with everything in its place."""
    weights, pages = at.disk * work.step_bytes, at.kv_disk * work.kv_disk_bytes
    device_s = work.compute_s + (1.0 - at.kv_attended) * work.attend_s
    device_s += weights * machine.read_cost_s + pages * machine.page_read_cost_s
    link_s = 0.0
    if not machine.unified:
        moved = (at.host + at.disk) * work.step_bytes
        moved += (at.kv_host - at.kv_attended + at.kv_disk) * work.kv_bytes
        link_s = moved / machine.link_bytes_per_s
    weights_s, pages_s = weights / machine.disk_bytes_per_s, pages / machine.page_disk_bytes_per_s
    filling_s = work.filling_s(weights_s, pages_s)
    return Seconds(device_s, at.kv_attended * work.host_attend_s, link_s, weights_s + pages_s, filling_s)


class Use(NamedTuple):
    """Bytes of each memory."""

    device: float
    host: float
    disk: float


def use(work: Work, machine: Machine, at: Placement) -> Use:
    """What a placement takes. Weights on disk count for nothing: the file lies there anyway."""
    streamed = at.host + at.disk > 0 and not machine.unified or at.disk > 0
    device = float(work.fixed_bytes + work.slots_bytes * streamed)
    device += at.device * work.weights_bytes + at.kv_device * work.kv_bytes + at.kv_disk * work.kv_ring_bytes
    host = work.fixed_host_bytes + weights_in_host(work, at) * work.weights_bytes + at.kv_host * work.kv_bytes
    return Use(device, host, at.kv_disk * work.kv_disk_bytes)


def weights_in_host(work: Work, at: Placement) -> float:
    """The share of the weights that lies in CPU memory beside a card."""
    missing = at.host + at.disk
    return at.host / missing if work.mirrored and missing > 0 else at.host


def fits(work: Work, machine: Machine, at: Placement) -> bool:
    """Whether a placement keeps every limit, to a byte in a million."""
    needed = use(work, machine, at)
    pages = (at.kv_device + at.kv_host) * work.kv_bytes
    weights = (at.device + weights_in_host(work, at)) * work.weights_bytes
    pairs = (
        (needed.device, machine.device_bytes), (needed.host, machine.host_bytes), (needed.disk, machine.disk_bytes),
        (pages, machine.kv_bytes), (weights, machine.weights_bytes),
    )  # fmt: skip
    return all(taken <= limit * (1 + 1e-6) + 1 for taken, limit in pairs)

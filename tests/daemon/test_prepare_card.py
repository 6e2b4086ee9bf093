"""Several engines on a card: who is let in beside whom, with how much, and what is believed of free memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from front_harness import Front, make_model, text, until
from memory_rig import arenas_of, roomy_front

from tests.daemon.plan.test_block import subject as prepared_shape
from tierd.daemon.card_memory import CardMemory
from tierd.daemon.child import EngineState
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import OutOfSpace, TryLater
from tierd.daemon.machine import Machine
from tierd.daemon.models.catalog import MANIFEST, Manifest, TensorEntry
from tierd.daemon.plan.auto import LEAST_ARENA_BYTES
from tierd.daemon.plan.block import Extent
from tierd.daemon.plan.cards import RESERVED_BYTES
from tierd.daemon.prepare import Preparer
from tierd.daemon.supervisor import Model, NoRoom

GIB = 1 << 30
RAM = Machine(64 * GIB, 64 * GIB, 100 * GIB)


def card_model(models_dir: Path, name: str, weights_bytes: int, **options: Any) -> Path:
    """One that a card takes, with so many bytes of weights there."""
    directory = make_model(models_dir, name, weights_bytes, **options)
    manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    tensor = TensorEntry("attn_norm", "fp32", 1, weights_bytes // 4, 0, weights_bytes)
    record = msgspec.structs.replace(manifest.records[0], tensors=(tensor,))
    spec = msgspec.structs.replace(manifest.spec, head_dim=16)
    changed = msgspec.structs.replace(manifest, spec=spec, records=(record,))
    (directory / MANIFEST).write_bytes(msgspec.json.encode(changed))
    return directory


class Engine:
    """A process that is ready. `keeps`: it gives none of its arena away."""

    def __init__(self, model: str) -> None:
        self.model, self.state, self.resizes, self.keeps = model, EngineState.READY, 0, False
        self.chosen: dict[str, Any] = {}
        self.notices: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None

    async def call(self, op: str, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert op == "resize"
        if self.keeps:
            raise TryLater("running requests need it")
        self.meanwhile()
        return dict(args)

    def notice(self, text: str) -> None:
        self.notices.append(text)


class Scene:
    """A card, and what NVML tells of it: of its workspace each engine has taken `taken_share`."""

    def __init__(self, tmp_path: Path, make_settings: Callable[..., Any], **changes: Any) -> None:
        self.models = tmp_path / "models"
        self.total_bytes, self.others_bytes, self.taken_share = 24 * GIB, 0, 0.0
        self.engines: dict[str, Any] = {}
        self.prepare = Preparer(make_settings(tmp_path, **{"device_mem": None, **changes}), lambda _dir: self.machine())

    def used_bytes(self, taken_share: float) -> int:
        """What engines that are there have, or would have with so much of their workspaces."""
        books, used = self.prepare.books, 0
        for name, one in books.held.items():
            if name in self.engines and self.engines[name].state is not EngineState.STARTING:
                device = min(books.yielded.get(name, one.arenas.device), one.arenas.device)
                used += device + one.weights + round(taken_share * one.workspace)
        return used

    def machine(self) -> Machine:
        free = self.total_bytes - self.others_bytes - self.used_bytes(self.taken_share)
        return RAM._replace(card=CardMemory("a card", self.total_bytes, max(free, 0)))

    async def load(self, name: str, weights_bytes: int) -> EngineConfig:
        directory = card_model(self.models, name, weights_bytes)
        found = msgspec.json.decode(await self.prepare(Model(name, directory), self.engines), type=EngineConfig)
        self.engines[name] = Engine(name)
        return found

    async def end(self, name: str) -> None:
        del self.engines[name]
        await self.prepare.give_back(name, self.engines)

    def device_bytes(self, name: str) -> int:
        return self.prepare.books.held[name].arenas.device


@pytest.fixture
def scene(tmp_path: Path) -> Callable[..., Scene]:
    from front_harness import make_settings

    return lambda **changes: Scene(tmp_path, make_settings, **changes)


async def test_a_second_model_gets_its_weights_and_an_equal_arena_out_of_that_of_the_first(scene):
    one = scene()
    first = await one.load("alpha", 6 * GIB)
    assert first.card and first.device_bytes > 16 * GIB  # all that its weights leave
    second = await one.load("beta", 4 * GIB)
    held = one.prepare.books.held
    assert second.card and second.weights_bytes == 4 * GIB and second.device_bytes == one.device_bytes("alpha")
    assert sum(each.total for each in held.values()) in range(24 * GIB - 1, 24 * GIB + 1)
    assert all(each.workspace > RESERVED_BYTES for each in held.values())  # each has a context of the driver's
    assert second.host_bytes == held["alpha"].arenas.host and second.host_weights_bytes > 0
    third = await one.load("gamma", 1 * GIB)
    assert abs(third.device_bytes - one.device_bytes("alpha")) < 3
    assert one.device_bytes("alpha") == one.device_bytes("beta")
    await one.end("beta")
    await one.end("gamma")
    assert one.device_bytes("alpha") == first.device_bytes


async def test_no_room_where_not_all_weights_fit_beside(scene):
    one = scene()
    first = await one.load("alpha", 12 * GIB)
    with pytest.raises(NoRoom):
        await one.load("beta", 11 * GIB)
    assert one.device_bytes("alpha") == first.device_bytes and set(one.prepare.books.held) == {"alpha"}
    with pytest.raises(NoRoom):  # beside layers that are streamed there is never any
        one = scene()
        await one.load("alpha", 40 * GIB)
        await one.load("beta", GIB)


async def test_who_needs_its_arena_keeps_it(scene):
    one = scene()
    first = await one.load("alpha", 6 * GIB)
    one.engines["alpha"].keeps = True
    with pytest.raises(NoRoom):
        await one.load("beta", 4 * GIB)
    assert one.device_bytes("alpha") == first.device_bytes and "beta" not in one.prepare.books.held


async def test_memory_that_another_program_takes_meanwhile_is_not_given_away(scene):
    one = scene()
    first, one.taken_share = await one.load("alpha", 6 * GIB), 1.0

    def grab(size: int) -> Callable[[], None]:
        return lambda: setattr(one, "others_bytes", size)

    one.engines["alpha"].meanwhile = grab(one.device_bytes("alpha") // 2)
    with pytest.raises(NoRoom):
        await one.load("beta", 4 * GIB)
    assert LEAST_ARENA_BYTES < one.device_bytes("alpha") <= first.device_bytes // 2  # it is not there any more
    one.engines["alpha"].meanwhile, one.others_bytes = grab(2 * GIB), 0
    found = await one.load("beta", 4 * GIB)
    assert found.device_bytes < one.device_bytes("alpha")
    assert one.used_bytes(1.0) + one.others_bytes <= one.total_bytes


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.STOPPING])
async def test_nobody_plans_beside_one_that_starts_or_ends(scene, state):
    one = scene()
    one.others_bytes = 4 * GIB
    await one.load("alpha", 6 * GIB)
    one.engines["alpha"].state = state
    before = one.prepare.books.usable_bytes
    with pytest.raises(NoRoom):
        await one.load("beta", 4 * GIB)
    assert one.prepare.books.usable_bytes == before  # what is free now means nothing
    one.engines["alpha"].state = EngineState.READY
    await one.load("beta", 4 * GIB)


async def test_free_memory_that_workspaces_will_take_is_not_given_twice(scene):
    one = scene()
    await one.load("alpha", 6 * GIB)
    workspace = one.prepare.books.held["alpha"].workspace
    assert one.machine().card.free_bytes == workspace  # nothing of it is taken yet
    await one.load("beta", 4 * GIB)
    assert one.used_bytes(1.0) <= one.total_bytes


async def test_other_programs_are_seen_when_a_newcomer_comes(scene):
    one = scene()
    await one.load("alpha", 6 * GIB)
    one.taken_share = 1.0
    await one.prepare.yield_device(one.engines["alpha"], 8 * GIB)  # as the watch has it
    one.others_bytes = 24 * GIB - one.used_bytes(1.0)
    with pytest.raises(NoRoom):
        await one.load("beta", 8 * GIB)
    await one.load("beta", 4 * GIB)
    assert one.used_bytes(1.0) + one.others_bytes <= one.total_bytes
    one.others_bytes = 0  # they have left: beyond workspaces that may be taken, that is sure
    await one.load("gamma", 8 * GIB)
    assert one.used_bytes(1.0) <= one.total_bytes


async def test_what_was_asked_for_pages_is_for_all_of_them(scene):
    one = scene(device_mem=4 * GIB)
    await one.load("alpha", 6 * GIB)
    found = await one.load("beta", 4 * GIB)
    assert found.device_bytes == one.device_bytes("alpha") == 2 * GIB
    await one.end("alpha")
    assert one.device_bytes("beta") == 4 * GIB


async def test_what_is_to_stay_free_for_others_stays_free(scene):
    one = scene(yield_device_mem=2 * GIB)
    one.others_bytes = 4 * GIB
    await one.load("alpha", 6 * GIB)
    await one.load("beta", 4 * GIB)
    booked = sum(each.total for each in one.prepare.books.held.values())
    assert booked <= 18 * GIB


async def test_sizes_by_hand_come_back_where_they_fit(scene):
    one = scene()
    await one.load("alpha", 6 * GIB)
    await one.load("beta", 4 * GIB)
    told = await one.prepare.resize(one.engines["beta"], {"device_bytes": GIB, "timeout_s": 1.0}, 1.0)
    assert told["device_bytes"] == GIB == one.device_bytes("beta")
    await one.prepare.resize(one.engines["alpha"], {"device_bytes": 9 * GIB, "timeout_s": 1.0}, 1.0)
    with pytest.raises(OutOfSpace, match="of device memory do not fit: weights, workspace and other models leave"):
        await one.prepare.resize(one.engines["alpha"], {"device_bytes": 12 * GIB, "timeout_s": 1.0}, 1.0)
    await one.end("beta")
    assert (await one.load("beta", 4 * GIB)).device_bytes == GIB
    told = await one.prepare.resize(one.engines["alpha"], {"device_bytes": "auto", "timeout_s": 1.0}, 1.0)
    held = one.prepare.books.held
    assert told["device_bytes"] == (24 * GIB - sum(each.total - each.arenas.device for each in held.values())) // 2


async def test_auto_is_what_a_model_gets_when_the_first_has_gone(scene):
    one = scene()
    first = await one.load("alpha", 2 * GIB)
    await one.load("beta", 9 * GIB)
    await one.end("alpha")
    whole = one.device_bytes("beta")
    assert whole < first.device_bytes - 6 * GIB
    for size in (GIB, "auto"):
        await one.prepare.resize(one.engines["beta"], {"device_bytes": size, "timeout_s": 1.0}, 1.0)
    assert one.device_bytes("beta") == whole


@pytest.mark.parametrize("seed", range(6))
async def test_engines_that_come_and_go_never_take_more_than_there_is(scene, seed):
    """Workspaces are taken whenever they are; other programs come before all engines, or leave."""
    chance, one = random.Random(seed), scene()
    one.others_bytes = chance.randrange(8) * GIB
    for _ in range(25):
        one.taken_share = chance.random()
        name = chance.choice("abcd")
        if name in one.engines:
            if chance.random() < 0.5:
                await one.end(name)
            else:
                one.engines[name].keeps = chance.random() < 0.5
        else:
            try:
                await one.load(name, chance.randrange(1, 9) * GIB)
            except NoRoom:
                assert one.engines
        if chance.random() < 0.2:
            one.others_bytes //= 2
        assert one.used_bytes(1.0) + one.others_bytes <= one.total_bytes
        held = one.prepare.books.held
        assert held.keys() == one.engines.keys()
        assert all(each.arenas.device >= LEAST_ARENA_BYTES for each in held.values())


# -- with the supervisor --------------------------------------------------------------------------------------------


class Nvml:
    """The machine as a front sees it whose engines have on the card what is booked for them."""

    def __init__(self) -> None:
        self.front: Front | None = None

    def __call__(self) -> Machine:
        used = 0
        if self.front is not None:
            engines = dict(self.front.supervisor.engines)
            held = dict(self.front.prepare.books.held)
            used = sum(
                one.total for name, one in held.items()
                if name in engines and engines[name].state in (EngineState.READY, EngineState.STOPPING)
            )  # fmt: skip
        return RAM._replace(card=CardMemory("a card", 24 * GIB, max(24 * GIB - used, 0)))


async def test_the_least_recently_used_makes_room_and_pinned_ones_stay(tmp_path):
    for name, size in (("alpha", 8), ("beta", 5), ("gamma", 9), ("delta", 23)):
        card_model(tmp_path / "models", name, size * GIB)
    nvml = Nvml()
    async with roomy_front(tmp_path, nvml, device_mem=None, pinned_models=("alpha",)) as front:
        nvml.front = front
        for name in ("alpha", "beta"):
            await front.service.load(name)
        assert set(front.supervisor.engines) == {"alpha", "beta"}
        assert arenas_of(front, "alpha").device == arenas_of(front, "beta").device
        await front.service.load("gamma")
        assert set(front.supervisor.engines) == {"alpha", "gamma"}
        assert not front.metrics.engine_deaths
        with pytest.raises(OutOfSpace, match="delta does not fit beside alpha"):
            await front.service.load("delta")
        assert set(front.supervisor.engines) == {"alpha"}


async def test_two_that_are_asked_for_at_once_are_loaded_one_after_the_other(tmp_path):
    for name in ("alpha", "beta", "gamma"):
        card_model(tmp_path / "models", name, 4 * GIB, start_s=0.2)
    nvml = Nvml()
    async with roomy_front(tmp_path, nvml, device_mem=None) as front:
        nvml.front = front
        await front.service.load("alpha")
        pid = front.engine("alpha").pid
        wires = [await front.connect() for _ in range(2)]
        for wire, name in zip(wires, ("beta", "gamma"), strict=True):
            wire.generate(1, "x", model=name, max_tokens=2)
        for wire in wires:
            assert text(await wire.until_end(1))
        assert set(front.supervisor.engines) == {"alpha", "beta", "gamma"} and front.engine("alpha").pid == pid
        booked = [one.total for one in front.prepare.books.held.values()]
        assert sum(booked) <= 24 * GIB
        await front.service.unload("beta")
        await until(lambda: arenas_of(front, "alpha").device > 5 * GIB)


async def test_models_of_the_card_and_of_the_processors_take_turns(tmp_path):
    card_model(tmp_path / "models", "alpha", 4 * GIB)
    make_model(tmp_path / "models", "odd")  # with heads that the card's kernels do not take
    nvml = Nvml()
    async with roomy_front(tmp_path, nvml, device_mem=None) as front:
        nvml.front = front
        for name in ("alpha", "odd", "alpha"):
            await front.service.load(name)
            assert set(front.supervisor.engines) == {name}


async def test_a_batch_that_is_alone_gets_its_block_on_the_card(scene):
    one = scene(cache_dir=Path("/nonexistent/tierd"), nvme_mem=0, yield_device_mem=GIB)
    manifest = prepared_shape("smollm2-135m").manifest
    directory = make_model(one.models, "alpha", manifest.bytes)
    (directory / MANIFEST).write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, name="alpha")))
    alpha = Model("alpha", directory)
    one.total_bytes, one.others_bytes = 4 * GIB, GIB
    block = one.prepare.plan_block(alpha, Extent(100, 200, 100, 400), None)
    assert block is not None and block.streams > 8 and block.why[1] == "all weights are on the card"
    one.prepare.give_block("alpha", block)
    config = msgspec.json.decode(await one.prepare(alpha, {}), type=EngineConfig)
    assert (config.max_streams, config.max_batch_rows, config.throughput) == (block.streams, block.rows, True)
    assert config.card and config.kv_format == "bf16" and config.device_bytes == block.sizes.device_bytes
    held = one.prepare.books.held["alpha"]
    assert held.workspace == block.workspace_bytes and held.total <= 2 * GIB
    assert not one.prepare.books.yielded  # all that the others leave is not wanted

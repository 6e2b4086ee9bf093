"""What `top` says equals what the pager holds, whole or piece by piece."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from tests.daemon.engine.books import PROMPT, board_on, expected_cells, expected_on_disk, look
from tests.daemon.engine.fakes import PAGE
from tests.daemon.engine.rig import Rig
from tierd.daemon.engine import sequence_rows, top
from tierd.daemon.engine.page_maps import KEPT
from tierd.tiers.page import Tier
from tierd.tui.snapshot import Assembler
from tierd.tui.wire import DaemonReport, EngineReport, TopAnswer, convert


def test_pictures_follow_the_books_through_a_load_that_uses_every_tier() -> None:
    chance = random.Random(5)
    rig = Rig(24, host=16, store=60)
    board, known = board_on(rig), Assembler()
    prompts = [[chance.randrange(60) for _ in range(chance.randrange(8, 60))] for _ in range(12)]
    versions: dict[str, int] = {}
    deltas = 0
    for number in range(40):
        prompt = chance.choice(prompts)
        rig.submit(number + 1, prompt + [chance.randrange(60)], chance.randrange(1, 30))
        for _ in range(chance.randrange(1, 12)):
            rig.turn()
            picture = look(board)
            assert picture.maps[0].cells.tolist() == expected_cells(rig.pager, Tier.DEVICE)
            assert picture.maps[1].cells.tolist() == expected_cells(rig.pager, Tier.HOST)
            assert Counter(picture.maps[2].cells.tolist()) == expected_on_disk(rig.pager)
            assert bytes(cell & ~KEPT for cell in picture.maps[0].cells.tolist()) == rig.pager.page_map()
            if chance.random() < 0.5:  # a screen that asks now and then has what one has that asks for all
                parts = [tier.part(picture.version, versions.get(tier.tier)) for tier in picture.maps]
                versions = {tier.tier: picture.version for tier in picture.maps}
                deltas += sum("base" in part for part in parts)
                answer = convert({"maps": parts}, TopAnswer)
                shown = known.take(1.0, None, DaemonReport(model="m", engines=(EngineReport("m", "ready", 7),)), answer)
                for seen, held in zip(shown.maps, picture.maps, strict=True):
                    assert seen.cells == held.cells.tobytes() and seen.used.tolist() == held.used.tolist()
                    assert seen.owners.tolist() == held.owners.tolist()
                    assert seen.prefixes.tolist() == held.prefixes.tolist()
    assert deltas > 20
    stats = rig.pager.statistics()
    assert stats.device.evictions and stats.host.evictions and stats.loaded_pages


def test_the_tree_is_that_of_the_index() -> None:
    chance = random.Random(6)
    rig = Rig(40, host=20, store=80)
    board = board_on(rig)
    head = [chance.randrange(60) for _ in range(3 * PAGE)]
    for number in range(12):
        rig.submit(number + 1, head[: chance.randrange(1, 3) * PAGE] + [chance.randrange(60) for _ in range(20)], 4)
    rig.run()
    picture = look(board)
    nodes, record = rig.pager.index.nodes, rig.pager.device.record_bytes
    rows = picture.tree.rows
    assert picture.tree.total == len(rows)
    assert sum(row[4] for row in rows) == record * sum(node.device >= 0 for node in nodes.values())
    assert sum(row[5] for row in rows) == record * sum(node.host >= 0 for node in nodes.values())
    assert sum(row[6] for row in rows) == record * sum(node.durable for node in nodes.values())
    assert sum(row[2] for row in rows) == sum(node.num_tokens for node in nodes.values())
    for place, row in enumerate(rows):
        assert row[1] < place
        way, node = [nodes[row[0]]], nodes[row[0]]
        while node.parent in nodes:
            way.append(node := nodes[node.parent])
        tokens, at = 0, place
        while at >= 0:
            tokens, at = tokens + rows[at][2], rows[at][1]
        assert tokens == sum(node.num_tokens for node in way)
        if way[0].durable:
            assert picture.maps[2].prefixes[board._disk.slot_of(way[0])] == place + 1
        if way[0].device >= 0:
            assert picture.maps[0].prefixes[way[0].device] == place + 1


def test_sequences_say_where_their_tokens_lie_and_own_their_slots() -> None:
    rig = Rig(16, host=16, store=40)
    board = board_on(rig)
    rig.submit(1, PROMPT, 20)
    rig.submit(2, PROMPT[:30] + [1, 2, 3], 20)
    rig.turn(5)
    picture = look(board)
    assert [row["id"] for row in picture.sequences] == [1, 2]
    for number, (row, request) in enumerate(zip(picture.sequences, rig.streams, strict=True), 1):
        assert row["phase"] == request.phase.value and row["output_tokens"] == request.generated
        assert sum(tokens for _, tokens in row["runs"]) == len(request.tokens)
        assert dict(row["runs"])["device"] == request.computed
        assert request.lease is not None
        held = {node.device for node in request.lease.nodes} | set(request.lease.private)
        owned = {slot for slot, owner in enumerate(picture.maps[0].owners.tolist()) if owner == number}
        assert owned <= held and set(request.lease.private) <= owned
    rig.run()
    assert look(board).sequences == () and not look(board).maps[0].owners.any()


def test_pages_that_a_window_has_given_up_keep_their_place_in_the_row() -> None:
    rig = Rig(64)
    rig.submit(1, PROMPT[:30], 60, kv_mode="sinks=3,window=17")
    board = board_on(rig)
    while (request := next(iter(rig.streams))).computed < 70:
        rig.turn()
    lease = request.lease
    assert lease is not None and lease.dropped
    (row,) = look(board).sequences
    kept = len(lease.nodes) * PAGE
    behind = request.computed - kept - lease.dropped * PAGE
    assert row["runs"] == [("device", kept), ("dropped", lease.dropped * PAGE), ("device", behind), ("missing", 1)]
    rig.run()


def test_pages_that_go_from_the_middle_keep_their_place_in_the_row() -> None:
    rig = Rig(64)
    rig.submit(1, PROMPT, 90, kv_mode="h2o=64")
    board = board_on(rig)
    while (request := next(iter(rig.streams))).computed < 120:
        rig.turn()
    (row,) = look(board).sequences
    assert request.heavy is not None
    shown = [place for place, tokens in row["runs"] for _ in range(tokens)]
    assert len(shown) == len(request.tokens)
    kept = set(request.heavy.kept.tolist())
    assert shown[:120] == ["device" if at // PAGE in kept else "dropped" for at in range(120)]
    rig.run()


def test_a_waiting_sequence_has_nothing_yet() -> None:
    rig = Rig(16, max_streams=1)
    rig.submit(1, PROMPT, 20)
    rig.submit(2, PROMPT, 20)
    rig.turn(2)
    assert look(board_on(rig)).sequences[1]["runs"] == [("missing", len(PROMPT))]


def test_runs_of_a_torn_sequence_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_rows, "MAX_RUNS", 3)
    rig = Rig(16)
    rig.submit(1, PROMPT, 20)
    rig.turn(8)
    (request,) = rig.streams
    places = np.array([0, 1] * 5, np.uint8)
    runs = sequence_rows._runs(request, places, PAGE)
    assert len(runs) <= 4 and sum(tokens for _, tokens in runs) == len(request.tokens)


def test_another_look_waits_its_turn_and_costs_decide_how_long() -> None:
    rig = Rig(16)
    board = board_on(rig)
    board.refresh()
    first = board._picture
    board.refresh()
    assert board._picture is first
    assert board._due_s - rig.clock.now_s > 0.2  # a look takes some ms of the rig's clock
    rig.clock.now_s = board._due_s + 1
    board.refresh()
    assert board._picture is not first


def test_nobody_looking_leaves_nothing_to_follow() -> None:
    rig = Rig(16)
    board = board_on(rig)
    look(board)
    assert rig.pager.residency.touched is not None
    board._asked_s = rig.clock.now_s
    board.rest()
    assert rig.pager.residency.touched is not None  # somebody asked a moment ago
    rig.clock.now_s += 60
    board.rest()
    assert rig.pager.residency.touched is None
    rig.submit(1, PROMPT, 4)
    rig.run()
    assert look(board).maps[0].cells.tolist() == expected_cells(rig.pager, Tier.DEVICE)


def test_many_pages_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "TAKEN_AT_ONCE", 2)
    rig = Rig(32)
    rig.submit(1, PROMPT, 4)
    rig.run()
    board = board_on(rig)
    for _ in range(len(rig.pager.index)):
        picture = look(board)
    assert picture.maps[0].cells.tolist() == expected_cells(rig.pager, Tier.DEVICE)

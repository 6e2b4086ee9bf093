"""The draft model: its guesses are those of its decoder, whatever it held before; and engines that have one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tests.daemon.engine.vocabularies import byte_fallback, byte_level
from tierd.daemon.engine.draft import DraftModel, Seat, check_pair
from tierd.daemon.engine.guesses import Wish
from tierd.daemon.engine.speculate import MAX_DRAFT, Draft
from tierd.daemon.errors import BadConfig
from tierd.daemon.models.catalog import TOKENIZER, load_manifest
from tierd.daemon.models.importer import import_model
from tierd.daemon.models.placement import DoesNotFit, place
from tierd.daemon.plan.draft import CATCH_UP_ROWS, SEAT_TOKENS, START_TOKENS
from tierd.daemon.protocol import TERMINAL, Format, Sampling, Submit

VOCAB, KNOWN, PAGE = 50, 40, 16


class Recorder:
    """A decoder that keeps what it wrote at each address; the next token is a function of the last three."""

    def __init__(self) -> None:
        self.memory: dict[int, list[int]] = {}
        self.batches: list[int] = []

    def forward(self, _memories, tokens, positions, row_seq, pages, page_offsets, logit_rows):
        self.batches.append(len(tokens))
        for token, position, seq in zip(tokens, positions, row_seq, strict=True):
            page = int(pages[page_offsets[seq] + position // PAGE])
            self.memory.setdefault(page, [-1] * PAGE)[position % PAGE] = int(token)
        logits = np.zeros((len(logit_rows), KNOWN), np.float32)
        for place_, row in enumerate(logit_rows):
            mine = pages[page_offsets[row_seq[row]] : page_offsets[row_seq[row] + 1]]
            history = [token for page in mine for token in self.memory[int(page)]][: positions[row] + 1]
            logits[place_, follows(history)] = 1.0
        return logits


def follows(history: Sequence[int]) -> int:
    return (7 * sum(history[-3:]) + len(history[-3:])) % KNOWN


def continued(tokens: Sequence[int], count: int) -> list[int]:
    out = list(tokens)
    for _ in range(count):
        out.append(follows(out))
    return out[len(tokens) :]


def model(decoder: Recorder, seats: int = 2) -> DraftModel:
    pages = np.arange(seats * SEAT_TOKENS // PAGE, dtype=np.int64).reshape(seats, -1)
    clock = iter(range(10**6))
    return DraftModel(
        "small", decoder, (), pages, vocab=VOCAB, known=KNOWN, memory_bytes=1, clock=lambda: float(next(clock))
    )


def wish(owner: int, tokens: list[int]) -> Wish:
    return Wish(owner, tokens, Draft(), MAX_DRAFT, lambda logits, _place: (int(np.argmax(logits)), 0.99))


def guessed(small: DraftModel, wishes: list[Wish], counts: list[int]) -> list[list[int]]:
    return [guess.tokens for guess in small.guess(wishes, counts)]


def test_guesses_are_what_the_draft_model_would_say() -> None:
    small = model(Recorder())
    tokens = [3, 1, 4, 1, 5]
    for _ in range(40):  # of what it guesses some is drawn, and then something else
        (found,) = guessed(small, [wish(1, tokens)], [4])
        assert found == continued(tokens, 4)
        tokens += [*found[: len(tokens) % 5], len(tokens) % KNOWN]
    assert small.pass_s > 0


def test_who_comes_back_with_other_tokens_is_computed_again() -> None:
    small, tokens = model(Recorder()), [1, 2, 3, 4, 5, 6]
    for other in (tokens, [1, 2, 9, 4], [8], tokens * 3, tokens):
        assert guessed(small, [wish(1, other)], [3]) == [continued(other, 3)]


def test_what_is_right_is_not_computed_again() -> None:
    decoder = Recorder()
    small, tokens = model(decoder), [1, 2, 3]
    (found,) = guessed(small, [wish(1, tokens)], [4])
    assert decoder.batches == [3, 1, 1, 1]
    small.guess([wish(1, [*tokens, *found, 0])], [1])
    assert decoder.batches[4:] == [2]
    small.guess([wish(1, [*tokens, *found, 0])], [1])
    assert decoder.batches[5:] == [1]  # the newest token says what comes behind it


def test_a_long_text_is_seen_from_its_end_and_computed_by_and_by() -> None:
    decoder = Recorder()
    small, tokens = model(decoder), [place_ % 7 for place_ in range(5000)]
    assert guessed(small, [wish(1, tokens)], [2]) == [[]]
    assert guessed(small, [wish(1, tokens)], [2]) == [continued(tokens, 2)]
    assert decoder.batches == [CATCH_UP_ROWS, START_TOKENS - CATCH_UP_ROWS, 1]
    for _ in range(SEAT_TOKENS // 8):
        tokens += [place_ % 5 for place_ in range(8)]
        found = guessed(small, [wish(1, tokens)], [2])[0]
        assert not found or found == continued(tokens, 2)
    assert len(decoder.memory) <= SEAT_TOKENS // PAGE  # it stayed in its seat


def test_who_has_caught_up_does_not_wait_for_who_has_not() -> None:
    small = model(Recorder())
    small.guess([wish(2, [1, 2])], [1])
    found = guessed(small, [wish(1, [1] * 1000), wish(2, [1, 2, 3])], [2, 2])
    assert found == [[], continued([1, 2, 3], 2)]


def test_seats_are_bounded_and_those_of_others_are_given_on() -> None:
    small = model(Recorder())
    every = [wish(number, [number, 1]) for number in (1, 2, 3)]
    assert [len(found) for found in guessed(small, every, [1, 1, 1])] == [1, 1, 0]
    small.keep([2, 3])
    assert [len(found) for found in guessed(small, every[1:], [1, 1])] == [1, 1]
    small.keep(())
    assert len(small._free) == 2 and not small._seats


def test_tokens_that_it_does_not_know_end_its_guesses() -> None:
    small = model(Recorder())
    assert guessed(small, [wish(1, [1, KNOWN, 2])], [2]) == [[]]
    assert all(token < KNOWN for token in guessed(small, [wish(2, [1, 2])], [8])[0])


def test_it_stops_where_it_is_not_sure() -> None:
    small, chances = model(Recorder()), iter([0.9, 0.6, 0.3])
    one = Wish(1, [1, 2, 3], Draft(), MAX_DRAFT, lambda logits, _place: (int(np.argmax(logits)), next(chances)))
    assert small.guess([one], [8]) == [(continued([1, 2, 3], 3), 2)]


def test_a_seat_never_calls_for_more_than_it_holds() -> None:
    seat = Seat(np.arange(SEAT_TOKENS // PAGE, dtype=np.int64))
    tokens: list[int] = []
    for _ in range(3 * SEAT_TOKENS):
        tokens.append(len(tokens) % 11)
        rows = seat.missing(tokens)
        seat.held += rows
        assert rows and tokens[seat.first :] == seat.held and len(seat.held) + MAX_DRAFT <= SEAT_TOKENS


def test_models_with_other_tokens_are_no_pair(pair: tuple[Path, Path]) -> None:
    main = load_manifest(pair[0])
    other = msgspec.structs.replace(main, name="other", tokenizer_digest="another")
    check_pair(main, byte_level(), other, byte_level())  # another file, the same tokens
    with pytest.raises(BadConfig, match="the draft model other can't guess for tiny.*tokenizers") as caught:
        check_pair(main, byte_level(), other, byte_fallback())
    assert "--draft" in (caught.value.hint or "") and caught.value.exit_code == 78


# -- engines ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny random model that is sure of what it says, and the same with int8 weights."""
    root = tmp_path_factory.mktemp("pair")
    sure = reference("llama", num_hidden_layers=4, max_position_embeddings=512, initializer_range=0.6)
    main = prepare(sure, root)
    import_model(root / "source", root / "models", "small", "int8-g32", lambda _stage, _done, _total: None)
    return main, root / "models" / "small"


def least_bytes(model_dir: Path, max_rows: int) -> int:
    with pytest.raises(DoesNotFit) as caught:
        place(load_manifest(model_dir), 1, max_rows)
    return caught.value.needed_bytes


def engine(main: Path, work: Path, draft: Path | None, **more: Any) -> Live:
    """Weights streamed, always drafting."""
    settings = {"device": 40, "nvme": 0, "max_batch_rows": 64, "max_streams": 4, "speculate": "on" if draft else "off"}
    settings |= {"weights_bytes": least_bytes(main, 64), "draft_dir": str(draft or "")}
    return Live(main, work, **settings | more)


ASKS: list[dict[str, Any]] = [
    {"tokens": [place_ % 150 + 20 for place_ in range(45)], "max_tokens": 24},
    {"tokens": [7, 9, 300, 11], "max_tokens": 30},
    {"tokens": [5, 6, 7], "max_tokens": 20, "temperature": 0.8, "seed": 4},
    {"tokens": [5, 6, 7], "max_tokens": 20, "temperature": 0.8, "seed": 5},  # a second answer to the same
    {"tokens": [50, 6, 7], "max_tokens": 20, "temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.4, "seed": 6},
]


def told(live: Live) -> dict[str, Any]:
    found = live.engine.loop.call(lambda: live.engine.board.figures()["speculation"]["draft"]).result(10)
    assert isinstance(found, dict)
    return found


def test_the_same_answers_with_and_without_a_draft_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    main, small = pair
    with engine(main, tmp_path, None) as live:
        plain = live.run(ASKS)
    with engine(main, tmp_path, small) as live:
        drafted = live.run(ASKS)
        figures = told(live)
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    assert all(end.ev == "done" for _, end in drafted)
    assert figures["model"] == "small" and figures["off"] == "" and figures["memory_bytes"] > 0
    assert 20 < figures["right_drafts"] <= figures["drafted_tokens"]
    assert sum(end.data["timings"].accepted for _, end in drafted) >= figures["right_drafts"]


def test_the_same_answers_when_there_is_little_memory_and_some_leave(pair: tuple[Path, Path], tmp_path: Path) -> None:
    main, small = pair
    with engine(main, tmp_path, None) as live:
        plain = [tokens for tokens, _ in live.run(ASKS[1:])]
    with engine(main, tmp_path, small, device=5) as live:  # room to begin, and not to end, for three of them
        numbers = [live.submit(**ask) for ask in ASKS[1:] + ASKS[1:]]
        for number in numbers[1:4:2]:
            live.engine.loop.cancel(number)
        found = live.collect(*numbers)
        preempted = live.engine.loop.call(lambda: live.engine.loop._streams.totals.preemptions).result(10)
    assert preempted > 0
    ended = [found[number] for number in numbers]
    for (tokens, end), wanted in zip(ended, plain + plain, strict=True):
        assert tokens == wanted if end.ev == "done" else end.ev == "aborted" and tokens == wanted[: len(tokens)]
    assert [end.ev for _, end in ended[4:]] == ["done"] * 4


def test_an_answer_goes_on_in_another_engine(pair: tuple[Path, Path], tmp_path: Path) -> None:
    main, small = pair
    with engine(main, tmp_path, None) as live:
        plain = [tokens for tokens, _ in live.run(ASKS)]
    with engine(main, tmp_path, small) as live:
        resumed = live.run([
            ask | {"resume": tuple(wanted[: 5 + place_])}
            for place_, (ask, wanted) in enumerate(zip(ASKS, plain, strict=True))
        ])  # fmt: skip
    for place_, ((tokens, _), wanted) in enumerate(zip(resumed, plain, strict=True)):
        assert tokens == wanted[5 + place_ :]


def held(live: Live, regex: str, seed: int) -> str:
    """An answer held to a regular expression."""
    live._number += 1
    sampling = Sampling(temperature=0.7, seed=seed, max_tokens=40)
    submit = Submit("m", tokens=(5, 6, 7), sampling=sampling, format=Format("regex", regex))
    live.engine.loop.submit(live.engine.intake.request(live._number, submit, time.monotonic()))
    text = ""
    while True:
        event = live.events.get(timeout=60.0)
        if event.id == live._number:
            text += event.data.get("text", "")
            if event.ev in TERMINAL:
                assert event.ev == "done", event
                return text


def test_a_grammar_forbids_what_is_guessed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    main, small = pair
    found = []
    for draft in (None, small):
        with engine(main, tmp_path, draft) as live:
            # Threads that begin with their first work.
            live.engine.intake.guides.compiler.submit(int).result(10.0)
            found.append([held(live, "(ab|ba){3,8}", seed) for seed in range(3)])
            if draft:
                assert told(live)["drafted_tokens"] > told(live)["right_drafts"]
    assert found[0] == found[1] and all(set(text) == {"a", "b"} for text in found[0])


def test_a_pair_that_is_none_does_not_start(pair: tuple[Path, Path], tmp_path: Path) -> None:
    main, small = pair
    other = tmp_path / "models" / "other"
    other.mkdir(parents=True)
    for file in small.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    words = json.loads((other / TOKENIZER).read_text())
    words["added_tokens"][0]["content"] = "<|another|>"
    (other / TOKENIZER).write_text(json.dumps(words))
    manifest = msgspec.structs.replace(load_manifest(other), name="other", tokenizer_digest="x")
    (other / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(BadConfig, match="other can't guess for tiny"), engine(main, tmp_path, other):
        pass
    with engine(main, tmp_path, other, speculate="off") as live:  # nobody guesses
        assert "draft" not in live.engine.board.figures()["speculation"]


def test_why_there_is_no_draft_model_is_told(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with engine(pair[0], tmp_path, None, draft_off_reason="no room") as live:
        assert "the draft model is off: no room" in live.engine.notes


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("count", [200])
def test_the_default_model_with_a_draft_of_its_own_weights(count: int, models_dir: Path, tmp_path: Path) -> None:
    """Streamed from the disk; greedy and drawn, with seeds."""
    main = models_dir / "smollm2-135m"
    words = "the engine keeps pages of memory and moves them ahead of use while it reads a file".split()
    submits: list[dict[str, Any]] = []
    for number in range(count):
        prompt = " ".join(words[(number * 7 + place_ * (1 + number % 5)) % len(words)] for place_ in range(6))
        drawn = {"temperature": 0.8, "seed": number} if number % 4 == 0 else {}
        submits.append({"prompt": prompt, "max_tokens": 12} | drawn)
    found: list[list[list[int]]] = []
    for draft in (None, main):
        settings: dict[str, Any] = {"draft_dir": str(draft or ""), "speculate": "on" if draft else "off"}
        settings |= {"weights_bytes": load_manifest(main).bytes // 2, "max_batch_rows": 256}
        with Live(main, tmp_path / settings["speculate"], device=900, nvme=0, **settings) as live:
            parts = [live.run(submits[at : at + 40], 300.0) for at in range(0, count, 40)]
            found.append([tokens for part in parts for tokens, _ in part])
            assert draft is None or told(live)["right_drafts"] > count
    assert found[0] == found[1]

"""A draft model: a second, small decoder beside the main one, which guesses what that one will draw.

It has memory of its own and no part in the tiers: a *seat* is a row of pages for the newest tokens of one request. What
a seat holds is compared with the request's tokens before each guess, and computed again where they differ. So nothing
has to be told of preemptions, losses or forks, and a request that ended leaves nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tierd.daemon.engine import batch
from tierd.daemon.engine.backend import Backend
from tierd.daemon.engine.guesses import LEAST_CHANCE, Guess, Wish
from tierd.daemon.engine.model import rope
from tierd.daemon.engine.runner import Decoder, Memory
from tierd.daemon.engine.speculate import MAX_DRAFT, SMOOTHING
from tierd.daemon.engine.tokens import Vocabulary
from tierd.daemon.engine_config import EngineConfig
from tierd.daemon.errors import BadConfig, ModelInvalid, OutOfSpace
from tierd.daemon.models.catalog import TOKENIZER, Manifest, load_manifest
from tierd.daemon.models.errors import ModelFileError
from tierd.daemon.plan.draft import (
    CATCH_UP_ROWS,
    KV_FORMAT,
    SEAT_TOKENS,
    START_TOKENS,
    card_draft_bytes,
    draft_bytes,
    layout,
    max_rows,
    pages_bytes,
    seats,
)
from tierd.daemon.units import human_bytes
from tierd.kernels.layout import PAGE_TOKENS
from tierd.tiers.mover import Mover

_DIFFERENCES_SHOWN = 3


@dataclass(slots=True)
class Seat:
    """Of one request: `pages` hold the keys and values of `held`, which are its tokens from `first` on."""

    pages: batch.Addresses
    first: int = 0
    held: list[int] = field(default_factory=list)

    def missing(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that are to be computed before the next one can be guessed, one at least."""
        known = list(tokens[self.first :])
        same = next(
            (place for place, (ours, theirs) in enumerate(zip(self.held, known, strict=False)) if ours != theirs),
            min(len(self.held), len(known)),
        )
        same = min(same, max(len(known) - 1, 0))  # the newest has to say what comes behind it
        if not same or len(known) + MAX_DRAFT > len(self.pages) * PAGE_TOKENS:
            self.first, self.held = max(len(tokens) - START_TOKENS, 0), []
            return list(tokens[self.first :])
        del self.held[same:]
        return known[same:]


class DraftModel:
    """Guesses tokens; see `guesses.Guesser`. Threading: step thread only.

    Args:
        name: of the model.
        memories: what the pages lie in.
        pages: addresses `[seats, pages of a seat]`.
        on_card: whether a card computes it.
        vocab: ids that the main model knows.
        known: of these, so many first ones are known to this model as well.
        memory_bytes: that it takes, for those who ask.
    """

    def __init__(
        self, name: str, decoder: Decoder, memories: Sequence[Memory], pages: npt.NDArray[np.int64], *, vocab: int,
        known: int, memory_bytes: int, clock: Callable[[], float], on_card: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.on_card = on_card
        self.memory_bytes = memory_bytes
        self.pass_s = 0.0  # of a pass that guesses one token of each
        self._decoder = decoder
        self._memories = tuple(memories)
        self._vocab = vocab
        self._known = known
        self._clock = clock
        self._free = list(pages)
        self._seats: dict[int, Seat] = {}

    def keep(self, owners: Iterable[int]) -> None:
        """Who still decodes: the seats of all others are free."""
        living = set(owners)
        for owner in [owner for owner in self._seats if owner not in living]:
            self._free.append(self._seats.pop(owner).pages)

    def guess(self, wishes: Sequence[Wish], counts: Sequence[int]) -> list[Guess]:
        """Up to `counts` tokens for each: fewer when the next one is unlikely to be drawn.

        None for a request that has no seat, has not caught up yet (it goes on with that the next time), or said a token
        that this model does not know. Raises whatever the computation raises.
        """
        found: list[list[int]] = [[] for _ in wishes]
        sure, reached = [0] * len(wishes), [1.0] * len(wishes)
        first: list[tuple[int, Seat, list[int], bool]] = []
        budget = CATCH_UP_ROWS
        for number, (wish, count) in enumerate(zip(wishes, counts, strict=True)):
            seat = self._seat(wish.owner) if count > 0 else None
            if seat is None:
                continue
            missing = seat.missing(wish.tokens)
            rows = missing[: max(budget, 2)]  # who has caught up is not held up by who has not
            if max(rows) < self._known:
                budget -= len(rows)
                first.append((number, seat, rows, len(rows) == len(missing)))
        if not first:
            return [Guess([], 0) for _ in wishes]
        logits = self._timed([(seat, rows, complete) for _, seat, rows, complete in first])
        going = [(number, seat) for number, seat, _, complete in first if complete]
        while going:
            next_rows: list[tuple[int, Seat]] = []
            for (number, seat), row in zip(going, logits, strict=True):
                wish, guessed = wishes[number], found[number]
                token, chance = wish.pick(self._fitted(row), len(wish.tokens) + len(guessed))
                guessed.append(token)
                reached[number] *= chance
                if reached[number] < LEAST_CHANCE:
                    continue
                sure[number] += 1
                if len(guessed) < counts[number]:
                    next_rows.append((number, seat))
            going = next_rows
            if going:
                logits = self._timed([(seat, found[number][-1:], True) for number, seat in going])
        return list(map(Guess, found, sure))

    def _fitted(self, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Logits of the main model's ids: what this one does not know it never guesses."""
        if len(row) >= self._vocab == self._known:
            return row[: self._vocab]
        whole = np.full(self._vocab, -np.inf, np.float32)
        whole[: self._known] = row[: self._known]
        return whole

    def _seat(self, owner: int) -> Seat | None:
        if owner not in self._seats and self._free:
            self._seats[owner] = Seat(self._free.pop())
        return self._seats.get(owner)

    def _timed(self, rows: Sequence[tuple[Seat, list[int], bool]]) -> npt.NDArray[np.float32]:
        """As `_run`. A pass in which nobody catches up says how long one takes."""
        begun_s = self._clock()
        logits = self._run(rows)
        if max(len(tokens) for _, tokens, _ in rows) <= 2:
            took_s = self._clock() - begun_s
            self.pass_s += (SMOOTHING if self.pass_s else 1.0) * (took_s - self.pass_s)
        return logits

    def _run(self, rows: Sequence[tuple[Seat, list[int], bool]]) -> npt.NDArray[np.float32]:
        """Computes rows behind what their seats hold; logits of the last of each that is complete. [complete, vocab]"""
        built = batch.build(
            [
                batch.Rows(tokens, len(seat.held), seat.pages, 1 if complete else 0) for seat, tokens, complete in rows
            ],
            PAGE_TOKENS,
        )
        logits = self._decoder.forward(
            self._memories, built.tokens, built.positions, built.row_seq, built.pages, built.page_offsets,
            built.logit_rows,
        )  # fmt: skip
        for seat, tokens, _ in rows:
            seat.held += tokens
        return logits


def check_pair(main: Manifest, main_words: Vocabulary, draft: Manifest, draft_words: Vocabulary) -> None:
    """Raises BadConfig unless both models mean the same by every token that both of them know."""
    if main.tokenizer_digest == draft.tokenizer_digest:
        return
    ours, theirs = main_words.ids(), draft_words.ids()
    if ours == theirs:
        return
    differ = sorted(text for text in ours.keys() | theirs.keys() if ours.get(text) != theirs.get(text))
    shown = ", ".join(repr(text) for text in differ[:_DIFFERENCES_SHOWN])
    raise BadConfig(
        f"the draft model {draft.name} can't guess for {main.name}: they have different tokenizers "
        f"({len(theirs):,} tokens and {len(ours):,}, {len(differ):,} of them not the same, such as {shown})",
        hint=f"choose a small model of the same family as {main.name}, or leave --draft out",
        param="draft",
    )


def load(
    config: EngineConfig, main: Manifest, words: Vocabulary, backend: Backend, mover: Mover,
    resources: contextlib.ExitStack, *, threads: int, clock: Callable[[], float],
) -> DraftModel:  # fmt: skip
    """The draft model of an engine, for `main`, whose tokens are `words`; `backend` computes it. What it holds is given
    back by `resources`.

    Raises BadConfig when the two don't go together, ModelInvalid, OutOfSpace.
    """
    directory, max_streams = Path(config.draft_dir), config.max_streams
    try:
        manifest = load_manifest(directory)
    except ModelFileError as exc:
        raise ModelInvalid(f"draft model {directory.name!r} is broken: {exc}") from exc
    check_pair(main, words, manifest, Vocabulary.load(directory / TOKENIZER))
    spec = manifest.spec
    # What a card computes with.
    format = backend.copy_format if backend.on_card and config.kv_format != KV_FORMAT else KV_FORMAT
    whole = msgspec.structs.replace(
        config, model_dir=config.draft_dir, weights_bytes=None, host_weights_bytes=None
    )
    try:
        shape = layout(spec, format)
        on_card = backend.on_card
        taken = card_draft_bytes(manifest, max_streams) if on_card else draft_bytes(manifest, max_streams, threads)
        weights = backend.weights(whole, manifest, max_rows(max_streams), mover, lambda _done, _total: None)
        resources.callback(weights.close)
        cos, sin = rope.tables(rope.frequencies(spec, SEAT_TOKENS), SEAT_TOKENS)
        decoder = backend.decoder(weights, shape, cos, sin, max_rows(max_streams), lambda _done, _total: None)
        resources.callback(decoder.close)
        pages = pages_bytes(shape, max_streams)
        block = backend.device_block(pages, pages)
    except ValueError as exc:
        raise BadConfig(
            f"{manifest.name} can't be a draft model: {exc}", hint="choose another, or leave --draft out", param="draft"
        ) from exc
    except OSError as exc:
        raise OutOfSpace(
            f"there is no memory for the draft model {manifest.name}, which takes {human_bytes(taken.total)}: "
            f"{exc.strerror or exc}",
            hint="give less with --device-mem or --weights-mem, or leave --draft out",
        ) from exc
    addresses = block.address + np.arange(pages // shape.record_bytes, dtype=np.int64) * shape.record_bytes
    return DraftModel(
        manifest.name, decoder, (block.row(0, pages),), addresses.reshape(seats(max_streams), -1),
        vocab=main.spec.vocab, known=min(main.spec.vocab, spec.vocab), memory_bytes=taken.total, clock=clock,
        on_card=on_card,
    )  # fmt: skip

"""The answer of one stream: tokens in, what its client is told out.

    tokens -> characters -> parser -> text (up to a stop string), reasoning, calls

What has been told after n tokens is a function of those n tokens alone, so a stream that is resumed elsewhere feeds the
tokens that its client has and goes on with exactly what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from tierd.daemon.engine.answer import Call, Parser, Piece, Said, Text, Thought, clean
from tierd.daemon.engine.tokens import Detokenizer, StopStrings, Vocabulary


class AnswerStream:
    """Threading: one owner.

    Args:
        parser: reads reasoning and calls; None for an answer that is text alone.
        controls: special tokens that the parser has to see, and how.
        call_id: makes the id of a call.
        one_call: the answer ends with its first call.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        *,
        parser: Parser | None = None,
        controls: Mapping[int, str] | None = None,
        call_id: Callable[[], str] = str,
        one_call: bool = False,
    ) -> None:
        self._characters = Detokenizer(vocabulary, controls if parser is not None else None)
        self._controls = controls or {}
        self._parser = parser
        self._stops = StopStrings(stop)
        self._call_id = call_id
        self._one_call = one_call
        self._silent_tokens = 0  # since something was told
        self.told = Said()
        """Everything that was told so far."""

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    @property
    def stopped(self) -> bool:
        """Whether the answer has ended by what it says: nothing that follows is told."""
        return self._stops.found is not None or (self._one_call and bool(self.told.calls))

    def push(self, token: int) -> Said:
        """What may be told now that `token` is known."""
        if self.stopped:
            return Said()
        self._silent_tokens += 1
        characters = self._characters.push(token)
        if self._parser is None:
            return self._said([Text(characters)] if characters else [])
        if token not in self._controls:
            characters = clean(characters)
        return self._counted(self._said(self._parser.push(characters) if characters else []))

    def finish(self) -> Said:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return Said()
        characters = self._characters.finish()
        pieces: list[Piece] = [Text(characters)] if characters and self._parser is None else []
        if self._parser is not None:
            pieces = (self._parser.push(clean(characters)) if characters else []) + self._parser.finish()
        said = self._said(pieces)
        if not self.stopped:
            held = Said(self._stops.finish())
            self.told.add(held)
            said.add(held)
        return self._counted(said)

    def _counted(self, said: Said) -> Said:
        """Reasoning with the number of its tokens: a token belongs to what is told next, when it is known."""
        if said:
            said.thinking_tokens = self._silent_tokens if said.thinking else 0
            self.told.thinking_tokens += said.thinking_tokens
            self._silent_tokens = 0
        return said

    def _said(self, pieces: list[Piece]) -> Said:
        said = Said()
        for piece in pieces:
            match piece:
                case Text():
                    self._tell(said, Said(self._stops.push(piece.text)))
                case Thought():
                    self._tell(said, Said(thinking=piece.text))
                case Call():
                    self._tell(said, Said(self._stops.finish()))  # no stop string reaches over a call
                    index = len(self.told.calls)
                    call = {"index": index, "id": self._call_id(), "name": piece.name, "arguments": piece.arguments}
                    self._tell(said, Said(calls=[call]))
                case _:
                    assert_never(piece)
            if self.stopped:
                break
        return said

    def _tell(self, said: Said, more: Said) -> None:
        said.add(more)
        self.told.add(more)

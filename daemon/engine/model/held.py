"""The weights of a running model, whatever computes: what a runner, the status and a resize need of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from tierd.daemon.engine.model.weights_status import WeightRow, WeightsStatus
from tierd.kernels.cpu.weights import DecoderShape, Ints, Part, Rows


class HeldWeights(Protocol):
    """`ModelWeights` on the CPU, `CardWeights` on a card. Threading: the step thread's, once it is built."""

    shape: DecoderShape

    @property
    def total_bytes(self) -> int:
        """Of all records."""
        ...

    @property
    def budget_bytes(self) -> int | None:
        """What `memory_bytes` may come to; None without a bound."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Held beside the computation: resident records and all that streamed ones pass through."""
        ...

    @property
    def streams(self) -> bool:
        """Whether a pass needs layers that are handed in: it goes layer by layer then."""
        ...

    @property
    def can_move(self) -> bool:
        """Whether there is a decoder, from and to which layers can go."""
        ...

    def open(self, tokens: Ints, wants_logits: bool, deadline_s: float) -> Rows | None:
        """A pass begins: the rows of the embedding that the decoder is to be handed, if any. Raises WeightsLost."""
        ...

    def layer(self, index: int, deadline_s: float) -> Any:
        """A layer as the decoder takes it, until the next one is asked for; None if it has it. Raises WeightsLost."""
        ...

    def experts(self, deadline_s: float) -> Any:
        """Who brings a layer's experts; None when the decoder has all."""
        ...

    def head_parts(self, deadline_s: float) -> Iterator[Part] | None:
        """The head part by part, None where the decoder has it."""
        ...

    def end(self) -> None:
        """The pass is over."""
        ...

    def statistics(self) -> WeightsStatus:
        """What there is to say now."""
        ...

    def rows(self) -> list[WeightRow]:
        """Every record, and where it lies."""
        ...

    def retarget(self, memory_bytes: int) -> None:
        """Between passes: so much memory from now on. Raises DoesNotFit, ModelInvalid, NotMoved; nothing changes
        then."""
        ...

    def settle(self) -> bool:
        """Between passes: brings one record to its place. False when nothing is left to do.

        Raises ModelInvalid, and NotMoved where records stay as they are from now on.
        """
        ...

    def close(self) -> None:
        """Ends the reads and gives everything back. Idempotent."""
        ...

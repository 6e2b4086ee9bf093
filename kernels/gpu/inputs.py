"""What a pass reads besides weights and pages: one block of numbers on the card, filled by one copy.

The block's views keep their places, so a captured graph finds the next step's numbers where those of the first were.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tierd.kernels.gpu.batch import Addresses, Arranged
from tierd.kernels.gpu.pages import Copies, PageTable, base_of
from tierd.kernels.gpu.write import Spans
from tierd.kernels.layout import PageLayout

_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a block has room for. The maxima are the sizes of grids."""

    rows: int
    decode_rows: int
    decode_pages: int  # of all decode rows
    max_decode_pages: int  # of one
    chunks: int
    chunk_pages: int
    max_chunk_pages: int
    max_chunk_rows: int
    spans: int
    logits: int
    sink_pages: int = 0  # of all rows
    max_sink_pages: int = 0  # of one; 0: no row sees sinks
    observed: int = 0  # rows
    observed_pages: int = 0  # of all of them
    max_observed_pages: int = 0  # of one
    bounded_chunks: bool = False  # some row of a chunk has a window of its own
    copies: bool = False  # some page has an exact one

    @staticmethod
    def of(arranged: Arranged) -> Sizes:
        """Just enough for one pass."""
        return Sizes(
            rows=len(arranged.tokens), decode_rows=arranged.decode_rows, decode_pages=len(arranged.decode_places),
            max_decode_pages=arranged.max_decode_pages, chunks=len(arranged.chunk_lengths),
            chunk_pages=len(arranged.chunk_places), max_chunk_pages=arranged.max_chunk_pages,
            max_chunk_rows=arranged.max_chunk_rows, spans=len(arranged.spans), logits=len(arranged.logit_rows),
            sink_pages=len(arranged.sinks.places), max_sink_pages=arranged.sinks.max_pages,
            observed=len(arranged.observed.rows), observed_pages=len(arranged.observed.places),
            max_observed_pages=arranged.observed.max_pages,
            bounded_chunks=bool(arranged.windows[arranged.decode_rows :].any()), copies=bool(len(arranged.copies)),
        )  # fmt: skip

    @staticmethod
    def of_decode(
        rows: int, pages: int, sink_pages: int = 0, observed: bool = False, copies: bool = False
    ) -> Sizes:
        """For up to `rows` decode rows of up to `pages` pages each, all of which give logits, and the sinks of up to
        `sink_pages`, if not 0, that each sees; and, if some are `observed`, for observing all."""
        watched = (rows, rows * pages, pages) if observed else (0, 0, 0)
        return Sizes(
            rows, rows, rows * pages, pages, 0, 0, 0, 0, rows, rows, rows * sink_pages, sink_pages, *watched,
            copies=copies,
        )  # fmt: skip

    @property
    def sink_rows(self) -> int:
        """Rows that may see sinks: all or none."""
        return self.rows if self.max_sink_pages else 0


class Inputs:
    """One block, and its views on the card.

    Rows that a pass does not fill are token 0 at position 0 of no sequence: they see nothing, and write nothing.

    Args:
        kv_heads: of the pages.
        row_width, dtype: of the rows of an embedding that does not lie on the card; 0 where it does.
        copy_layout: of exact copies of the pages, where they can have some.

    Attributes:
        masses: fp32 [observed pages, kv_heads]: what a pass adds up there, see `attention.observe`.
    """

    def __init__(
        self, sizes: Sizes, base: Tensor, kv_heads: int, row_width: int = 0, dtype: torch.dtype = torch.float32,
        copy_layout: PageLayout | None = None,
    ) -> None:  # fmt: skip
        self.sizes = sizes
        self._base = base
        self._copy_layout = copy_layout
        self._copy_base = base if copy_layout is None else base_of(copy_layout, base.device)
        copies = int(sizes.copies)
        places: dict[str, tuple[int, int, np.dtype[np.int64] | np.dtype[np.int32]]] = {}
        wide, narrow, at = np.dtype(np.int64), np.dtype(np.int32), 0
        for name, count, kind in (
            ("decode_pages", sizes.decode_pages, wide), ("chunk_pages", sizes.chunk_pages, wide),
            ("span_pages", sizes.spans, wide), ("sink_pages", sizes.sink_pages, wide), ("tokens", sizes.rows, narrow),
            ("positions", sizes.rows, narrow), ("angles", sizes.rows, narrow), ("windows", sizes.rows, narrow),
            ("sink_offsets", sizes.sink_rows + 1, narrow), ("sink_lengths", sizes.sink_rows, narrow),
            ("seen_from", sizes.sink_rows, narrow), ("observed_pages", sizes.observed_pages, wide),
            ("observed_rows", sizes.observed, narrow), ("observed_offsets", sizes.observed + 1, narrow),
            ("observed_lengths", sizes.observed, narrow),
            ("decode_offsets", sizes.decode_rows + 1, narrow), ("decode_lengths", sizes.decode_rows, narrow),
            ("chunk_offsets", sizes.chunks + 1, narrow), ("chunk_lengths", sizes.chunks, narrow),
            ("chunk_rows", sizes.chunks + 1, narrow), ("spans", 3 * sizes.spans, narrow),
            ("logit_rows", sizes.logits, narrow), ("decode_copies", copies * sizes.decode_pages, wide),
            ("chunk_copies", copies * sizes.chunk_pages, wide), ("span_copies", copies * sizes.spans, wide),
            ("copy_spans", copies * 3 * sizes.spans, narrow),
        ):  # fmt: skip
            places[name] = (at, count, kind)
            at += -(-count * kind.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        on_card = base.device.type == "cuda"
        self._near = torch.zeros(at, dtype=torch.uint8, pin_memory=on_card)
        self._far = torch.zeros(at, dtype=torch.uint8, device=base.device) if on_card else self._near
        flat = self._near.numpy()
        self._arrays = {n: flat[p : p + c * k.itemsize].view(k) for n, (p, c, k) in places.items()}
        kinds = {wide: torch.int64, narrow: torch.int32}
        self._views = {n: self._far[p : p + c * k.itemsize].view(kinds[k]) for n, (p, c, k) in places.items()}

        self._near_rows = torch.zeros((sizes.rows, row_width), dtype=dtype, pin_memory=on_card)
        self._far_rows = self._near_rows.to(base.device) if on_card else self._near_rows

        self.masses = torch.zeros((sizes.observed_pages, kv_heads), dtype=torch.float32, device=base.device)

    @property
    def embedded(self) -> Tensor:
        """[rows, row_width]: the embedding's, for the tokens; what `load_rows` was given."""
        return self._far_rows

    @property
    def tokens(self) -> Tensor:
        """int32 [rows]"""
        return self._views["tokens"]

    @property
    def positions(self) -> Tensor:
        """int32 [rows]"""
        return self._views["positions"]

    @property
    def angles(self) -> Tensor:
        """int32 [rows]: which row of the tables has a row's angles."""
        return self._views["angles"]

    @property
    def windows(self) -> Tensor:
        """int32 [rows]: that it has beside its layer's, 0 for none."""
        return self._views["windows"]

    @property
    def seen_from(self) -> Tensor:
        """int32 [rows]: where a row's query stands for its sinks. Empty where nobody sees any."""
        return self._views["seen_from"]

    @property
    def observed_rows(self) -> Tensor:
        """int32 [observed]"""
        return self._views["observed_rows"]

    @property
    def logit_rows(self) -> Tensor:
        """int32 [logits]"""
        return self._views["logit_rows"]

    @property
    def chunk_rows(self) -> Tensor:
        """int32 [chunks + 1], counted from the first row that does not decode."""
        return self._views["chunk_rows"]

    @property
    def decode_pages(self) -> Tensor:
        """int64: addresses of the pages that decode rows read, end to end."""
        return self._views["decode_pages"]

    def decode_table(self, layout: PageLayout) -> PageTable:
        """The pages of the decode rows."""
        views = self._views
        return PageTable(
            layout, views["decode_pages"], views["decode_offsets"], views["decode_lengths"],
            self.sizes.max_decode_pages, self._base, self._copies("decode_copies"),
        )  # fmt: skip

    def chunk_table(self, layout: PageLayout) -> PageTable:
        """The pages before the chunks."""
        views = self._views
        return PageTable(
            layout, views["chunk_pages"], views["chunk_offsets"], views["chunk_lengths"], self.sizes.max_chunk_pages,
            self._base, self._copies("chunk_copies"),
        )  # fmt: skip

    def sink_table(self, layout: PageLayout, rows: slice) -> PageTable:
        """The sinks of some rows: all decode rows, or all others. Their pages are shared."""
        views = self._views
        offsets = views["sink_offsets"][rows.start : rows.stop + 1]
        return PageTable(
            layout, views["sink_pages"], offsets, views["sink_lengths"][rows], self.sizes.max_sink_pages, self._base
        )

    def observed_table(self, layout: PageLayout) -> PageTable:
        """The pages of the observed rows."""
        views = self._views
        return PageTable(
            layout, views["observed_pages"], views["observed_offsets"], views["observed_lengths"],
            self.sizes.max_observed_pages, self._base,
        )  # fmt: skip

    def spans(self, layout: PageLayout) -> Spans:
        """Where the rows are written."""
        return Spans(layout, self._views["span_pages"], self._views["spans"].view(-1, 3), self._base)

    def copy_spans(self) -> Spans | None:
        """Where the rows are written a second time, exactly; None where no page of the pass has a copy."""
        if not self.sizes.copies or self._copy_layout is None:
            return None
        views = self._views
        return Spans(self._copy_layout, views["span_copies"], views["copy_spans"].view(-1, 3), self._copy_base)

    def _copies(self, name: str) -> Copies | None:
        if not self.sizes.copies or self._copy_layout is None:
            return None
        return Copies(self._copy_layout, self._views[name], self._copy_base)

    def load(self, arranged: Arranged, pages: Addresses) -> None:
        """Puts a pass into the block, which has room for it, and on its way to the card.

        The pass before has been waited for: the copy reads the block after this returns.
        """
        arrays = self._arrays
        for name in ("tokens", "positions", "angles", "windows", "decode_lengths", "chunk_lengths", "logit_rows"):
            _put(arrays[name], getattr(arranged, name), 0)
        sinks, observed = arranged.sinks, arranged.observed
        for name, numbers in (
            ("sink_offsets", sinks.offsets), ("sink_lengths", sinks.lengths), ("seen_from", sinks.seen_from),
            ("observed_rows", observed.rows), ("observed_lengths", observed.lengths),
        ):  # fmt: skip
            _put(arrays[name], numbers, 0)
        for name in ("decode_offsets", "chunk_offsets", "chunk_rows"):
            values = getattr(arranged, name)
            _put(arrays[name], values, int(values[-1]))
        _put(arrays["observed_offsets"], observed.offsets, int(observed.offsets[-1]))
        _put(arrays["spans"], arranged.spans.reshape(-1), 0)
        if len(arranged.copies):
            self._put_copies(arranged)
        self._put_pages(arranged, pages)
        self._send()

    def load_pages(self, arranged: Arranged, pages: Addresses) -> None:
        """As `load`, for other places of the same pages."""
        self._put_pages(arranged, pages)
        self._send()

    def load_rows(self, values: Tensor) -> None:
        """Rows of the embedding for the tokens that were loaded. [tokens, row_width]"""
        self._near_rows[: len(values)] = values
        if self._far_rows is not self._near_rows:
            self._far_rows.copy_(self._near_rows, non_blocking=True)

    def _put_copies(self, arranged: Arranged) -> None:
        arrays, of_spans = self._arrays, arranged.copies[arranged.span_places]
        _put(arrays["decode_copies"], arranged.copies[arranged.decode_places], 0)
        _put(arrays["chunk_copies"], arranged.copies[arranged.chunk_places], 0)
        _put(arrays["span_copies"], of_spans, 0)
        _put(arrays["copy_spans"], np.where(of_spans[:, None] != 0, arranged.spans, 0).reshape(-1), 0)

    def _put_pages(self, arranged: Arranged, pages: Addresses) -> None:
        for name, places in (
            ("decode_pages", arranged.decode_places), ("chunk_pages", arranged.chunk_places),
            ("span_pages", arranged.span_places), ("sink_pages", arranged.sinks.places),
            ("observed_pages", arranged.observed.places),
        ):  # fmt: skip
            _put(self._arrays[name], pages[places], 0)

    def _send(self) -> None:
        if self._far is not self._near:
            self._far.copy_(self._near, non_blocking=True)


def _put(target: np.ndarray, values: np.ndarray, rest: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = rest

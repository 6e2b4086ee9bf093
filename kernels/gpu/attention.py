"""The attention of a pass: decode rows, chunks, and the sinks of both, put together.

What a row sees of its sinks is one more part of its attention, with another query: that of the row turned back to where
it stands within what is kept. So its splits go into one merge with the others, and there is one softmax.
Of rows that are observed it is known afterwards how much of their attention each page gets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierd.kernels.gpu.batch import Observed
from tierd.kernels.gpu.decode import num_splits, plan_decode, plan_masses, split_launches
from tierd.kernels.gpu.extend import plan_extend
from tierd.kernels.gpu.inputs import Inputs
from tierd.kernels.gpu.launch import Plan
from tierd.kernels.gpu.merge import Merged, plan_merge
from tierd.kernels.gpu.pages import turning
from tierd.kernels.gpu.write import plan_write
from tierd.kernels.layout import PageLayout


class Turned(NamedTuple):
    """What attention takes of the rows of a pass, normed and rotated."""

    queries: Tensor  # [rows, heads, head_dim]
    keys: Tensor  # [rows, kv_heads, head_dim]
    values: Tensor  # the same
    sink_queries: Tensor | None  # [rows, heads, head_dim]; None where nobody sees sinks


def write(layer: int, keys: Tensor, values: Tensor, inputs: Inputs, layout: PageLayout) -> None:
    """Launches it: keys and values of the rows to their pages, and to the exact copies of those that have one."""
    plan_write(keys, values, inputs.spans(layout), layer).run()
    if (copies := inputs.copy_spans()) is not None:
        turned, turn = turning(keys, layout)
        Plan(None, (), (*turn, *plan_write(turned, values, copies, layer).launches)).run()


def attend(
    layer: int, turned: Turned, inputs: Inputs, layout: PageLayout, window: int, logits: Tensor | None = None
) -> Tensor:
    """Launches it: [rows, heads, head_dim]. Keys and values of the rows are in their pages. `window`: the layer's;
    `logits` fp32 [heads]: its sink logits, of which a model has learned one a head."""
    rows, decoding = len(turned.queries), inputs.sizes.decode_rows
    parts = []
    if decoding:
        parts.append(_decode(layer, turned, inputs, layout, window, logits))
    if inputs.sizes.chunks:
        parts.append(_extend(layer, turned, inputs, layout, window, logits, slice(decoding, rows)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(
    layer: int, turned: Turned, inputs: Inputs, layout: PageLayout, window: int, logits: Tensor | None
) -> Tensor:
    sizes = inputs.sizes
    rows = slice(0, sizes.decode_rows)
    queries, table, windows = turned.queries[rows], inputs.decode_table(layout), inputs.windows[rows]
    if turned.sink_queries is None:
        return plan_decode(queries, table, layer, window=window, windows=windows, sinks=logits).run().out
    own = num_splits(table.max_pages)
    parts = _room(own + num_splits(sizes.max_sink_pages), queries)
    launches = split_launches(
        queries, table, layer, Merged(parts.out[:own], parts.lse[:own]), window=window, windows=windows
    )
    Plan(None, (), launches).run()
    return _with_sinks(layer, turned.sink_queries, inputs, layout, window, logits, rows, parts, own)


def _extend(
    layer: int, turned: Turned, inputs: Inputs, layout: PageLayout, window: int, logits: Tensor | None, rows: slice
) -> Tensor:
    queries, sizes = turned.queries[rows], inputs.sizes
    parts = None if turned.sink_queries is None else _room(1 + num_splits(sizes.max_sink_pages), queries)
    plan = plan_extend(
        queries, turned.keys[rows], turned.values[rows], inputs.chunk_rows, sizes.max_chunk_rows,
        inputs.chunk_table(layout), layer, window=window,
        windows=inputs.windows[rows] if sizes.bounded_chunks else None,
        sinks=logits if parts is None else None,  # they come in once: where parts are merged
        into=None if parts is None else Merged(parts.out[0], parts.lse[0]),
    )  # fmt: skip
    found = plan.run().out
    if turned.sink_queries is None or parts is None:
        return found
    return _with_sinks(layer, turned.sink_queries, inputs, layout, window, logits, rows, parts, 1)


def _with_sinks(
    layer: int, sink_queries: Tensor, inputs: Inputs, layout: PageLayout, window: int, logits: Tensor | None,
    rows: slice, parts: Merged, own: int,
) -> Tensor:  # fmt: skip
    """Fills the parts behind the `own` ones, and merges all. The layer's window counts from where a row stands in the
    text."""
    queries, table = sink_queries[rows], inputs.sink_table(layout, rows)
    launches = split_launches(
        queries, table, layer, Merged(parts.out[own:], parts.lse[own:]), window=window,
        positions=inputs.positions[rows],
    )  # fmt: skip
    Plan(None, (), launches).run()
    return plan_merge(parts.out, parts.lse, logits, queries.dtype).run().out


def _room(splits: int, queries: Tensor) -> Merged:
    shape = (splits, *queries.shape)
    out = torch.empty(shape, dtype=torch.float32, device=queries.device)
    return Merged(out, torch.empty(shape[:3], dtype=torch.float32, device=queries.device))


def observe(
    layer: int, queries: Tensor, inputs: Inputs, layout: PageLayout, logits: Tensor | None = None
) -> None:
    """Adds to `inputs.masses` how much of its attention each observed row gives to its pages in a layer without a
    window: the mean over the heads of a group. Their scores are computed once more: nobody else is slowed down by it.

    What a row finds depends on its query, its position and its pages alone. Source of the idea: H2O (Zhang et al. 2023,
    arXiv 2306.14048). As `kernels.cpu.masses`.
    """
    watched = torch.index_select(queries, 0, inputs.observed_rows)
    inputs.masses.add_(plan_masses(watched, inputs.observed_table(layout), layer, logits).run())


def masses_of(masses: Tensor, observed: Observed, group: int) -> NDArray[np.float64]:
    """[observed, pages], sums over heads; 0 for pages that a row does not see. `masses` as a pass added them up for
    groups of so many heads."""
    per_page = masses[: int(observed.offsets[-1])].cpu().numpy().astype(np.float64).sum(1) * group
    found = np.zeros((len(observed.rows), observed.max_pages))
    for row, mine in enumerate(np.split(per_page, observed.offsets[1:-1])):
        found[row, : len(mine)] = mine
    return found

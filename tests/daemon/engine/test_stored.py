"""A daemon that keeps its pages packed more on the disk than in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.daemon.engine.families import prepare, reference
from tests.daemon.engine.live import Live
from tierd.daemon.errors import BadConfig
from tierd.kernels.cpu.quant import PageCodec
from tierd.kernels.layout import PageLayout

PROMPT = [place % 150 + 20 for place in range(90)]
ASK = {"tokens": PROMPT, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(reference("llama"), tmp_path_factory.mktemp("model") / "tiny")


def restored(model: Path, cache: Path, **sizes: int) -> list[int]:
    """The answer over pages that come from the disk."""
    with Live(model, cache, nvme=64, store_format="k8v8", **sizes) as live:
        ((tokens, end),) = live.run([ASK])
        assert end.ev == "done" and end.data["timings"].hit_nvme >= len(PROMPT) - 16
        live.flush()
        assert live.engine.pager.check() == []
    return tokens


def test_what_comes_back_is_what_the_codec_makes_of_it(model: Path, tmp_path: Path) -> None:
    with Live(model, tmp_path, device=16, nvme=64, store_format="k8v8") as live:
        ((cold, _),) = live.run([ASK])
        live.flush()
        pager = live.engine.pager
        layout = PageLayout(2, 2, 16)
        stored = PageLayout(2, 2, 16, "k8v8")
        codec = PageCodec(layout, stored)
        nodes = [node for node in pager.index.nodes.values() if node.durable and node.device >= 0]
        store = pager.store
        assert store is not None and nodes
        found, wanted = np.zeros(layout.record_bytes, np.uint8), np.zeros(layout.record_bytes, np.uint8)
        middle = np.zeros(stored.record_bytes, np.uint8)
        for node in nodes:
            codec.encode(pager.device.array[node.device], middle)
            codec.decode(middle, wanted, layout.num_layers)
            store.read_into(node.key, found)
            assert (found[: layout.payload_bytes] == wanted[: layout.payload_bytes]).all()
        nvme = live.engine.board.figures()["tiers"]["nvme"]
        assert nvme["page_bytes"] == stored.record_bytes < layout.record_bytes
        writes = live.engine.board.figures()["writes"]
        assert writes["written_bytes"] == len(nodes) * stored.record_bytes
    whole = restored(model, tmp_path, device=16)
    assert len(whole) == len(cold)
    # Loaded whole or read layer by layer in every step: the same numbers.
    assert restored(model, tmp_path, device=2, host=0) == whole


def test_its_pages_are_no_others(model: Path, tmp_path: Path) -> None:
    names = []
    for store_format in ("same", "fp16", "k8v8"):
        with Live(model, tmp_path, device=16, nvme=8, store_format=store_format) as live:
            names.append(live.engine.namespace)
    with Live(model, tmp_path, device=16, nvme=8) as live:
        names.append(live.engine.namespace)
    assert len(set(names)) == 3 and names[3] == names[0]


def test_a_format_that_saves_nothing_is_refused(model: Path, tmp_path: Path) -> None:
    live = Live(model, tmp_path, kv_format="k8v8", store_format="k4v4")  # small heads: both fill one block of the disk
    with pytest.raises(BadConfig, match="storing it so saves nothing") as caught:
        live.__enter__()
    assert "same" in str(caught.value.hint)

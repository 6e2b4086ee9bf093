"""Figures below an answer: what the daemon said, and nothing else."""

from __future__ import annotations

from tierd.tui.widgets.chat import figures


def test_what_was_not_said_is_not_shown() -> None:
    assert figures({}) == ""
    assert figures({"timings": {"ttft_ms": 12.0}}) == "first token after 12 ms"


def test_where_the_prompt_came_from() -> None:
    timings = {"hit_device": 16, "hit_host": 0, "hit_nvme": 160, "recomputed": 4}
    assert figures({"timings": timings}) == "from 16 device, 160 disk · 4 computed"

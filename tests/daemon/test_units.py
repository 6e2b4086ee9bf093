"""Figures as words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tierd.daemon.units import counted, human_bytes, human_seconds

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (123456, "123 kB"), (9.8e7, "98.0 MB"),
     (5e12, "5.0 TB"), (999.9e6, "1.0 GB"), (99.97e6, "100 MB"), (-2e6, "-2.0 MB")],
)  # fmt: skip
def test_human_bytes(count: float | None, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.2, "0s"), (119, "119s"), (890, "15m"), (7200, "2h"), (200_000, "2d")]
)
def test_human_seconds(seconds: float | None, text: str) -> None:
    assert human_seconds(seconds) == text


def test_counted() -> None:
    assert [counted(n, "page") for n in (0, 1, 2, 2530)] == ["0 pages", "1 page", "2 pages", "2,530 pages"]
    assert counted(2, "prefix", "prefixes") == "2 prefixes"


def test_nothing_for_people_formats_sizes_by_itself() -> None:
    """Sizes that verbs and the doctor print come from `human_bytes`: `1e9:.1f} GB` would disagree with it."""
    own = re.compile(r"[fg]\} [kMG]i?B|>> 30\}")
    rooms = [*(REPOSITORY / "daemon").glob("cli*.py"), REPOSITORY / "daemon" / "doctor.py"]
    found = [
        f"{path.name}:{node.lineno}"
        for path in rooms
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr) and own.search(ast.unparse(node))
    ]
    assert found == []

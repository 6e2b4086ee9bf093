"""What the documents say is held against what is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "tiers", "daemon", "clients", "tui")


def test_version_is_the_changelog_head() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    heads = re.findall(r"^## \[?([0-9][^\] ]*)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == version


def test_every_module_is_listed_once() -> None:
    modules = (REPOSITORY / "docs" / "modules.md").read_text()
    listed = re.findall(r"^- `((?:kernels|tiers|daemon|clients|tui)/[a-z0-9_/]+\.py)`", modules, re.MULTILINE)
    there = [
        str(path.relative_to(REPOSITORY))
        for room in ROOMS
        for path in sorted((REPOSITORY / room).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    assert sorted(listed) == sorted(there)


def test_packages_are_all_declared() -> None:
    declared = set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {
        ".".join(("tierd", *path.parent.relative_to(REPOSITORY).parts))
        for room in ROOMS
        for path in (REPOSITORY / room).rglob("__init__.py")
    }
    assert there | {"tierd"} == declared

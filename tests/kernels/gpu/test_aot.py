"""Kernels compile without a card for every architecture, within its shared memory, and the hot ones without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("aot.py")
# What one program may have (CUDA C programming guide, technical specifications for each compute capability).
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
NO_SPILLS = {"decode_kernel", "merge_kernel", "matmul_kernel", "add_parts_kernel"}
MIXTURE = {"group_kernel", "grouped_kernel", "activate_kernel", "combine_kernel"}
DECODING = (" x1", " x64")  # how cases end whose kernels don't spill either


def compiled(arch: int, *options: str) -> list[dict[str, Any]]:
    """In a process of its own: in this one Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, str(SCRIPT), "--arch", str(arch), "--json", *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def check(kernels: list[dict[str, Any]], arch: int) -> None:
    assert [k for k in kernels if k["shared_bytes"] > SHARED_BYTES[arch]] == []
    must_not = [k for k in kernels if k["kernel"] in NO_SPILLS or k["case"].endswith(DECODING)]
    assert [k for k in must_not if k["spill_bytes"]] == []
    wide = [k for k in kernels if k["case"].endswith((*DECODING, "-8b decode", "decode fp8 copies"))]
    assert [k for k in wide if k["narrow_loads"]] == []


def test_decode_and_products_compile_for_one_card() -> None:
    cases = "^decode( fp8 copies)?$|int4.* qkv x1$|^int4-g32 x1$"
    kernels = compiled(86, "--kernels", "attention,matmul,moe", "--case", cases)
    assert {k["kernel"] for k in kernels} == NO_SPILLS | MIXTURE
    check(kernels, 86)


@pytest.mark.long
@pytest.mark.parametrize("arch", [86, 120])  # `aot.py` without `--arch` does the others, too
def test_all_kernels_compile(arch: int) -> None:
    kernels = compiled(arch)
    assert {k["kernel"] for k in kernels} >= NO_SPILLS | MIXTURE
    check(kernels, arch)

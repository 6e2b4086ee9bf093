"""Each known advisory about servers of this kind, and the test that shows that it is none of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

SHOWN = {
    # code from data
    "tests/test_layers.py::test_no_code_from_data": (
        "CVE-2025-24357 CVE-2025-32434 CVE-2026-24747 CVE-2026-27893 CVE-2026-22807"
    ),
    "tests/daemon/models/test_safetensors_file.py::test_a_pickle_by_another_name_is_refused_and_not_run": (
        "CVE-2025-24357 CVE-2025-32434 CVE-2026-24747"
    ),
    "tests/daemon/models/test_hf_source.py::test_what_is_refused": "CVE-2025-66448 CVE-2026-22807",
    "tests/daemon/test_frame_fuzz.py::test_each_kind_of_frame": (
        "CVE-2025-29783 CVE-2025-32444 CVE-2025-30165 CVE-2025-66455 CVE-2025-59953 CVE-2026-114613"
    ),
    "tests/daemon/test_advisories.py::test_no_assertion_guards_what_comes_from_outside": "CVE-2026-41523",
    "tests/daemon/engine/test_chat.py::test_the_sandbox_holds": (
        "CVE-2024-34359 PYSEC-2026-387 CVE-2024-56326 CVE-2025-27516"
    ),
    "tests/daemon/hostile.py::templates": "CVE-2024-34359 PYSEC-2026-2013 GHSA-69j4-grxj-j64p",
    "tests/daemon/engine/test_chat.py::test_an_endless_template_ends": "CVE-2026-115911",
    # keys of the cache
    "tests/tiers/test_keys.py::test_keys_are_the_same_in_every_process": "CVE-2025-25183 CVE-2026-10813",
    "tests/tiers/test_prefix.py::test_a_collision_of_keys_is_a_miss": "CVE-2025-25183 CVE-2026-10813",
    "tests/tiers/test_keys.py::test_roots_and_salts_differ": "CVE-2025-46722",
    "tests/daemon/engine/test_tenant_timing.py::"
    "test_a_prefix_of_another_tenant_takes_as_long_as_one_nobody_had": "CVE-2025-46570",
    "tests/daemon/hostile.py::salts": (
        "CVE-2026-105756 CVE-2026-105754 CVE-2025-62164 CVE-2026-56340 CVE-2026-73557"
    ),
    "tests/daemon/hostile.py::headers": (
        "PYSEC-2026-4198 CVE-2026-116176 CVE-2025-69223 CVE-2026-22815 CVE-2026-34517"
    ),
    # exhaustion
    "tests/daemon/hostile.py::counts": (
        "CVE-2026-34756 PYSEC-2026-4350 PYSEC-2026-4353 CVE-2026-105922 CVE-2026-105775"
    ),
    "tests/daemon/api/test_openai_routes.py::test_nothing_is_made_for_answers_that_are_too_many": "CVE-2026-34756",
    "tests/daemon/hostile.py::patterns": (
        "CVE-2025-48944 CVE-2025-48942 CVE-2025-48943 CVE-2025-48887 CVE-2025-57809 CVE-2026-25048 CVE-2026-134540"
    ),
    "tests/daemon/engine/test_guide_check.py::test_one_that_takes_too_long_is_given_up": (
        "CVE-2025-57809 CVE-2026-25048 CVE-2026-134540"
    ),
    "tests/daemon/engine/test_guide.py::test_grammars_that_are_kept_are_bounded": "CVE-2025-32381 CVE-2025-29770",
    "tests/daemon/api/test_gate.py::test_every_route_that_generates_runs_in_the_name_of_its_key": "CVE-2026-115918",
    "tests/daemon/test_crowds.py::test_200_slow_readers_cost_others_nothing": "CVE-2025-30202",
    "tests/daemon/hostile.py::smuggling": "CVE-2026-34525 CVE-2026-69243",
    "tests/daemon/hostile.py::chunks": "PYSEC-2026-2111",
    # files
    "tests/tiers/test_store_damage.py::test_every_byte_of_a_slot": "CVE-2026-43629",
    "tests/daemon/models/test_gguf_file.py::test_fuzz": (
        "CVE-2024-21802 CVE-2024-23605 CVE-2025-53630 CVE-2026-27940 CVE-2026-33298 CVE-2026-7482 CVE-2025-66960"
        " GO-2025-3558 GO-2025-3559 GO-2025-3689 GO-2025-3582"
    ),
    # network, names, errors
    "tests/daemon/api/test_web.py::test_with_a_key_every_route_but_two_needs_it": "CVE-2025-63389 GO-2025-4251",
    "tests/daemon/test_config.py::test_beyond_loopback_needs_a_key": "GHSA-7mpg-jvqj-ccxr",
    "tests/daemon/api/test_web.py::test_strange_hosts_and_origins_are_refused": "CVE-2024-28224",
    "tests/daemon/test_keys.py::test_keys_are_compared_in_constant_time": "CVE-2025-59425",
    "tests/daemon/hostile.py::names": "CVE-2024-37032 CVE-2026-103663 CVE-2024-45436 CVE-2024-39719",
    "tests/daemon/hostile.py::urls": (
        "CVE-2025-6242 CVE-2026-24779 CVE-2026-25960 CVE-2026-34753 CVE-2026-33626 CVE-2026-45401"
    ),
    "tests/daemon/api/test_hostile.py::judge": "CVE-2026-22778 CVE-2026-54236",
}
# No surface of the kind: no RPC between machines, no downloads of our own (pip and huggingface_hub fetch).
NOT_HERE = (
    "CVE-2026-21869 CVE-2024-42478 CVE-2024-42479 CVE-2026-34159 CVE-2026-118375 CVE-2026-137567"
    " GO-2025-3548 GO-2025-3557 GO-2025-3824"
)
# What reads requests, frames, files of others and keys.
READERS = (
    "daemon/api/*.py", "daemon/models/*.py", "daemon/door.py", "daemon/server.py", "daemon/keys.py",
    "daemon/tenants.py", "daemon/limits.py", "daemon/protocol.py", "daemon/generation.py", "daemon/config*.py",
)  # fmt: skip


@pytest.mark.parametrize("place", SHOWN)
def test_what_is_named_is_there(place: str) -> None:
    path, _, name = place.partition("::")
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_no_advisory_is_both_shown_and_out_of_place() -> None:
    shown = {one for ids in SHOWN.values() for one in ids.split()}
    assert not shown & set(NOT_HERE.split())


def _narrows(node: ast.Assert) -> bool:
    """Whether it only tells the type checker that something is there."""
    return isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.IsNot)


def test_no_assertion_guards_what_comes_from_outside() -> None:
    paths = [path for pattern in READERS for path in sorted(REPOSITORY.glob(pattern))]
    assert len(paths) > 50
    found = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and not _narrows(node)
    ]
    assert found == []  # under `python -O` they are gone

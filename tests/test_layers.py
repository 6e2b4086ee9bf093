"""House rules that a program can check: which way imports point, what the light rooms may load, how big rooms get."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "tiers", "daemon", "clients", "tui")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_MEDIAN_LINES = 170
HEAVY = {"torch", "transformers", "triton"}
# The engine's doors to the kernels of the card.
CARD = (
    "tierd.daemon.engine.backend_cuda", "tierd.daemon.engine.model.cached_experts",
    "tierd.daemon.engine.model.card_experts", "tierd.daemon.engine.model.card_memory",
    "tierd.daemon.engine.model.card_records", "tierd.daemon.engine.model.passing",
    "tierd.daemon.engine.model.weights_card",
)  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))]


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(("tierd", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, lazily or not."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            yield base
            for alias in node.names:
                yield f"{base}.{alias.name}"


_BASE = frozenset({
    "aside", "card_memory", "protocol", "generation", "errors", "config", "settled", "config_file", "config_values",
    "cuda_order", "engine_config", "kv_mode", "machine", "paths", "log", "units",
})  # fmt: skip


def room_of(module: str) -> str:
    """The room a module belongs to; the front, the engine and the models of the daemon are rooms of their own."""
    parts = module.split(".")
    if parts[0] != "tierd" or len(parts) < 2:
        return ""
    if parts[1] == "daemon":
        if len(parts) > 2 and parts[2] in ("engine", "models", "plan"):
            return f"daemon.{parts[2]}"
        if len(parts) > 2 and parts[2] in _BASE:
            return "daemon.base"
        return "daemon"
    return parts[1]


# What each room may import of the others.
ARROWS = {
    "kernels": {"kernels"},
    "tiers": {"tiers", "kernels"},
    "daemon.base": {"daemon.base"},
    "daemon.models": {"daemon.models", "daemon.base", "kernels"},
    "daemon.plan": {"daemon.plan", "daemon.models", "daemon.base", "kernels"},
    "daemon.engine": {"daemon.engine", "daemon.plan", "daemon.models", "daemon.base", "tiers", "kernels"},
    "daemon": {"daemon", "daemon.base", "daemon.models", "daemon.plan", "clients"},
    "clients": {"clients", "daemon.base"},
    "tui": {"tui", "clients", "daemon.base"},
}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_arrows_point_down(path: Path) -> None:
    room = room_of(module_name(path))
    for imported in imports(path):
        target = room_of(imported)
        if target:
            assert target in ARROWS[room], f"{module_name(path)} ({room}) imports {imported} ({target})"


def test_torch_lives_in_the_reference_and_the_gpu_kernels_alone() -> None:
    # The CPU backend runs without torch; its slow twin is the oracle of the tests.
    users = {module_name(path) for path in sources() if HEAVY & {name.split(".")[0] for name in imports(path)}}
    homes = ("tierd.kernels.reference", "tierd.kernels.gpu", *CARD)
    assert {user for user in users if not user.startswith(homes)} == set()


def test_the_gpu_kernels_are_imported_by_one_another_alone() -> None:
    users = {module_name(path) for path in sources() if any("kernels.gpu" in name for name in imports(path))}
    assert {user for user in users if not user.startswith(("tierd.kernels.gpu", *CARD))} == set()


def test_the_card_is_imported_where_it_was_found() -> None:
    # Not with the module: an engine on the CPU must not pay for torch.
    code = "import sys, tierd.daemon.engine.assemble; print(*[m for m in ('torch', 'triton') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == []


LIGHT = [
    "daemon.protocol", "clients", "clients.aio", "clients.blocking", "daemon.cli", "daemon.lifecycle", "tui.cli",
    "tui.feed", "daemon.cli_batch", "daemon.batch_run",  # a batch knows the dialects, and no server
]  # fmt: skip


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    heavy = ["torch", "numpy", "numba", "transformers", "aiohttp", "textual"]
    code = f"import sys, tierd.{module}; print(*[m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == []


def test_files_and_functions_are_small() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources()}
    assert {str(path): lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}
    assert statistics.median(lines for lines in lengths.values() if lines > 5) <= MAX_MEDIAN_LINES
    long_functions = {
        f"{path.relative_to(REPOSITORY)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert long_functions == {}


def test_no_module_is_named_like_the_standard_library() -> None:
    clashes = {path.stem for path in sources() if path.stem in sys.stdlib_module_names}
    # Inside packages these cannot be imported by accident, but they confuse readers.
    assert clashes <= {"__init__", "__main__"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_code_from_data(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"{path}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.keyword):
            assert node.arg != "trust_remote_code" or getattr(node.value, "value", True) is False
    assert not FORBIDDEN_MODULES & {name.split(".")[0] for name in imports(path)}


def test_queues_have_bounds() -> None:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in ("Queue", "LifoQueue", "PriorityQueue"):
                    assert node.args or node.keywords, f"{path}:{node.lineno}: a queue without a bound"


def test_threads_start_only_where_somebody_hears_them_die() -> None:
    owners = {
        "tierd.kernels.cpu.team", "tierd.tiers.mover", "tierd.tiers.cuda_memory", "tierd.daemon.engine.guide",
        "tierd.daemon.engine.step", "tierd.daemon.engine.worker", "tierd.daemon.aside",
    }  # fmt: skip
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in ("Thread", "ThreadPoolExecutor"):
                    assert module_name(path) in owners, f"{path}:{node.lineno} starts a thread"

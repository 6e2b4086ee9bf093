"""Compiles the kernels ahead of time, for cards that are not there, in the configurations of real models.

    python tests/kernels/gpu/aot.py [--arch 86] [--kernels attention,matmul] [--case x1$] [--json]

Plans are made of tensors on torch's `meta` device, so what is compiled is what the wrappers would launch. Registers and
spills are what ptxas says, shared memory what Triton asks for, and loads of one or two bytes are counted in the PTX.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

# Triton reads these when it is imported or compiles: no interpreter, a fresh cache (a cached kernel has no ptxas log).
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tierd.kernels import card_bytes
from tierd.kernels.cpu.weights import ExpertsShape
from tierd.kernels.gpu.decode import plan_decode, plan_masses
from tierd.kernels.gpu.embed import plan_embed
from tierd.kernels.gpu.expand import plan_expand
from tierd.kernels.gpu.experts import COLUMNS, Kind
from tierd.kernels.gpu.extend import plan_extend
from tierd.kernels.gpu.fused import plan_add_norm, plan_rotate, plan_swiglu
from tierd.kernels.gpu.gather import plan_gather, plan_scatter
from tierd.kernels.gpu.launch import Launch, Plan
from tierd.kernels.gpu.matmul import plan_matmul
from tierd.kernels.gpu.merge import plan_merge
from tierd.kernels.gpu.moe import experts_plan
from tierd.kernels.gpu.packing import GpuMatrix
from tierd.kernels.gpu.pages import PAGE_DTYPES, Copies, PageTable
from tierd.kernels.gpu.quant import reading
from tierd.kernels.gpu.routing import plan_route
from tierd.kernels.gpu.sample import plan_sample
from tierd.kernels.gpu.selection import plan_bounds, plan_select
from tierd.kernels.gpu.shift import plan_shift
from tierd.kernels.gpu.write import Spans, plan_write
from tierd.kernels.layout import PageLayout
from tierd.kernels.packing import WeightFormat, packed_bytes

PACKED = ("fp8", "k8v8", "k4v8", "k4v4")  # what is compiled of page formats; k8v4 has parts of two of them
ARCHITECTURES = (80, 86, 89, 90, 120)
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """The numbers of a model that decide how its kernels are compiled."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    qk_norm: bool = False
    experts: ExpertsShape | None = None


LLAMA3_8B = Model("llama3-8b", 32, 4096, 14336, 128256)
QWEN3_8B = Model("qwen3-8b", 36, 4096, 12288, 151936, qk_norm=True)
MIXTURES = [
    Model("mixtral-8x7b", 32, 4096, 14336, 32000, experts=ExpertsShape(8, 2, 14336, True, (0,))),
    Model("qwen3-30b-a3b", 48, 2048, 6144, 151936, 32, 4, experts=ExpertsShape(128, 8, 768, True, (0,))),
    Model(
        "gpt-oss-20b", 24, 2880, 2880, 201088, 64, 8, 64,
        experts=ExpertsShape(32, 4, 2880, True, (0,), bias=True, limit=7.0, slope=1.702),
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel."""

    case: str
    kernel: str
    arch: int
    warps: int
    stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    narrow_loads: int  # instructions that load one or two bytes from memory of the card


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def table(model: Model, batch: int, pages: int, format: str = "bf16") -> PageTable:
    layout = PageLayout(model.layers, model.kv_heads, model.head_dim, format)
    return PageTable(
        layout, meta(batch * pages, dtype=torch.int64), meta(batch + 1, dtype=torch.int32),
        meta(batch, dtype=torch.int32), pages, meta(64, dtype=PAGE_DTYPES.get(format, torch.uint8)),
    )  # fmt: skip


def with_copies(pages: PageTable) -> PageTable:
    """Some of the pages have exact copies beside them."""
    layout = replace(pages.layout, format="bf16")
    return replace(pages, copies=Copies(layout, meta(len(pages.pages), dtype=torch.int64), meta(64)))


def attention_cases(model: Model) -> Iterator[tuple[str, Plan[Any]]]:
    qkv = meta(8, model.heads + 2 * model.kv_heads, model.head_dim)
    queries = qkv[:, : model.heads]
    windows = meta(8, dtype=torch.int32)  # as a decoder gives them, whether rows have bounds or not
    yield "masses", plan_masses(queries, table(model, 8, 512), model.layers - 1)
    for format in PACKED:
        yield f"masses {format}", plan_masses(queries, table(model, 8, 512, format), model.layers - 1)
    for name, options in (("decode", {}), ("decode mass window", {"want_mass": True, "window": 4096})):
        yield name, plan_decode(queries, table(model, 8, 512), model.layers - 1, windows=windows, **options)
    for format in PACKED:
        yield f"decode {format}", plan_decode(queries, table(model, 8, 512, format), model.layers - 1, windows=windows)
    for format in ("fp8", "k8v8", "k4v4"):
        pages = with_copies(table(model, 8, 512, format))
        yield f"decode {format} copies", plan_decode(queries, pages, model.layers - 1, windows=windows)
    outs, lses = meta(2, 8, model.heads, model.head_dim), meta(2, 8, model.heads, dtype=torch.float32)
    yield "merge", plan_merge(outs, lses)


def cache_cases(model: Model) -> Iterator[tuple[str, Plan[Any]]]:
    """Chunks of 2,048 rows of two sequences; writing them."""
    qkv = meta(4096, model.heads + 2 * model.kv_heads, model.head_dim)
    queries, keys, values = qkv.split([model.heads, model.kv_heads, model.kv_heads], 1)
    offsets = meta(3, dtype=torch.int32)
    for name, window in (("extend", 0), ("extend window", 4096)):
        pages = table(model, 2, 512)
        yield name, plan_extend(queries, keys, values, offsets, 2048, pages, 1, window=window)
    windows = meta(4096, dtype=torch.int32)
    yield "extend bounds", plan_extend(queries, keys, values, offsets, 2048, pages, 1, windows=windows)
    spans = Spans(pages.layout, meta(256, dtype=torch.int64), meta(256, 3, dtype=torch.int32), pages.base)
    yield "write", plan_write(keys, values, spans, 1)
    for format in PACKED:
        pages = table(model, 2, 512, format)
        yield f"extend {format}", plan_extend(queries, keys, values, offsets, 2048, pages, 1)
        spans = Spans(pages.layout, meta(256, dtype=torch.int64), meta(256, 3, dtype=torch.int32), pages.base)
        yield f"write {format}", plan_write(keys, values, spans, 1)
    for format in ("k8v8", "k4v4"):
        pages = with_copies(table(model, 2, 512, format))
        yield f"extend {format} copies", plan_extend(queries, keys, values, offsets, 2048, pages, 1)


def matrix(format: WeightFormat, rows: int, cols: int) -> GpuMatrix:
    panels, pairs, bits4 = -(-rows // 32), -(-cols // 64), format is WeightFormat.INT4_G32
    return GpuMatrix(
        format, rows, cols, meta(panels, pairs, 32 if bits4 else 64, 32, dtype=torch.uint8),
        meta(*((panels, pairs, 2, 32) if bits4 else (panels, pairs, 32)), dtype=torch.int32),
    )  # fmt: skip


def matmul_cases(model: Model) -> Iterator[tuple[str, Plan[Any]]]:
    """The four products of a layer for one row, one of them for 32, 64 and 2,048, and the head."""
    attended = model.heads * model.head_dim
    shapes = {
        "qkv": (attended + 2 * model.kv_heads * model.head_dim, model.hidden), "o": (model.hidden, attended),
        "gate_up": (2 * model.intermediate, model.hidden), "down": (model.hidden, model.intermediate),
    }  # fmt: skip
    for format in (WeightFormat.INT4_G32, WeightFormat.INT8_G32):
        for rows in (1, 32, 64, 2048):
            for name in shapes if rows == 1 else ["qkv"]:
                outputs, cols = shapes[name]
                yield f"{format} {name} x{rows}", plan_matmul(meta(rows, cols), matrix(format, outputs, cols))
    head = matrix(WeightFormat.INT8_G32, model.vocab, model.hidden)
    tokens = meta(8, dtype=torch.int32)
    yield "embed int4-g32", plan_embed(tokens, matrix(WeightFormat.INT4_G32, model.vocab, model.hidden), torch.bfloat16)
    yield "int8-g32 head x1", plan_matmul(meta(1, model.hidden), head, out_dtype=torch.float32)


def fused_cases(model: Model) -> Iterator[tuple[str, Plan[Any]]]:
    x, weight = meta(8, model.hidden), meta(model.hidden)
    yield "add_norm", plan_add_norm(x, weight, 1e-6, x)
    qkv = meta(8, model.heads + 2 * model.kv_heads, model.head_dim)
    angles, positions = meta(8192, model.head_dim // 2, dtype=torch.float32), meta(8, dtype=torch.int32)
    weights = (meta(model.head_dim), meta(model.head_dim)) if model.qk_norm else None
    yield "rotate", plan_rotate(qkv, model.heads, model.kv_heads, angles, angles, positions, weights, 1e-6)
    yield "swiglu", plan_swiglu(meta(8, 2 * model.intermediate))


def other_cases(model: Model) -> Iterator[tuple[str, Plan[Any]]]:
    record_bytes = model.layers * 2 * model.kv_heads * 16 * model.head_dim * 2
    records, addresses = meta(64, record_bytes, dtype=torch.uint8), meta(64, dtype=torch.int64)
    yield "gather", plan_gather(addresses, records, record_bytes)
    yield "scatter", plan_scatter(records, addresses, record_bytes)
    layout, angles = table(model, 1, 1).layout, meta(64, model.head_dim // 2, dtype=torch.float32)
    yield "shift", plan_shift(addresses, meta(64), layout, 1, angles, angles)
    floats, logits = meta(8, dtype=torch.float32), meta(8, model.vocab, dtype=torch.float32)
    yield "sample", plan_sample(logits, floats, meta(8, dtype=torch.int32), floats, floats, floats)


def select_cases(model: Model) -> Iterator[tuple[str, Plan[Any]]]:
    """Pages read for repacking, their bounds, and the choice among 512 of each of 8 sequences."""
    addresses = meta(64, dtype=torch.int64)
    for format in ("bf16", "k8v8"):
        pages = table(model, 8, 512, format)
        yield f"read {format}", reading(addresses, pages.base, pages.layout, 1)
    for format in ("bf16", "k4v4"):
        pages = table(model, 8, 512, format)
        yield f"bounds {format}", plan_bounds(addresses, pages.base, pages.layout, 1)
    low = meta(4096, model.kv_heads, model.head_dim, dtype=torch.float32)
    queries = meta(8, model.heads, model.head_dim)
    yield "select", plan_select(queries, low, low, meta(9, dtype=torch.int32), 512, 64)


def expand_cases(model: Model) -> Iterator[tuple[str, Plan[Any]]]:
    """The largest matrix of a streamed layer, in every format."""
    rows, cols = 2 * model.intermediate, model.hidden
    for format in WeightFormat:
        source = meta(packed_bytes(format, rows, cols), dtype=torch.uint8)
        dest = meta(card_bytes.matrix_bytes(format, rows, cols), dtype=torch.uint8)
        yield f"expand {format}", plan_expand(format, rows, cols, source, dest, torch.bfloat16)


def moe_cases(model: Model) -> Iterator[tuple[str, Plan[Any]]]:
    """A mixture for one row, 64 and 2,048; and attention, if it has sink logits."""
    shape, formats = model.experts, (WeightFormat.INT4_G32, WeightFormat.INT8_G32, None)
    assert shape is not None
    router = meta(shape.count, model.hidden, dtype=torch.float32)
    bias = meta(shape.count, dtype=torch.float32) if shape.bias else None
    for rows in (1, 64, 2048):
        x = meta(rows, model.hidden)
        routing = plan_route(x, router, bias, shape.used, shape.renormalized)
        yield f"route x{rows}", routing
        for format in formats:
            lines = meta(shape.count, COLUMNS, dtype=torch.int64)
            kinds = Kind(2 * shape.intermediate, model.hidden, format, x.dtype), Kind(
                model.hidden, shape.intermediate, format, x.dtype
            )
            name = "bf16" if format is None else format
            yield f"{name} x{rows}", experts_plan(x, routing.result, lines, kinds, shape)
    if model.head_dim == 64:
        sinks, windows = meta(model.heads, dtype=torch.float32), meta(8, dtype=torch.int32)
        queries, pages = meta(8, model.heads, model.head_dim), table(model, 8, 512)
        yield "decode sinks", plan_decode(queries, pages, 1, windows=windows, sinks=sinks)
        qkv = meta(4096, model.heads + 2 * model.kv_heads, model.head_dim)
        parts = qkv.split([model.heads, model.kv_heads, model.kv_heads], 1)
        pages = table(model, 2, 512)
        yield "extend sinks", plan_extend(*parts, meta(3, dtype=torch.int32), 2048, pages, 1, sinks=sinks)


# Kernels by the name that --kernels takes.
CASES: dict[str, Callable[[Model], Iterator[tuple[str, Plan[Any]]]]] = {
    "attention": attention_cases,
    "cache": cache_cases,
    "matmul": matmul_cases,
    "fused": fused_cases,
    "select": select_cases,
    "expand": expand_cases,
    "other": other_cases,
    "moe": moe_cases,
}


def source(launch: Launch) -> ASTSource:
    """What Triton's own specialization would make of the arguments: ones are constants, multiples of 16 are known."""
    signature, constants, attrs = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.args[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    unknown = set(launch.args) - {parameter.name for parameter in launch.kernel.params}
    if unknown:
        raise ValueError(f"{launch.kernel.__name__} has no parameters {sorted(unknown)}")
    return ASTSource(launch.kernel, signature, constants, attrs)


def compile_launch(case: str, launch: Launch, arch: int) -> Compiled:
    log = io.StringIO()
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source(launch), target=GPUTarget("cuda", arch, 32), options=options)
    text = log.getvalue()
    registers = re.search(r"Used (\d+) registers", text)
    if registers is None:
        raise RuntimeError(f"no ptxas log for {launch.kernel.__name__}: {text[:200]}")
    spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill", text))
    return Compiled(
        case, launch.kernel.__name__.strip("_"), arch, launch.num_warps, launch.num_stages, int(registers[1]), spills,
        compiled.metadata.shared, len(re.findall(r"ld\.global(?:\.\w+)*\.b(?:8|16)\b", compiled.asm["ptx"])),
    )  # fmt: skip


def compile_all(kernels: list[str], pattern: str, models: list[Model], arches: list[int]) -> Iterator[Compiled]:
    """Each distinct kernel once per architecture: models of one shape share them."""
    for arch in arches:
        seen = set()
        for model in models:
            for kernel in kernels:
                for name, plan in CASES[kernel](model) if (kernel == "moe") == (model in MIXTURES) else ():
                    launches = [launch for launch in plan.launches if isinstance(launch, Launch)]
                    for launch in launches if re.search(pattern, name) else ():
                        key = (source(launch).hash(), launch.num_warps, launch.num_stages)
                        if key not in seen:
                            seen.add(key)
                            yield compile_launch(f"{model.name} {name}", launch, arch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES)
    parser.add_argument("--kernels", default=",".join(CASES), help="some of " + ", ".join(CASES))
    parser.add_argument("--case", default="", help="only cases whose name matches this pattern")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        arches = options.arch or list(ARCHITECTURES)
        for compiled in compile_all(options.kernels.split(","), options.case, [LLAMA3_8B, QWEN3_8B, *MIXTURES], arches):
            if options.json:
                print(json.dumps(asdict(compiled)), flush=True)
            else:
                print(
                    f"| {compiled.case} | {compiled.kernel} | {compiled.arch} | {compiled.warps} x {compiled.stages} | "
                    f"{compiled.registers} | {compiled.spill_bytes} | {compiled.shared_bytes} | "
                    f"{compiled.narrow_loads} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

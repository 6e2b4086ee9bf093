"""The kernels run under Triton's interpreter here, on tensors of the CPU.

Whether a kernel is interpreted is decided when it is decorated, and for Triton's own library when Triton is imported.
So both are imported here, once, with the variable set, which is then taken back: no other test of this process, and no
daemon that one starts, sees it. In a run of the whole suite something has imported Triton for real before (transformers
does, through torch); then `test_apart.py` stands for this directory and runs it in a process of its own.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

# Gluon too: the interpreter loads it at its first launch.
KERNELS = ("decoder", "expand", "selection", "extend", "fused", "gather", "matmul", "quant", "sample", "shift", "write")
MODULES = ("triton.experimental.gluon", *(f"tierd.kernels.gpu.{name}" for name in KERNELS))
APART = "test_apart.py"

if "triton" in sys.modules:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != APART]
else:
    collect_ignore = [APART]
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in MODULES:
            importlib.import_module(name)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    from tests.kernels.gpu import bfloat16

    bfloat16.teach()

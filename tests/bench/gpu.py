"""`make gpu`: what the kernels and the CUDA backend do on the card at hand, within five minutes. A table, and JSON.

    python tests/bench/gpu.py [--json FILE] [--only PART,PART] [--cap 24] [--nvme DIRECTORY] [--dry]

Needs torch, triton, numpy and safetensors, and `tierd` on the path (a link to this repository will do). Without a card
it says so and ends with 2. `--dry` runs every part on tiny sizes in Triton's interpreter, without a card: figures then
mean nothing, it only shows that the script works.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    """Runs it. Exit code 1: a part failed; 2: no card."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if "--dry" in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is imported
    from tests.bench import gpu_suite

    return gpu_suite.main()


if __name__ == "__main__":
    sys.exit(main())

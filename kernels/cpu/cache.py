"""Where compiled kernels are kept: a directory named after the sources they were compiled from.

Numba stamps a cached function with the time and size of the file that defines it, and knows nothing of the files whose
functions it calls and has compiled into it. After an upgrade that changes simd.py alone it would go on running the old
code. So the directory's name says which sources its content belongs to. Imports no numba: NUMBA_CACHE_DIR must be
set before that.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def cache_directory(root: Path) -> Path:
    """The directory below `root` for the kernels of this version, to be set as NUMBA_CACHE_DIR. Not created."""
    digest = hashlib.blake2b(digest_size=8)
    beside = [_HERE.parent / f"{name}.py" for name in ("bits", "layout", "packing")]
    for source in [*sorted(_HERE.glob("*.py")), *beside]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return root / digest.hexdigest()

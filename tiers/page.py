"""Names of a page and of the places it can lie in."""

from __future__ import annotations

import enum
from typing import NewType

PageKey = NewType("PageKey", bytes)  # 16 bytes, blake2b-128: see keys.py


class Tier(enum.IntEnum):
    """Where a copy of a page lies, nearest to the computation first."""

    DEVICE = 0
    HOST = 1
    NVME = 2

"""How big the big counts are: with TIERD_ALL_COUNTS set, as many as were ever asked for; without it a fair share."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def counted(everything: T, share: T) -> T:
    """`everything` when all counts are wanted, else `share`."""
    return everything if os.environ.get("TIERD_ALL_COUNTS") else share

"""The version of the installed package."""

from __future__ import annotations

import functools


@functools.cache
def version() -> str:
    """As `1.2.3`. Read when first asked for: the metadata machinery costs 40 ms, which a start should not pay."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("tierd")
    except PackageNotFoundError:
        return "0+unknown"

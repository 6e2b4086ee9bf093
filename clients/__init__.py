"""Clients of the daemon's unix socket: `AsyncClient` for asyncio, `Client` for plain blocking code.

Both are loaded on first use, so that a blocking program does not pay for asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierd.clients.aio import AsyncClient
    from tierd.clients.blocking import Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> object:
    if name == "AsyncClient":
        from tierd.clients.aio import AsyncClient

        return AsyncClient
    if name == "Client":
        from tierd.clients.blocking import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

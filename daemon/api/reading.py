"""The body of a request, read within a deadline. Shared by every dialect; `bodies` says what is in it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from tierd.daemon.errors import BadRequest, TimedOut

BODY_TIMEOUT_S = 30.0


async def read(request: web.Request) -> bytes:
    """The whole body. Raises TimedOut, BadRequest for one that is cut."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise TimedOut(f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from None
    except web.RequestPayloadError:
        raise BadRequest("the body is broken") from None

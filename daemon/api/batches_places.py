"""The places in which requests of batches run: some of those that their tenant may have, some of all there are."""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from collections.abc import AsyncGenerator, Sequence

from tierd.daemon.batch_run import Asking
from tierd.daemon.choices import answers_of
from tierd.daemon.embedding import Input, Vectors
from tierd.daemon.errors import TooBusy
from tierd.daemon.inbox import SlowReader
from tierd.daemon.limits import MAX_PRIORITY
from tierd.daemon.protocol import Event, Submit, error_of
from tierd.daemon.service import Service

DOOR = "batch"  # in the log and the metrics


class Share:
    """So many places; whoever wants several gets them together. Threading: for one event loop."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._free = asyncio.Semaphore(places)
        self._turn = asyncio.Lock()  # one gathers at a time: two that have a half each would wait for ever

    @contextlib.asynccontextmanager
    async def of(self, count: int) -> AsyncGenerator[None]:
        """Hold so many places, or all where that is more; those who asked before go first."""
        async with contextlib.AsyncExitStack() as held:
            async with self._turn:
                for _ in range(min(count, self.places)):
                    await held.enter_async_context(self._free)
            yield


class Places:
    """The shares, of each tenant and of all together. Threading: for one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._all = Share(service.settings.max_streams)
        self._shares = weakref.WeakValueDictionary[str, Share]()  # as long as batches of the tenant run

    def of(self, tenant: str) -> Share:
        """What all batches of a tenant have together. The limit of a key is for its other requests, too."""
        if (share := self._shares.get(tenant)) is None:
            allowed = self._service.tenants.allowance(tenant).requests
            places = min(self._all.places, max(allowed // 2, 1)) if allowed else self._all.places
            share = self._shares[tenant] = Share(places)
        return share

    def asking(self, tenant: str) -> Asking:
        """Answers requests in places of this tenant, asking as often as it takes: batches have a deadline of their own.

        A place is held for one try: a request that waits to be asked again keeps nobody out.
        """
        share = self.of(tenant)

        async def generate(submit: Submit) -> AsyncGenerator[Event, None]:
            width = answers_of(submit)
            try:
                async with share.of(width), self._all.of(width):
                    async with self._service.answering(submit, DOOR, tenant) as events:
                        async for event in events:
                            if error := error_of(event):
                                raise error
                            yield event
            except SlowReader:
                raise TooBusy("the daemon could not keep up with its own answers") from None

        async def embed(model: str, inputs: Sequence[Input]) -> Vectors:
            async with share.of(1), self._all.of(1):
                return await self._service.embed(model, inputs, tenant, DOOR, priority=MAX_PRIORITY)

        return Asking(generate, embed, busy_s=math.inf)

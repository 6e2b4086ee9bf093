"""How many requests there may be at once, of all tenants and of each.

A place is booked in the same step of the event loop in which it is asked for, before anything is awaited: however many
come together, no more get in than there are places.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from tierd.daemon import limits
from tierd.daemon.errors import BadRequest, TooBusy
from tierd.daemon.tenants import Allowance, Tenants


class Place:
    """What a request holds until it is released, which may be done twice. A context manager releases at its end."""

    def __init__(self, admission: Admission, tenant: str, width: int, allowance: Allowance, drains: bool) -> None:
        self.tenant = tenant
        self.width = width
        self.allowance = allowance
        self.drains = drains
        self._admission = admission

    def release(self) -> None:
        """Make room for others."""
        self._admission.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Admission:
    """The places. `bound`: engine streams and calls at once. `changed` is called when one becomes free.

    Threading: for one event loop.
    """

    def __init__(self, tenants: Tenants, bound: int, changed: Callable[[], None]) -> None:
        self._tenants = tenants
        self._bound = bound
        self._changed = changed
        self._places: set[Place] = set()

    @property
    def live(self) -> int:
        """Requests that a drain waits for."""
        return sum(place.drains for place in self._places)

    def book(self, tenant: str, width: int = 1, *, drains: bool = True) -> Place:
        """Room for `width` engine streams more. `drains`: the daemon should not stop before it is released.

        Raises TooBusy, QuotaExceeded, BadRequest for what never fits.
        """
        most = min(self._bound, limits.MAX_ANSWERS, self._tenants.allowance(tenant).requests or self._bound)
        if width > most:
            raise BadRequest(f"{width} answers are asked for at once, at most {most} are possible", param="n")
        if sum(place.width for place in self._places) + width > self._bound:
            what = f"{self._bound} requests run or wait already"
            raise TooBusy(what, hint="try again in a moment, or raise max_queue")
        of_tenant = sum(place.width for place in self._places if place.tenant == tenant)
        place = Place(self, tenant, width, self._tenants.admit(tenant, of_tenant + width - 1), drains)
        self._places.add(place)
        return place

    def remove(self, place: Place) -> None:
        """What `Place.release` does."""
        if place in self._places:
            self._places.remove(place)
            self._changed()

"""In whose name a request runs, and how much each of them may have at once.

| comes by | with | tenant |
| --- | --- | --- |
| unix socket | the daemon's own uid | `` (the owner) |
| unix socket | root | `uid:0` |
| HTTP | no key, where none is needed; or the `api_key` of the settings | `` |
| HTTP | a key of `tierd key add` | `key:ID` |

Tenants never share a page: the name is part of the root of every page key.
"""

from __future__ import annotations

from typing import NamedTuple

from tierd.daemon.errors import QuotaExceeded
from tierd.daemon.keys import ApiKey, KeyRing

OWNER = ""
_KEY = "key:"


class Allowance(NamedTuple):
    """What a tenant may have; 0 is no limit. `pages`: in the cache. `requests`: that run or wait."""

    pages: int = 0
    requests: int = 0


class Tenants:
    """Allowances as they are now: keys may change while the daemon runs. Threading: one owner."""

    def __init__(self, ring: KeyRing) -> None:
        self.ring = ring

    def allowance(self, tenant: str) -> Allowance:
        """Of a tenant by name."""
        key = self.ring.by_id(tenant.removeprefix(_KEY)) if tenant.startswith(_KEY) else None
        return Allowance(key.quota_pages, key.max_requests) if key else Allowance()

    def is_there(self, tenant: str) -> bool:
        """False for one whose key was removed."""
        return not tenant.startswith(_KEY) or self.ring.by_id(tenant.removeprefix(_KEY)) is not None

    def admit(self, tenant: str, live: int) -> Allowance:
        """The allowance of a tenant who has `live` requests and wants one more. Raises QuotaExceeded."""
        allowance = self.allowance(tenant)
        if allowance.requests and live >= allowance.requests:
            raise QuotaExceeded(
                f"this key may have {allowance.requests} requests at once", hint="ask again when one of them has ended"
            )
        return allowance


def of_key(key: ApiKey) -> str:
    """The tenant of a key."""
    return _KEY + key.id

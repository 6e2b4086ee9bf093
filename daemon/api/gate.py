"""Who may come in by HTTP, and in whose name.

A browser is the likeliest attacker of a service on loopback: any page can send requests to it. So the Host must be one
of ours (a rebound name is not), an Origin must be on the list of the settings (which is empty), and bodies must be
declared as JSON, which no form can do.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import hdrs, web

from tierd.daemon import tenants
from tierd.daemon.api import body_limits
from tierd.daemon.api.reading import read
from tierd.daemon.config import Settings, is_loopback, split_listen
from tierd.daemon.errors import BadRequest, PermissionDenied, TooBusy, Unauthorized
from tierd.daemon.keys import KeyRing

MAX_CONNECTIONS = 2048
MAX_HEADERS_BYTES = 16 << 10  # of all headers of a request together
MAX_API_KEY_CHARS = 4096
OPEN_PATHS = frozenset({"/", "/health"})  # no key needed: they tell nothing
OWNER_ONLY = frozenset({("POST", "/api/pull"), ("DELETE", "/api/delete")})  # they change what others see
MULTIPART = "multipart/form-data"
UPLOADS = frozenset({"/v1/files"})  # bodies that are read by their handler, piece by piece
PREFLIGHT_S = 600  # how long a browser may remember an answer to `OPTIONS`
_KEY_HINT = "send `Authorization: Bearer KEY` or `x-api-key: KEY`"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
_TENANT = web.RequestKey("tenant", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def tenant_of(request: web.Request) -> str:
    """In whose name a request runs: what every generation has to be submitted with."""
    return request[_TENANT]


def may_manage(request: web.Request) -> bool:
    """Whether a request may say how long models stay loaded, which others feel."""
    return request[_TENANT] == tenants.OWNER


class Gate:
    """What every request must fulfil, and the tenant that it gets. Threading: for one event loop."""

    def __init__(self, settings: Settings, ring: KeyRing, sock: socket.socket) -> None:
        host = split_listen(settings.listen)[0].lower()
        self._ring = ring
        self._hosts = _LOOPBACK | {host, sock.getsockname()[0]}
        self._named = frozenset(settings.allowed_hosts)
        self._origins = frozenset(settings.origins)
        # Reached from other machines, by whatever address: a name is what an attacker can rebind, a number is not.
        self._takes_addresses = not is_loopback(host)
        if self._takes_addresses:
            self._hosts |= {socket.gethostname().lower()}
        self._port = sock.getsockname()[1]
        self._key_hash = _hash(settings.api_key) if settings.api_key else None
        self.connections: Callable[[], int] = lambda: 0  # how many are open

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises what keeps the request out; otherwise hands it on, its body read and looked through."""
        self.check(request)
        if request.method == hdrs.METH_OPTIONS and "Origin" in request.headers:
            return self._preflight(request)
        tenant = request[_TENANT] = self.tenant(request)
        if (request.method, request.path) in OWNER_ONLY and tenant != tenants.OWNER:
            raise PermissionDenied("this key may use models, not add or remove them")
        if request.body_exists and request.match_info.http_exception is None and not _is_upload(request):
            body_limits.check(await read(request))
        return await handler(request)

    async def sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Allow a page that was let in to read the answer. For `on_response_prepare`."""
        origin = request.headers.get("Origin", "").lower()
        if origin and origin in self._origins:
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Vary"] = "Origin"

    def check(self, request: web.Request) -> None:
        """Raises PermissionDenied, BadRequest or TooBusy for a request that nobody may send."""
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not self.is_ours(hosts[0]):
            hint = "`--allowed-hosts` names others by which it may be asked for"
            raise PermissionDenied("the Host header names no address of this daemon", param="Host", hint=hint)
        self._check_origin(request)
        if sum(len(name) + len(value) + 4 for name, value in request.raw_headers) > MAX_HEADERS_BYTES:
            raise web.HTTPRequestHeaderFieldsTooLarge(reason=f"the headers have more than {MAX_HEADERS_BYTES} bytes")
        if self.connections() > MAX_CONNECTIONS:
            raise TooBusy(f"{MAX_CONNECTIONS} connections are open already", hint="try again when some have ended")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise BadRequest("bodies must not be compressed", param="Content-Encoding")
        if hdrs.CONTENT_LENGTH in request.headers and hdrs.TRANSFER_ENCODING in request.headers:
            raise BadRequest("a body has one length", param="Content-Length")
        has_body = request.method == hdrs.METH_POST or request.body_exists
        # Where nobody listens, or not to this method, that is what is told; the body is not read.
        has_taker = request.match_info.http_exception is None
        if _is_upload(request):
            # A form of any page can send such a body, but no header of its own.
            if not any(True for _ in _keys_of(request)):
                raise Unauthorized("an upload needs a key, where none is needed any", hint=_KEY_HINT)
        elif has_body and has_taker and request.content_type != "application/json":
            raise BadRequest("the body must be JSON", param="Content-Type", hint="send Content-Type: application/json")

    def tenant(self, request: web.Request) -> str:
        """In whose name it comes. Raises Unauthorized where a key is needed and none of those it sent fits."""
        sent = list(_keys_of(request))
        for text in sent:
            # Hashes have one length: neither it nor the first wrong byte can be measured.
            if self._key_hash is not None and hmac.compare_digest(_hash(text), self._key_hash):
                return tenants.OWNER
            if (key := self._ring.find(text)) is not None:
                return tenants.of_key(key)
        needs_one = self._key_hash is not None or self._takes_addresses or self._ring.wants_one()
        if needs_one and request.path not in OPEN_PATHS:
            what = "this API key is not known here" if sent else "this daemon needs an API key"
            raise Unauthorized(what, hint=_KEY_HINT)
        return tenants.OWNER

    def is_ours(self, host: str) -> bool:
        """Whether a Host header names this daemon."""
        host = host.lower()
        name, colon, port = host.rpartition(":")
        if not colon or host.endswith("]"):
            name, port = host, ""
        if host in self._named or name in self._named:
            return True
        if port and port != str(self._port):
            return False
        name = name.strip("[]")
        return name in self._hosts or (self._takes_addresses and _is_address(name))

    def _check_origin(self, request: web.Request) -> None:
        origins = [origin.lower() for origin in request.headers.getall("Origin", [])]
        if len(origins) == 1 and origins[0] in self._origins:
            return
        if origins or request.headers.get("Sec-Fetch-Site", "").lower() in _FOREIGN_SITES:
            hint = "`--origins` names those whose pages may send some"
            raise PermissionDenied("requests of web pages are refused", param="Origin", hint=hint)

    def _preflight(self, request: web.Request) -> web.Response:
        wanted = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": wanted if wanted.isprintable() else "authorization, content-type",
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        }
        return web.Response(status=204, headers=headers)


def _is_upload(request: web.Request) -> bool:
    return request.method == hdrs.METH_POST and request.path in UPLOADS and request.content_type == MULTIPART


def _keys_of(request: web.Request) -> Iterator[str]:
    """The keys that a request shows, by whichever of the two ways its dialect has."""
    for value in request.headers.getall("Authorization", []):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            yield key.strip()[:MAX_API_KEY_CHARS]
    yield from (value.strip()[:MAX_API_KEY_CHARS] for value in request.headers.getall("x-api-key", []))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

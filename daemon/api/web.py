"""HTTP: the application, what every request must fulfil, and how errors leave.

A browser is the likeliest attacker of a service on loopback: any page can send requests to it. So the Host must be one
of ours (a rebound name is not), an Origin is refused, and bodies must be declared as JSON, which no form can do.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from tierd.daemon.api.answers import error_response
from tierd.daemon.api.openai_routes import Routes
from tierd.daemon.config import is_loopback, split_listen
from tierd.daemon.errors import BadRequest, InternalError, NotFound, PermissionDenied, TierdError, Unauthorized
from tierd.daemon.service import Service

log = logging.getLogger("tierd.http")

MAX_BODY_BYTES = 32 << 20
MAX_HEADER_BYTES = 8190
MAX_HEADERS = 64
# Also how long a client may take for the headers of a request.
KEEP_ALIVE_S = 30.0
SHUTDOWN_S = 0.5
LINGER_S = 5.0  # to read on after an early refusal, so that the client sees it and not a reset
OPEN_PATHS = frozenset({"/", "/health"})  # no key needed: they tell nothing
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PATHS_HINT = "there are /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics"
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def start(service: Service, sock: socket.socket) -> web.AppRunner:
    """Serve on a listening socket until `cleanup` of the answer. Sets `service.http_address`."""
    gate = Gate(service.settings.listen, service.settings.api_key, sock)
    app = web.Application(middlewares=[errors_as_json, gate.middleware], client_max_size=MAX_BODY_BYTES)
    Routes(service).add(app.router)
    app.on_response_prepare.append(_sign)
    # Without a level of its own, aiohttp logs each malformed request with a traceback and the bytes that came.
    wire_log = logging.getLogger("tierd.http.wire")
    wire_log.setLevel(logging.CRITICAL)
    runner = web.AppRunner(
        app,
        handle_signals=False,
        handler_cancellation=True,  # a client that is gone ends its handler, and with it the generation
        access_log=None,
        logger=wire_log,
        lingering_time=LINGER_S,
        keepalive_timeout=KEEP_ALIVE_S,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        auto_decompress=False,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    await web.SockSite(runner, sock).start()
    host, port = sock.getsockname()[:2]
    service.http_address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return runner


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "tierd"  # not the versions of what it is made of


class Gate:
    """Who may come in."""

    def __init__(self, listen: str, api_key: str, sock: socket.socket) -> None:
        host = split_listen(listen)[0].lower()
        self._hosts = _LOOPBACK | {host, sock.getsockname()[0]}
        # Reached from other machines, by whatever address: a name is what an attacker can rebind, a number is not.
        self._takes_addresses = not is_loopback(host)
        if self._takes_addresses:
            self._hosts |= {socket.gethostname().lower()}
        self._port = sock.getsockname()[1]
        self._key_hash = _hash(api_key) if api_key else None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raises what keeps the request out; otherwise hands it on."""
        self.check(request)
        return await handler(request)

    def check(self, request: web.Request) -> None:
        """Raises PermissionDenied, Unauthorized or BadRequest."""
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            raise PermissionDenied("the Host header names no address of this daemon", param="Host")
        if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "").lower() in _FOREIGN_SITES:
            raise PermissionDenied("requests of web pages are refused", param="Origin")
        if self._key_hash is not None and request.path not in OPEN_PATHS:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            # Hashes have one length: neither it nor the first wrong byte can be measured.
            if not hmac.compare_digest(_hash(key.strip()), self._key_hash) or scheme.lower() != "bearer":
                raise Unauthorized("this daemon needs an API key", hint="send `Authorization: Bearer KEY`")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise BadRequest("bodies must not be compressed", param="Content-Encoding")
        if request.method == "POST" and request.content_type != "application/json":
            raise BadRequest("the body must be JSON", param="Content-Type", hint="send Content-Type: application/json")

    def _is_ours(self, host: str) -> bool:
        name, colon, port = host.rpartition(":")
        if not colon or host.endswith("]"):
            name, port = host, ""
        if port and port != str(self._port):
            return False
        name = name.strip("[]").lower()
        return name in self._hosts or (self._takes_addresses and _is_address(name))


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place where an exception becomes an answer. Outermost, so that nothing passes it by."""
    started_s = time.monotonic()
    try:
        return await handler(request)
    except TierdError as exc:
        return error_response(exc)
    except web.HTTPRequestEntityTooLarge:
        return error_response(BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes"), status=413)
    except web.HTTPNotFound:
        return error_response(NotFound("there is nothing at this path", hint=_PATHS_HINT))
    except web.HTTPMethodNotAllowed as exc:
        response = error_response(BadRequest(f"this path answers {', '.join(sorted(exc.allowed_methods))}"), status=405)
        response.headers["Allow"] = ", ".join(sorted(exc.allowed_methods))
        return response
    except web.HTTPException as exc:
        return error_response(BadRequest(exc.reason), status=exc.status)
    except ConnectionError:
        raise  # the client is gone
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return error_response(InternalError())
    finally:
        log.debug("%s %s took %.3f s", request.method, request.path, time.monotonic() - started_s)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

"""HTTP: the application and its limits, and how errors leave. Who may come in is for `gate` to say."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from tierd.daemon.api import (
    answers,
    anthropic_routes,
    batches_routes,
    dialects,
    embeddings_routes,
    ollama_routes,
    responses_routes,
)
from tierd.daemon.api.dialects import error_response
from tierd.daemon.api.gate import Gate, Handler
from tierd.daemon.api.openai_routes import Routes
from tierd.daemon.errors import BadRequest, InternalError, NotFound, TierdError
from tierd.daemon.service import Service

log = logging.getLogger("tierd.http")

MAX_BODY_BYTES = 32 << 20
MAX_HEADER_BYTES = 8190
MAX_HEADERS = 64
BACKLOG = 1024
SERVER = "tierd"  # not the versions of what it is made of
# Also how long a client may take for the headers of a request.
KEEP_ALIVE_S = 30.0
SHUTDOWN_S = 0.5
LINGER_S = 5.0  # to read on after an early refusal, so that the client sees it and not a reset
_PATHS_HINT = "/openapi.json lists the paths; docs/clients tells what each client needs"


async def start(service: Service, sock: socket.socket) -> web.AppRunner:
    """Serve on a listening socket until `cleanup` of the answer."""
    gate = Gate(service.settings, service.tenants.ring, sock)
    app = web.Application(middlewares=[errors_as_json, gate.middleware], client_max_size=MAX_BODY_BYTES)
    Routes(service).add(app.router)
    responses_routes.Routes(service).add(app.router)
    anthropic_routes.Routes(service).add(app.router)
    ollama_routes.Routes(service).add(app.router)
    embeddings_routes.Routes(service).add(app.router)
    batches_routes.Routes(service).add(app)
    app.on_response_prepare.extend([_sign, gate.sign, dialects.sign])
    # Without a level of its own, aiohttp logs each malformed request with a traceback and the bytes that came.
    wire_log = logging.getLogger("tierd.http.wire")
    wire_log.setLevel(logging.CRITICAL)
    options: dict[str, Any] = {
        "access_log": None,
        "logger": wire_log,
        "lingering_time": LINGER_S,
        "keepalive_timeout": KEEP_ALIVE_S,
        "max_line_size": MAX_HEADER_BYTES,
        "max_field_size": MAX_HEADER_BYTES,
        "max_headers": MAX_HEADERS,
        "auto_decompress": False,
    }
    # A client that is gone ends its handler, and with it the generation.
    runner = web.AppRunner(
        app, handle_signals=False, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, **options
    )
    await runner.setup()
    site = _Site(runner, sock, options)
    gate.connections = site.count
    await site.start()
    return runner


class _Site(web.SockSite):
    """The listening socket, whose connections are `_Connection`s."""

    def __init__(self, runner: web.AppRunner, sock: socket.socket, options: Mapping[str, Any]) -> None:
        super().__init__(runner, sock, backlog=BACKLOG)
        if runner.server is None:
            raise AssertionError("the runner is not set up")
        self._manager = runner.server
        self._options = options

    def count(self) -> int:
        """Connections that are open."""
        return len(self._manager.connections)

    async def start(self) -> None:
        """Accept from now on."""
        await web.BaseSite.start(self)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self._manager, loop=loop, **self._options), sock=self._sock, backlog=self._backlog
        )


class _Connection(web.RequestHandler):
    """One client. What is no HTTP gets an answer of ours: aiohttp's quotes the bytes and names versions."""

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The last answer on a connection whose bytes can't be read, or whose handler failed."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        error = BadRequest("this is no HTTP request that tierd reads") if status < 500 else InternalError()
        response = answers.error_response(error, status=status)
        response.headers["Server"] = SERVER
        response.force_close()
        return response


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place where an exception becomes an answer. Outermost, so that nothing passes it by."""
    started_s = time.monotonic()
    try:
        return await handler(request)
    except TierdError as exc:
        return error_response(request, exc)
    except web.HTTPRequestEntityTooLarge:
        return error_response(request, BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes"), status=413)
    except web.HTTPNotFound:
        return error_response(request, NotFound("there is nothing at this path", hint=_PATHS_HINT))
    except web.HTTPMethodNotAllowed as exc:
        allowed = ", ".join(sorted(exc.allowed_methods))
        response = error_response(request, BadRequest(f"this path answers {allowed}"), status=405)
        response.headers["Allow"] = allowed
        return response
    except web.HTTPException as exc:
        return error_response(request, BadRequest(exc.reason), status=exc.status)
    except ConnectionError:
        raise  # the client is gone
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return error_response(request, InternalError())
    finally:
        log.debug("%s %s took %.3f s", request.method, request.path, time.monotonic() - started_s)

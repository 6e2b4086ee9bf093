"""The simple operations of the unix socket: names and arguments to calls of `Service`."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from tierd.daemon import embedding, limits, protocol
from tierd.daemon.errors import BadRequest, Unsupported, suggest
from tierd.daemon.plan.block import Extent
from tierd.daemon.service import Service
from tierd.daemon.version import version

MAX_TIMEOUT_S = 600.0
DRAIN_S = 30.0
STOP_S = 10.0
RESIZE_S = 30.0
MAX_EMBED_INPUTS = 256  # of one call: their vectors come in one frame
_CACHE_ACTIONS = ("ls", "verify", "gc", "clear")
_PREFIX_ACTIONS = ("ls", "pin", "unpin", "drop", "persist", "evict")


class _None(msgspec.Struct, forbid_unknown_fields=True):
    """No arguments."""


class _Model(msgspec.Struct, forbid_unknown_fields=True):
    model: str


class _Cache(msgspec.Struct, forbid_unknown_fields=True):
    action: str
    model: str | None = None
    repair: bool = False
    yes: bool = False


class _Tokenize(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    model: str
    text: str | None = None
    messages: tuple[protocol.Message, ...] | None = None


class _Embed(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    truncate: bool = False
    priority: int = 0  # lower runs first


class _Prefix(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    action: str
    model: str | None = None
    id: str | None = None
    limit: int | None = None


class _Reserve(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    requests: int
    prompt_tokens: int
    answer_tokens: int
    longest_tokens: int
    streams: int | None = None


class _Reserved(msgspec.Struct, forbid_unknown_fields=True):
    done: int
    left_s: float | None = None


class _Top(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    model: str
    maps: dict[str, int] | None = None
    prefixes: int | None = None
    events_after: int | None = None


class _Page(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    model: str
    tier: str = ""
    slot: int = -1
    key: str = ""


class _Events(msgspec.Struct, forbid_unknown_fields=True):
    after: int = 0


class _CancelRequest(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    request: int


class _Resize(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    model: str | None = None
    device_bytes: int | Literal["auto"] | None = None
    host_bytes: int | Literal["auto"] | None = None
    weights_bytes: int | Literal["auto"] | None = None
    timeout_s: float = RESIZE_S


class _Unload(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    all: bool = False


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    timeout_s: float = DRAIN_S

    def check(self) -> None:
        if not 0 <= self.timeout_s <= MAX_TIMEOUT_S:
            raise BadRequest(f"timeout_s must be from 0 to {MAX_TIMEOUT_S:.0f}", param="timeout_s")


class _Stop(_Drain):
    timeout_s: float = STOP_S


class Who(NamedTuple):
    """Who asks: a tenant, through a connection."""

    tenant: str
    connection: object


Answer = Awaitable[dict[str, Any]]


async def _hello(service: Service, args: _None) -> dict[str, Any]:
    return {
        "version": version(),
        "protocol": protocol.VERSION,
        "pid": os.getpid(),
        "state": service.state,
        "max_frame_bytes": protocol.MAX_FRAME_BYTES,
        "ops": _known(),
    }


async def _models(service: Service, args: _None) -> dict[str, Any]:
    return {"models": await service.models()}


async def _show(service: Service, args: _Model) -> dict[str, Any]:
    return await service.show(args.model)


async def _status(service: Service, args: _None) -> dict[str, Any]:
    return await service.status()


async def _ps(service: Service, args: _None) -> dict[str, Any]:
    return await service.ps()


async def _load(service: Service, args: _Model, who: Who) -> dict[str, Any]:
    return await service.load(args.model, who.tenant)


async def _reserve(service: Service, args: _Reserve, who: Who) -> dict[str, Any]:
    if min(args.prompt_tokens, args.answer_tokens, args.longest_tokens) < 0:
        raise BadRequest("a number of tokens must not be negative", param="prompt_tokens")
    if args.streams is not None and args.streams < 1:
        raise BadRequest("streams must be at least 1", param="streams")
    extent = Extent(args.requests, args.prompt_tokens, args.answer_tokens, args.longest_tokens)
    model, _ = service.shelf.find(args.model)
    return await service.exclusive.reserve(who.connection, model, extent, args.streams, lambda: service.live)


async def _reserved(service: Service, args: _Reserved, who: Who) -> dict[str, Any]:
    service.exclusive.progress(who.connection, args.done, args.left_s)
    return {}


async def _release(service: Service, args: _None, who: Who) -> dict[str, Any]:
    service.exclusive.release(who.connection)
    return {}


async def _unload(service: Service, args: _Unload) -> dict[str, Any]:
    if (args.model is None) == (not args.all):
        raise BadRequest("exactly one of model and all is needed", param="model")
    return await service.unload(args.model)


async def _tokenize(service: Service, args: _Tokenize, who: Who) -> dict[str, Any]:
    if (args.text is None) == (args.messages is None):
        raise BadRequest("exactly one of text and messages is needed", param="text")
    given = msgspec.to_builtins(args)
    return await service.tokenize(given.pop("model"), given, who.tenant)


async def _embed(service: Service, args: _Embed, who: Who) -> dict[str, Any]:
    if len(args.inputs) > MAX_EMBED_INPUTS:
        what = f"{len(args.inputs)} inputs in one call, at most {MAX_EMBED_INPUTS} are possible"
        raise BadRequest(what, hint="send them in parts", param="inputs")
    if abs(args.priority) > limits.MAX_PRIORITY:
        what = f"priority must be from {-limits.MAX_PRIORITY} to {limits.MAX_PRIORITY}"
        raise BadRequest(what, param="priority")
    found = await service.embed(
        args.model, args.inputs, who.tenant, "unix", truncate=args.truncate, priority=args.priority,
        holder=who.connection,
    )  # fmt: skip
    vectors = [embedding.shortened(one, args.dimensions).tobytes() for one in found.vectors]
    usage = {"prompt_tokens": found.prompt_tokens, "cached_tokens": found.cached_tokens}
    return {"vectors": vectors, "usage": usage}


async def _cache(service: Service, args: _Cache) -> dict[str, Any]:
    if args.action not in _CACHE_ACTIONS:
        raise BadRequest(f"action must be one of {', '.join(_CACHE_ACTIONS)}", param="action")
    if args.repair and args.action != "verify":
        raise BadRequest("repair belongs to verify", param="repair")
    if args.action == "clear" and not args.yes:
        raise BadRequest("clearing the cache has to be confirmed", param="yes", hint="set yes, or --yes")
    return await service.cache(args.action, args.model, repair=args.repair)


async def _pages(service: Service, args: _Model) -> dict[str, Any]:
    return await service.look("pages", args.model, {})


async def _top(service: Service, args: _Top) -> dict[str, Any]:
    given = msgspec.to_builtins(args)
    return await service.look("top", given.pop("model"), given)


async def _page(service: Service, args: _Page) -> dict[str, Any]:
    given = msgspec.to_builtins(args)
    return await service.look("page", given.pop("model"), given)


async def _events(service: Service, args: _Events) -> dict[str, Any]:
    return {"events": service.history.since(args.after)}


async def _cancel_request(service: Service, args: _CancelRequest) -> dict[str, Any]:
    service.cancel_request(args.model, args.request)
    return {}


async def _prefix(service: Service, args: _Prefix) -> dict[str, Any]:
    if args.action not in _PREFIX_ACTIONS:
        raise BadRequest(f"action must be one of {', '.join(_PREFIX_ACTIONS)}", param="action")
    if (args.id is None) != (args.action == "ls"):
        raise BadRequest(f"{args.action} {'takes no' if args.id else 'needs an'} id", param="id")
    if args.limit is not None and args.action != "ls":
        raise BadRequest("limit belongs to ls", param="limit")
    given = msgspec.to_builtins(args)
    return await service.prefix(given.pop("model", None), given)


async def _resize(service: Service, args: _Resize) -> dict[str, Any]:
    if not 0 <= args.timeout_s <= MAX_TIMEOUT_S:
        raise BadRequest(f"timeout_s must be from 0 to {MAX_TIMEOUT_S:.0f}", param="timeout_s")
    given = msgspec.to_builtins(args)
    return await service.resize(given.pop("model", None), given)


async def _drain(service: Service, args: _Drain) -> dict[str, Any]:
    args.check()
    return {"left": await service.drain(args.timeout_s)}


async def _stop(service: Service, args: _Stop) -> dict[str, Any]:
    args.check()
    service.ask_stop(args.timeout_s)
    return {}


_OPS: Mapping[str, tuple[type[msgspec.Struct], Callable[[Service, Any], Answer]]] = {
    "hello": (_None, _hello),
    "models": (_None, _models),
    "show": (_Model, _show),
    "status": (_None, _status),
    "ps": (_None, _ps),
    "unload": (_Unload, _unload),
    "cache": (_Cache, _cache),
    "pages": (_Model, _pages),
    "top": (_Top, _top),
    "page": (_Page, _page),
    "events": (_Events, _events),
    "cancel_request": (_CancelRequest, _cancel_request),
    "prefix": (_Prefix, _prefix),
    "resize": (_Resize, _resize),
    "drain": (_Drain, _drain),
    "stop": (_Stop, _stop),
}


# What runs in somebody's name.
_FOR_SOMEBODY: Mapping[str, tuple[type[msgspec.Struct], Callable[[Service, Any, Who], Answer]]] = {
    "embed": (_Embed, _embed),
    "load": (_Model, _load),
    "release": (_None, _release),
    "reserve": (_Reserve, _reserve),
    "reserved": (_Reserved, _reserved),
    "tokenize": (_Tokenize, _tokenize),
}


async def answer(
    service: Service, op: str, args: Mapping[str, Any], tenant: str = "", connection: object = None
) -> dict[str, Any]:
    """The data of the `result`. `tenant`: who asks, and through which `connection`.

    Raises Unsupported for an unknown operation, BadRequest for wrong arguments, and what the call raises.
    """
    if (named := _FOR_SOMEBODY.get(op)) is not None:
        return await named[1](service, _typed(op, args, named[0]), Who(tenant, connection))
    if (found := _OPS.get(op)) is not None:
        return await found[1](service, _typed(op, args, found[0]))
    raise Unsupported(f"unknown operation {op[:64]!r}", hint=suggest(op[:64], _known()), param="op")


def _known() -> list[str]:
    return sorted([*_OPS, *_FOR_SOMEBODY, "generate", "cancel"])


def _typed(op: str, args: Mapping[str, Any], kind: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return msgspec.convert(dict(args), kind, strict=True)
    except msgspec.ValidationError as exc:
        raise BadRequest(f"{op}: {str(exc).replace('`', '')}") from None


def progress(service: Service, op: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """What is said while an operation takes its time."""
    model = args.get("model")
    known = op == "cache" or (op == "load" and isinstance(model, str))
    found = service.progress(op, model or "") if known else {}
    text = service.exclusive.stage if op == "reserve" else f"{op} is still at work"
    return found or {"stage": op, "done": 0, "total": 0, "text": text}

"""Settings: one frozen tree, strict, and each value knows where it came from.

Order: flags > `TIERD_*` variables > the config file (TOML) > defaults. A key nobody knows or a value of a wrong kind is
`BadConfig` (exit code 78) that names the file, the variable or the flag.

Sizes are `6GB` (10^9), `512MiB` (2^20), plain bytes, `0` (off) or `auto`. What `auto` means on this machine is computed
apart, by `auto_sizes`, so that a `Settings` holds what was asked for and never what was derived.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tierd.daemon.config_file import read_file
from tierd.daemon.config_values import (
    boolean,
    choice,
    context_tokens,
    count,
    duration_s,
    exact_tokens,
    existing_or_new_dir,
    host_names,
    listen_address,
    log_size_bytes,
    memory_mode,
    model_or_none,
    model_reference,
    model_references,
    private_file,
    size_bytes,
    size_or_auto,
    socket_file,
    text,
    web_origins,
)
from tierd.daemon.errors import BadConfig, suggest
from tierd.daemon.paths import (
    batches_dir,
    cache_dir,
    check_socket_path,
    config_file,
    keys_file,
    models_dir,
    socket_path,
)


def _setting(doc: str, parse: Callable[[object], Any], *, key: str = "", secret: bool = False) -> dict[str, Any]:
    return {"doc": doc, "parse": parse, "key": key, "secret": secret}


_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for. `setting_docs()` lists every field with its documentation."""

    models_dir: Path = field(metadata=_setting("directory of the prepared models", existing_or_new_dir))
    cache_dir: Path = field(
        metadata=_setting("directory of the page store and the compiled kernels; may be deleted", existing_or_new_dir)
    )
    socket: Path = field(metadata=_setting("unix socket of the daemon", socket_file))
    listen: str = field(
        default="127.0.0.1:8421",
        metadata=_setting("HTTP host:port; empty turns HTTP off; beyond loopback needs api_key", listen_address),
    )
    api_key: str = field(default="", metadata=_setting("key that HTTP clients must send", text, secret=True))
    keys_file: Path = field(
        default_factory=keys_file, metadata=_setting("file of the API keys that `tierd key` makes", private_file)
    )
    batches_dir: Path = field(
        default_factory=batches_dir,
        metadata=_setting("directory of the files and answers of /v1/batches", existing_or_new_dir),
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(), metadata=_setting("names by which HTTP may be asked for, beside its own", host_names)
    )
    origins: tuple[str, ...] = field(
        default=(), metadata=_setting("origins of the web pages that may send requests", web_origins)
    )
    device_mem: int | None = field(
        default=None, metadata=_setting("bytes of pages beside the computation (a size or auto)", size_or_auto)
    )
    host_mem: int | None = field(
        default=None, metadata=_setting("bytes of pages in CPU memory, 0: no such tier (a size or auto)", size_or_auto)
    )
    weights_mem: int | None = field(
        default=None,
        metadata=_setting("bytes of weights in memory; what does not fit is streamed (a size or auto)", size_or_auto),
    )
    host_weights_mem: int | None = field(
        default=None,
        metadata=_setting(
            "bytes of CPU memory for weights that a card has no room for; others stay on the disk (a size or auto)",
            size_or_auto,
        ),
    )
    card: str = field(
        default="auto", metadata=_setting("compute on a card: auto (where there is one) or off", choice("auto", "off"))
    )
    missing_experts: str = field(
        default="auto", metadata=_setting(
            "experts that a card misses: auto (the processors may compute them, in their rounding) or fetch",
            choice("auto", "fetch"),
        ),
    )
    nvme_mem: int | None = field(
        default=None, metadata=_setting("bytes of pages on disk, 0: no such tier (a size or auto)", size_or_auto)
    )
    nvme_min_free: int | None = field(
        default=None, metadata=_setting("bytes of the disk that tierd leaves free (a size or auto)", size_or_auto)
    )
    nvme_daily_writes: int = field(
        # A consumer drive of 1 TB is warranted for some 600 TB in five years, which is 330 GB a day.
        default=200 * 10**9,
        metadata=_setting("bytes of pages written to the disk in a day (UTC) at most, 0: no bound", size_bytes),
    )
    yield_device_mem: int = field(
        default=0,
        metadata=_setting(
            "bytes of a card's memory that stay free for other programs: pages give way when those take memory, and "
            "come back when they leave it; 0: nobody watches",
            size_bytes,
        ),
    )
    threads: int = field(default=0, metadata=_setting("threads that compute, 0: every core", count(0, 1024)))
    kv_format: str = field(
        default="auto", metadata=_setting(
            "numbers in a page: fp32, fp16, bf16 or fp8, or keys and values of 8 or 4 bits: k8v8, k8v4, k4v8, k4v4; "
            "auto: fp32, on a card bf16",
            choice("auto", "fp32", "fp16", "bf16", "fp8", "k8v8", "k8v4", "k4v8", "k4v4"),
        ),
    )
    store_format: str = field(
        default="same", metadata=_setting(
            "numbers in a page on the disk, of fewer bits than kv_format: fp16, bf16, fp8, k8v8, k8v4, k4v8 or k4v4; "
            "what comes back is then near what was computed, not the same; same: as kv_format",
            choice("same", "fp16", "bf16", "fp8", "k8v8", "k8v4", "k4v8", "k4v4"),
        ),
    )
    kv_mode: str = field(
        default="",
        metadata=_setting("of a context: all (empty), window=N, sinks=S,window=W, select=K or h2o=N", memory_mode),
    )
    kv_exact_first: int = field(
        default=0,
        metadata=_setting("first tokens kept exact, too, where pages are packed; in blocks of 32", exact_tokens),
    )
    kv_exact_last: int = field(
        default=0,
        metadata=_setting(
            "newest tokens that are kept exact, too, where pages are packed: those of a token's own block of so many, "
            "a multiple of 32; 0: off",
            exact_tokens,
        ),
    )
    ctx: int = field(
        default=0, metadata=_setting("longest context in tokens, 0: what the model was trained for", context_tokens)
    )
    max_batch: int = field(
        default=512, metadata=_setting("tokens computed in one step, prompts and answers together", count(16, 65536))
    )
    max_streams: int = field(default=16, metadata=_setting("answers that are written at once", count(1, 1024)))
    speculate: str = field(
        default="auto",
        metadata=_setting(
            "compute several tokens of an answer at once where it repeats itself or its prompt, or a draft model "
            "guesses them: auto (where it gains), on or off",
            choice("auto", "on", "off"),
        ),
    )
    draft: str = field(
        default="",
        metadata=_setting(
            "small model with the same tokenizer that guesses the next tokens of larger ones while their weights are "
            "streamed; empty: none",
            model_or_none,
        ),
    )
    max_queue: int = field(
        default=512, metadata=_setting("requests that wait before new ones are refused", count(1, 65536))
    )
    keep_alive_s: float | None = field(
        default=900.0,
        metadata=_setting("time until an idle model is unloaded: 90, 15m, 1h or never", duration_s, key="keep_alive"),
    )
    max_loaded: int = field(
        default=0, metadata=_setting("models loaded at once, 0: as many as fit into the memory", count(0, 64))
    )
    pinned_models: tuple[str, ...] = field(
        default=(),
        metadata=_setting("models that stay loaded: not unloaded when idle, nor to make room", model_references),
    )
    log_level: str = field(
        default="info",
        metadata=_setting("debug (may hold prompt text), info, warning or error", choice(*_LEVELS)),
    )
    log_format: str = field(
        default="auto",
        metadata=_setting("pretty, json, or auto: pretty on a terminal", choice("auto", "pretty", "json")),
    )
    log_bytes: int = field(
        default=8 << 20, metadata=_setting("size of a log file from which on a new one is begun", log_size_bytes)
    )
    log_files: int = field(default=4, metadata=_setting("old log files that are kept", count(1, 100)))
    offline: bool = field(default=False, metadata=_setting("never use the network", boolean))
    default_model: str = field(
        default="smollm2:135m", metadata=_setting("model of `tierd run` when none is named", model_reference)
    )
    strip_attribution: bool = field(
        default=True,
        metadata=_setting(
            "leave out of system prompts the lines that name an Anthropic client and differ in every request",
            boolean,
            key="compat.strip_attribution",
        ),
    )

    @property
    def page_formats(self) -> str:
        """How pages lie in memory and on the disk: `fp32`, or `fp32 stored k8v8`."""
        return self.kv_format if self.store_format == "same" else f"{self.kv_format} stored {self.store_format}"


class SettingDoc(NamedTuple):
    """How one setting is written and what it means."""

    name: str
    key: str
    env: str
    flag: str
    doc: str
    secret: bool
    parse: Callable[[object], Any]


class Loaded(NamedTuple):
    """Settings, and for each field where its value came from: `flag --x`, `env TIERD_X`, `file PATH`, `default`."""

    settings: Settings
    origins: dict[str, str]


def setting_docs() -> list[SettingDoc]:
    """Every setting in the order of `Settings`."""
    docs = []
    for item in dataclasses.fields(Settings):
        meta = item.metadata
        key = meta["key"] or item.name
        words = key.replace(".", "_")  # a dot is a table of the file
        env, flag = "TIERD_" + words.upper(), "--" + words.replace("_", "-")
        docs.append(SettingDoc(item.name, key, env, flag, meta["doc"], meta["secret"], meta["parse"]))
    return docs


# Variables that are not settings: where things lie before the settings are read, and the traceback switch. Those that
# begin with TIERD_TEST_ are for the test suite.
_OTHER_ENV = frozenset({"TIERD_CONFIG", "TIERD_STATE_DIR", "TIERD_RUNTIME_DIR", "TIERD_DEBUG"})


def load(flags: Mapping[str, object], env: Mapping[str, str] = os.environ, path: Path | None = None) -> Loaded:
    """Read all four sources. `flags`: field name -> value, None where the flag was not given.

    `path`: the config file; without it the user's own one, which need not exist. Raises BadConfig.
    """
    loaded, faults = load_anyway(flags, env, path)
    if faults:
        raise faults[0]
    return loaded


def load_anyway(
    flags: Mapping[str, object], env: Mapping[str, str] = os.environ, path: Path | None = None
) -> tuple[Loaded, tuple[BadConfig, ...]]:
    """As `load`, for those who can go on with defaults: also what is wrong in the file and the variables.

    A value that cannot be used is the default one. Raises BadConfig for a flag alone: who typed it is there to mend it.
    """
    docs = setting_docs()
    values: dict[str, Any] = {
        "models_dir": models_dir(env), "cache_dir": cache_dir(env), "socket": socket_path(env),
        "keys_file": keys_file(env), "batches_dir": batches_dir(env),
    }  # fmt: skip
    origins = dict.fromkeys((doc.name for doc in docs), "default")
    by_key, by_env = {doc.key: doc for doc in docs}, {doc.env: doc for doc in docs}
    faults: list[BadConfig] = []

    def take(doc: SettingDoc, value: object, origin: str, where: str) -> None:
        try:
            values[doc.name] = doc.parse(value)
        except ValueError as exc:
            shown = "" if doc.secret else f", not {value!r}"
            raise BadConfig(f"{where} must be {exc}{shown}", param=doc.key, hint=doc.doc) from None
        origins[doc.name] = origin

    def try_to(take_one: Callable[[], None]) -> None:
        try:
            take_one()
        except BadConfig as exc:
            faults.append(exc)

    def from_file(key: str, value: object) -> None:
        if key not in by_key:
            raise BadConfig(f"unknown key {key!r} in {file}", hint=suggest(key, list(by_key)) or _KEYS_HINT, param=key)
        doc = by_key[key]
        if doc.parse in _PATHS and isinstance(value, str) and value and value[0] != "~":
            value = str(file.absolute().parent / value)  # from where the file lies, not from where somebody stood
        take(doc, value, f"file {file}", f"{key} in {file}")

    def from_env(name: str, raw: str) -> None:
        if name not in by_env:
            hint = suggest(name, [*by_env, *_OTHER_ENV], "TIERD_") or _KEYS_HINT
            raise BadConfig(f"unknown variable {name}", hint=hint, param=name)
        if raw or by_env[name].parse is text or by_env[name].parse is listen_address:
            take(by_env[name], raw, f"env {name}", name)

    file, table = path or config_file(env), dict[str, object]()
    try_to(lambda: table.update(read_file(file, must_exist=path is not None or bool(env.get("TIERD_CONFIG")))))
    for key, value in table.items():
        try_to(functools.partial(from_file, key, value))
    for name, raw in sorted(env.items()):
        if name.startswith("TIERD_") and name not in _OTHER_ENV and not name.startswith("TIERD_TEST_"):
            try_to(functools.partial(from_env, name, raw))
    by_name = {doc.name: doc for doc in docs}
    for name, value in flags.items():
        if value is not None:
            doc = by_name[name]
            take(doc, value, f"flag {doc.flag}", doc.flag)
    settings = Settings(**values)
    try_to(lambda: _check_together(settings, origins))
    return Loaded(settings, origins), tuple(faults)


_PATHS = (existing_or_new_dir, socket_file, private_file)
_KEYS_HINT = "`tierd config show` lists every setting"


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is out of reach for other machines."""
    return host in ("localhost", "::1") or host.startswith("127.")


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of a checked `listen` value that is not empty. IPv6 hosts stand in brackets."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def _check_together(settings: Settings, origins: Mapping[str, str]) -> None:
    """Rules that hold between settings."""
    is_open = settings.listen and not is_loopback(split_listen(settings.listen)[0])
    # What the file of keys holds is looked at when the address is bound.
    if is_open and not settings.api_key and not settings.keys_file.exists():
        raise BadConfig(
            f"listen = {settings.listen!r} ({origins['listen']}) is reachable from other machines and needs an API key",
            hint="`tierd key add NAME` makes one; or set TIERD_API_KEY, or listen on 127.0.0.1",
            param="listen",
        )
    if settings.store_format != "same" and _RANK[settings.store_format] <= _RANK[settings.kv_format]:
        raise BadConfig(
            f"store_format = {settings.store_format!r} ({origins['store_format']}) is not packed more than "
            f"kv_format = {settings.kv_format!r} ({origins['kv_format']})",
            hint="leave store_format at same, choose one of fewer bits, or name a larger kv_format",
            param="store_format",
        )
    check_socket_path(settings.socket)
    _check_ladder(settings, origins)


_EXACT_FORMATS = ("auto", "fp32", "fp16", "bf16")


def _check_ladder(settings: Settings, origins: Mapping[str, str]) -> None:
    first, last = settings.kv_exact_first, settings.kv_exact_last
    what, hint = "", ""
    if first and not last:
        what = f"kv_exact_first, {first} tokens in blocks of 32 ({origins['kv_exact_first']}), needs kv_exact_last"
        hint = "for example --kv-exact-last 128"
    elif last and settings.kv_format in _EXACT_FORMATS:
        pages = "auto (fp32, or bf16 on a card)" if settings.kv_format == "auto" else settings.kv_format
        what = f"kv_exact_last = {last} ({origins['kv_exact_last']}): pages of {pages} are exact anyway"
        hint = "leave it out, or choose a packed kv_format: k8v8, k8v4, k4v8, k4v4 or fp8"
    elif last and settings.kv_mode:
        what = f"kv_exact_last = {last} ({origins['kv_exact_last']}) excludes kv_mode = {settings.kv_mode}"
        hint = "leave one of them out; requests may name the other as their kv_mode"
    if what:
        raise BadConfig(what, hint=hint, param="kv_exact_last")


# From the largest page to the smallest; where two are equal, neither is packed more. What `auto` will be depends on the
# machine: it counts as the smaller one.
_RANK = {"fp32": 0, "auto": 1, "fp16": 1, "bf16": 1, "k8v8": 2, "fp8": 3, "k8v4": 4, "k4v8": 4, "k4v4": 5}

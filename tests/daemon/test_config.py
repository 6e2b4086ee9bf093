"""Settings: order of the sources, strictness, sizes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from tierd.daemon.card_memory import CardMemory
from tierd.daemon.config import Settings, is_loopback, load, load_anyway, setting_docs, split_listen
from tierd.daemon.engine_config import EngineConfig, engine_config
from tierd.daemon.errors import BadConfig
from tierd.daemon.machine import Machine
from tierd.daemon.settled import default_mode, resolve_sizes, settle
from tierd.kernels.layout import PAGE_FORMATS, PageLayout

GB = 10**9


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment whose every directory is empty."""
    return {
        "TIERD_STATE_DIR": str(tmp_path / "state"),
        "TIERD_CACHE_DIR": str(tmp_path / "cache"),
        "TIERD_MODELS_DIR": str(tmp_path / "models"),
        "TIERD_RUNTIME_DIR": str(tmp_path / "run"),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_every_setting_is_documented() -> None:
    docs = {doc.name: doc for doc in setting_docs()}
    assert set(docs) == {field.name for field in dataclasses.fields(Settings)}
    for doc in docs.values():
        assert len(doc.doc) > 10 and doc.doc[0].islower() or doc.doc.startswith("HTTP"), doc
        assert doc.env == "TIERD_" + doc.key.upper().replace(".", "_")
        assert doc.flag == "--" + doc.key.replace("_", "-").replace(".", "-")


def test_defaults(env: dict[str, str], file: Path) -> None:
    file.touch()
    settings, origins = load({}, env, file)
    assert settings.listen == "127.0.0.1:8421"
    assert settings.keep_alive_s == 900
    assert settings.device_mem is None
    assert settings.socket == Path(env["TIERD_RUNTIME_DIR"]) / "tierd.sock"
    assert origins["listen"] == "default"
    assert origins["cache_dir"] == "env TIERD_CACHE_DIR"


def test_order_of_the_sources(env: dict[str, str], file: Path) -> None:
    file.write_text('threads = 1\nmax_streams = 1\nmax_queue = 1\nctx = "32k"\n')
    env |= {"TIERD_MAX_STREAMS": "2", "TIERD_MAX_QUEUE": "2"}
    settings, origins = load({"max_queue": "3", "threads": None}, env, file)
    assert (settings.threads, settings.max_streams, settings.max_queue, settings.ctx) == (1, 2, 3, 32768)
    assert origins["threads"] == f"file {file}"
    assert origins["max_streams"] == "env TIERD_MAX_STREAMS"
    assert origins["max_queue"] == "flag --max-queue"


def test_every_setting_can_come_from_every_source(env: dict[str, str], file: Path, tmp_path: Path) -> None:
    texts = {
        "models_dir": str(tmp_path / "m"), "cache_dir": str(tmp_path / "c"), "socket": str(tmp_path / "s"),
        "listen": "localhost:1", "api_key": "k", "device_mem": "1GB", "host_mem": "2GiB", "nvme_mem": "0",
        "weights_mem": "3GB", "host_weights_mem": "4GB", "card": "off",
        "missing_experts": "fetch", "speculate": "off", "kv_mode": "window=64", "draft": "smollm2:135m",
        "nvme_min_free": "auto", "nvme_daily_writes": "50GB", "yield_device_mem": "2GB",
        "threads": "3", "kv_exact_first": "0", "kv_exact_last": "0",
        "kv_format": "bf16", "store_format": "k8v8", "ctx": "4096", "max_batch": "64",
        "max_streams": "4", "max_queue": "5", "keep_alive": "never", "log_level": "debug", "log_format": "json",
        "offline": "true", "default_model": "x", "keys_file": str(tmp_path / "k.json"),
        "batches_dir": str(tmp_path / "b"),
        "log_bytes": "1MiB", "log_files": "7", "compat.strip_attribution": "false",
        "allowed_hosts": "tierd.example,other.example:80", "origins": "http://localhost:3000",
        "max_loaded": "2", "pinned_models": "smollm2:135m,other",
    }  # fmt: skip
    assert set(texts) == {doc.key for doc in setting_docs()}
    file.write_text("\n".join(f'{key} = "{value}"' for key, value in texts.items()))
    from_file = load({}, {}, file)
    file.write_text("")
    from_env = load({}, {doc.env: texts[doc.key] for doc in setting_docs()}, file)
    from_flags = load({doc.name: texts[doc.key] for doc in setting_docs()}, {}, file)
    assert from_file.settings == from_env.settings == from_flags.settings
    assert from_file.settings.host_mem == 2 << 30
    assert from_file.settings.keep_alive_s is None
    assert from_file.settings.offline is True
    assert from_file.settings.allowed_hosts == ("tierd.example", "other.example:80")
    for loaded, kind in ((from_file, "file "), (from_env, "env "), (from_flags, "flag ")):
        assert all(origin.startswith(kind) for origin in loaded.origins.values())


def test_relative_paths_of_a_file_start_where_the_file_lies(env: dict[str, str], file: Path) -> None:
    file.write_text('models_dir = "here"\n')
    del env["TIERD_MODELS_DIR"]
    assert load({}, env, file).settings.models_dir == file.parent / "here"


@pytest.mark.parametrize(
    ("text", "where", "hint"),
    [
        ("device_men = 1", "unknown key 'device_men' in", "did you mean 'device_mem'?"),
        ("zzzz = 1", "unknown key 'zzzz' in", "tierd config show"),
        ("threads = 'many'", "threads in", "threads"),
        ("threads = true", "threads in", ""),
        ("offline = 1", "offline in", ""),
        ("device_mem = '6XB'", "device_mem in", ""),
        ("device_mem = -1", "device_mem in", ""),
        ("[daemon]\nthreads = 1", "unknown key 'daemon.threads'", ""),
        ("threads = ", "not valid TOML", ""),
    ],
)
def test_bad_files_name_the_file(env: dict[str, str], file: Path, text: str, where: str, hint: str) -> None:
    file.write_text(text)
    with pytest.raises(BadConfig) as caught:
        load({}, env, file)
    assert where in caught.value.message and str(file) in caught.value.message
    assert hint in (caught.value.hint or "")
    assert caught.value.exit_code == 78


def test_a_bad_variable_is_named(env: dict[str, str], file: Path) -> None:
    file.touch()
    with pytest.raises(BadConfig, match="TIERD_THREADS must be a whole number from 0 to 1024, not 'x'"):
        load({}, {**env, "TIERD_THREADS": "x"}, file)
    with pytest.raises(BadConfig, match="unknown variable TIERD_THREAD") as caught:
        load({}, {**env, "TIERD_THREAD": "1"}, file)
    assert caught.value.hint == "did you mean 'TIERD_THREADS'?"


def test_a_bad_flag_is_named(env: dict[str, str], file: Path) -> None:
    file.touch()
    formats = "auto, fp32, fp16, bf16, fp8, k8v8, k8v4, k4v8, k4v4"
    with pytest.raises(BadConfig, match=f"--kv-format must be one of {formats}, not 'int8'"):
        load({"kv_format": "int8"}, env, file)


def test_a_memory_mode(env: dict[str, str], file: Path) -> None:
    file.touch()
    assert load({"kv_mode": "window=64, sinks=4"}, env, file).settings.kv_mode == "sinks=4,window=64"
    assert load({}, env | {"TIERD_KV_MODE": "exact"}, file).settings.kv_mode == ""
    with pytest.raises(BadConfig, match=r"TIERD_KV_MODE must be a mode such as .* a window of 16 .* not 'window=3'"):
        load({}, env | {"TIERD_KV_MODE": "window=3"}, file)


def test_exact_tokens_beside_packed_pages(env: dict[str, str], file: Path) -> None:
    file.write_text("")
    settings = load({"kv_format": "k8v4", "kv_exact_first": 4, "kv_exact_last": "100"}, env, file).settings
    assert (settings.kv_exact_first, settings.kv_exact_last) == (32, 128)
    assert default_mode(settings) == "exact_first=32,exact_last=128"
    assert default_mode(load({"kv_mode": "window=64"}, env, file).settings) == "window=64"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_exact_last": 64}, "flag --kv-exact-last.: pages of auto .fp32, or bf16 on a card. are exact anyway"),
        ({"kv_exact_last": 64, "kv_format": "bf16"}, "pages of bf16 are exact anyway"),
        ({"kv_exact_first": 4, "kv_format": "k8v8"}, "kv_exact_first, 32 tokens in blocks of 32 .*, needs"),
        ({"kv_exact_last": 64, "kv_format": "k8v8", "kv_mode": "window=64"}, "excludes kv_mode = window=64"),
        ({"kv_exact_last": 70000, "kv_format": "k8v8"}, "a whole number from 0 to 65536"),
        ({"kv_exact_last": "-1", "kv_format": "k8v8"}, "a whole number from 0 to 65536"),
    ],
)
def test_exact_tokens_that_make_no_sense(
    env: dict[str, str], file: Path, flags: dict[str, object], message: str
) -> None:
    file.write_text("")
    with pytest.raises(BadConfig, match=message) as caught:
        load(flags, env, file)
    assert caught.value.hint


def test_every_page_format_is_a_setting(env: dict[str, str], file: Path) -> None:
    file.touch()
    for name in PAGE_FORMATS:
        assert load({"kv_format": name}, env, file).settings.kv_format == name


def test_a_secret_is_not_shown(env: dict[str, str], file: Path) -> None:
    file.touch()
    with pytest.raises(BadConfig) as caught:
        load({"api_key": "hush\nhush"}, env, file)
    assert "hush" not in str(caught.value)


def test_a_missing_file_is_an_error_only_when_it_was_named(env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="no config file"):
        load({}, {**env, "TIERD_CONFIG": str(tmp_path / "none")})
    with pytest.raises(BadConfig, match="no config file"):
        load({}, env, tmp_path / "none")


def test_an_unreadable_file(env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="cannot read"):
        load({}, env, tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match="not valid TOML"):
        load({}, env, tmp_path / "binary")


def test_beyond_loopback_needs_a_key(env: dict[str, str], file: Path) -> None:
    file.touch()
    with pytest.raises(BadConfig, match="needs an API key"):
        load({"listen": "0.0.0.0:8421"}, env, file)
    assert load({"listen": "0.0.0.0:8421", "api_key": "k"}, env, file).settings.listen == "0.0.0.0:8421"
    assert load({"listen": ""}, env, file).settings.listen == ""
    assert load({"listen": "[::1]:80"}, env, file).settings.listen == "[::1]:80"


def test_a_socket_path_that_no_kernel_binds(env: dict[str, str], file: Path) -> None:
    file.touch()
    with pytest.raises(BadConfig, match="the system allows 107"):
        load({"socket": "/" + "x" * 107}, env, file)


def test_listen_parts() -> None:
    assert split_listen("127.0.0.1:80") == ("127.0.0.1", 80)
    assert split_listen("[::1]:80") == ("::1", 80)
    assert is_loopback("127.1.2.3") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("192.168.1.2")


def test_auto_pages_are_those_of_what_computes(env: dict[str, str], file: Path) -> None:
    file.touch()
    machine = Machine(16 * GB, 12 * GB, 100 * GB, CardMemory("a card", 24 * GB, 20 * GB))
    for flags, wanted in (
        ({}, "bf16"), ({"card": "off"}, "fp32"), ({"kv_format": "k8v8"}, "k8v8"), ({"kv_format": "fp32"}, "fp32"),
    ):  # fmt: skip
        settled, used = settle(load(flags, env, file).settings, machine)
        assert settled.kv_format == wanted and (used.card is None) == (flags.get("card") == "off")
        assert settle(settled, used) == (settled, used)
    assert settle(load({}, env, file).settings, machine._replace(card=None))[0].kv_format == "fp32"


def test_resolve_keeps_what_was_asked_for(env: dict[str, str], file: Path) -> None:
    file.touch()
    settings = load({"device_mem": "1GB", "nvme_mem": "0"}, env, file).settings
    sizes = resolve_sizes(settings, Machine(16 * GB, 12 * GB, 100 * GB))
    assert sizes == (GB, 1_800_000_000, 0, 5 * GB, 8 * GB, None)


def test_engine_config_survives_json(env: dict[str, str], file: Path, tmp_path: Path) -> None:
    file.touch()
    settings = load({"ctx": "8k", "max_streams": 4}, env, file).settings
    config = engine_config(settings, resolve_sizes(settings, Machine(GB, GB, GB)), tmp_path / "model")
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    assert (config.context, config.max_streams) == (8192, 4)
    assert config.cache_dir == str(settings.cache_dir / "kv")


def test_a_disk_tier_that_nobody_turned_off_says_why_it_is_off(env: dict[str, str], tmp_path: Path) -> None:
    def reason(disk: int, **values: str) -> str:
        settings, _ = load(dict(values), env)
        return engine_config(settings, resolve_sizes(settings, Machine(GB, GB, disk)), tmp_path).nvme_off_reason

    assert "too little free space" in reason(100 << 20)
    assert "/proc/nope/kv can't be made (" in reason(0, cache_dir="/proc/nope")
    assert reason(GB) == "" and reason(100 << 20, nvme_mem="0") == "" and reason(0, nvme_mem="1GB") == ""


def test_a_table_of_the_file_and_its_other_spellings(env: dict[str, str], file: Path) -> None:
    file.write_text("[compat]\nstrip_attribution = false\n")
    loaded = load({}, env, file)
    assert not loaded.settings.strip_attribution and loaded.origins["strip_attribution"] == f"file {file}"
    assert load({}, env | {"TIERD_COMPAT_STRIP_ATTRIBUTION": "yes"}, file).settings.strip_attribution
    file.write_text("[compat]\nstrip_atribution = false\n")
    with pytest.raises(BadConfig, match="compat.strip_atribution"):
        load({}, env, file)
    file.write_text('[listen]\nport = "1"\n')
    with pytest.raises(BadConfig, match="listen.port"):
        load({}, env, file)


def test_faults_leave_the_other_values_as_they_were_set(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('threads = "many"\nmax_queu = 3\nmax_streams = 5\n')
    env = {"TIERD_MAX_QUEUE": "x", "TIERD_NONSENSE": "1", "TIERD_LOG_FILES": "7"}
    (settings, origins), faults = load_anyway({}, env, file)
    assert (settings.threads, settings.max_streams, settings.max_queue, settings.log_files) == (0, 5, 512, 7)
    assert origins["threads"] == "default" and origins["max_streams"] == f"file {file}"
    told = [fault.message.split(" ")[0] for fault in faults]
    assert told == ["threads", "unknown", "TIERD_MAX_QUEUE", "unknown"]
    with pytest.raises(BadConfig, match="threads in"):
        load({}, env, file)


def test_a_file_that_is_no_toml_is_one_fault(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("threads = [\n")
    (settings, _), faults = load_anyway({"max_streams": "3"}, {}, file)
    assert settings.max_streams == 3 and len(faults) == 1 and "not valid TOML" in faults[0].message


def test_a_flag_that_is_wrong_is_never_passed_over(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="--threads"):
        load_anyway({"threads": "many"}, {})


@pytest.mark.parametrize("kv_format", PAGE_FORMATS)
def test_the_disk_can_only_hold_what_is_packed_more(env: dict[str, str], kv_format: str) -> None:
    sizes = {name: PageLayout(30, 3, 64, name).record_bytes for name in PAGE_FORMATS}
    for store_format in PAGE_FORMATS:
        flags = {"kv_format": kv_format, "store_format": store_format}
        if store_format == "fp32" or sizes[store_format] >= sizes[kv_format]:
            with pytest.raises(BadConfig, match="store.format"):
                load(flags, env)
        else:
            assert load(flags, env).settings.page_formats == f"{kv_format} stored {store_format}"
    assert load({"kv_format": kv_format}, env).settings.page_formats == kv_format

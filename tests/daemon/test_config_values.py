"""Values of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierd.daemon import config_values as values


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6 * 10**9), ("512MiB", 512 << 20), ("0", 0), ("1.5 gb", 1_500_000_000), ("4k", 4000), ("1TiB", 1 << 40),
        ("7", 7), (7, 7), ("10b", 10), (" 2 MB ", 2_000_000), ("4611686018427387903", (1 << 62) - 1),
    ],
)  # fmt: skip
def test_sizes(text: object, size: int) -> None:
    assert values.size_bytes(text) == size
    assert values.size_or_auto(text) == size


@pytest.mark.parametrize("bad", ["", "GB", "-1", "6XB", "1e9", "1,5GB", -1, 1.5, True, None, [], "auto", "9999999TB"])
def test_bad_sizes(bad: object) -> None:
    with pytest.raises(ValueError, match="a size such as 6GB"):
        values.size_bytes(bad)


def test_auto() -> None:
    assert values.size_or_auto("auto") is None
    with pytest.raises(ValueError, match="or auto"):
        values.size_or_auto("x")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("15m", 900), ("1.5h", 5400), ("2d", 172800), (900, 900), (0, 0), (1.5, 1.5)]
    + [("never", None)],
)
def test_durations(text: object, seconds: float | None) -> None:
    assert values.duration_s(text) == seconds


@pytest.mark.parametrize("bad", ["", "m", "-5", "1w", -1, True, None, float("nan"), float("inf")])
def test_bad_durations(bad: object) -> None:
    with pytest.raises(ValueError, match="a time such as"):
        values.duration_s(bad)


@pytest.mark.parametrize(("text", "tokens"), [(0, 0), ("0", 0), ("8192", 8192), ("32k", 32768), (16, 16)])
def test_contexts(text: object, tokens: int) -> None:
    assert values.context_tokens(text) == tokens


@pytest.mark.parametrize("bad", ["-1", 15, "1.5k", True, "99999k", ""])
def test_bad_contexts(bad: object) -> None:
    with pytest.raises(ValueError, match="number of tokens"):
        values.context_tokens(bad)


def test_booleans() -> None:
    assert values.boolean(True) is True and values.boolean("Yes") is True and values.boolean("0") is False
    for bad in (1, 0, "", "maybe", None):
        with pytest.raises(ValueError, match="true or false"):
            values.boolean(bad)


@pytest.mark.parametrize("good", ["127.0.0.1:8421", "localhost:0", "[::1]:80", "my-host.lan:65535"])
def test_listen(good: str) -> None:
    assert values.listen_address(good) == good


def test_listen_off() -> None:
    assert values.listen_address("") == values.listen_address("off") == ""


@pytest.mark.parametrize("bad", ["8421", ":80", "::1:80", "host:", "host:65536", "a b:1", 80, None, "http://x:1"])
def test_bad_listen(bad: object) -> None:
    with pytest.raises(ValueError, match="host:port"):
        values.listen_address(bad)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert values.socket_file("~/s") == tmp_path / "s"
    assert values.existing_or_new_dir(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="a directory"):
        values.existing_or_new_dir(str(tmp_path / "file"))
    for bad in ("", "  ", "a\0b", 5, None):
        with pytest.raises(ValueError, match="a path"):
            values.socket_file(bad)


def test_text_and_words() -> None:
    assert values.text("key") == "key" and values.text("") == ""
    assert values.model_reference(" m ") == "m"
    assert values.choice("a", "b")("A") == "a"
    assert values.count(1, 5)("5") == 5
    for parse, bad in ((values.text, "a\nb"), (values.text, 5), (values.model_reference, " "), (values.choice("a"), 1)):
        with pytest.raises(ValueError, match=r"."):
            parse(bad)
    for bad_count in (0, 6, "6", "x", 1.0, True):
        with pytest.raises(ValueError, match="from 1 to 5"):
            values.count(1, 5)(bad_count)


@pytest.mark.parametrize("bad", ["", "1KiB", "2GiB", "x", -1, None])
def test_log_sizes_are_sensible(bad: object) -> None:
    assert values.log_size_bytes("64KiB") == 64 << 10
    with pytest.raises(ValueError, match="from 64KiB to 1GiB"):
        values.log_size_bytes(bad)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("tierd.example", ("tierd.example",)), ("A.b:80, [::1]:90 ,c", ("a.b:80", "[::1]:90", "c")), ("", ()), ([], ()),
        (["x.y", "z"], ("x.y", "z")),
    ],
)  # fmt: skip
def test_host_names(given: object, names: tuple[str, ...]) -> None:
    assert values.host_names(given) == names


@pytest.mark.parametrize("bad", ["*", "a b", "http://a", "a/b", "a:99999999", [1], {"a": 1}, 7, ["a"] * 65, "-a"])
def test_bad_host_names(bad: object) -> None:
    with pytest.raises(ValueError, match="host names"):
        values.host_names(bad)


def test_origins() -> None:
    given = ["http://localhost:3000", "https://chat.example", "chrome-extension://abc", "http://[::1]:80"]
    assert values.web_origins(",".join(given)) == values.web_origins(given) == tuple(given)
    for bad in ("*", "null", "localhost", "http://a/", "http://a/b", "http://*.example", "http://"):
        with pytest.raises(ValueError, match="origins"):
            values.web_origins(bad)


def test_private_file(tmp_path: Path) -> None:
    assert values.private_file(str(tmp_path / "keys")) == tmp_path / "keys"
    with pytest.raises(ValueError, match="a file"):
        values.private_file(tmp_path)


def test_a_model_or_none() -> None:
    assert values.model_or_none(" smollm2:135m ") == "smollm2:135m"
    assert values.model_or_none("") == values.model_or_none("off") == ""
    for bad in ("two words", 5, None):
        with pytest.raises(ValueError, match="or empty"):
            values.model_or_none(bad)

"""What the verbs share."""

from __future__ import annotations

import sys

import click
import pytest

from tierd.daemon import cli_common as common
from tierd.daemon.config import setting_docs
from tierd.daemon.errors import BadRequest
from tierd.daemon.protocol import Event


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_table(("A", "LONG"), [("wide cell", 1), ("x\ny", 22)])
    assert capsys.readouterr().out == "A          LONG\nwide cell  1\nx y        22\n"


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = common.Progress()
    for done in range(0, 101):
        progress("download", done * 1_000_000, 100_000_000)
    progress("import", 0, 0)
    progress.finish()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert lines[0] == "download 0% 0 B of 100 MB" and lines[10] == "download 100% 100 MB of 100 MB"


def test_progress_tells_the_share_that_is_done_also_of_a_total_that_grows(capsys: pytest.CaptureFixture[str]) -> None:
    progress = common.Progress()
    for done, total in ((0, 1), (1, 4), (2, 4), (4, 4)):
        progress("kernels", done, total)
    told = ["kernels 0% 0 of 1", "kernels 25% 1 of 4", "kernels 50% 2 of 4", "kernels 100% 4 of 4"]
    assert capsys.readouterr().err.splitlines() == told


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = common.Progress()
    progress("weights\x1b[2J", 5, 10)
    progress.on_event(Event(1, "progress", {"text": "odd", "done": "x", "total": None}))
    progress.finish()
    said = capsys.readouterr().err
    assert "█" in said and "5 of 10" in said and "[2J" in said and "\x1b[2J" not in said
    assert said.endswith("\n")


def test_given_flags_leave_secrets_out() -> None:
    flags = {"threads": "2", "offline": True, "api_key": "hush", "listen": "", "host_mem": None}
    assert common.given_flags(flags) == ["--listen=", "--threads=2", "--offline"]
    assert common.given_flags({"offline": False}) == ["--no-offline"]


def test_settings_options_make_a_flag_of_every_setting() -> None:
    @click.command()
    @common.settings_options(without=("ctx",))
    def verb(flags: dict[str, object]) -> None:
        """Take them."""

    assert {option.name for option in verb.params} == {doc.name for doc in setting_docs()} - {"ctx"}


def test_confirm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    common.confirm("Sure?", yes=True)
    with pytest.raises(BadRequest) as caught:
        common.confirm("Sure?", yes=False)
    assert caught.value.hint == "add --yes"
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: "Yes\n", raising=False)
    common.confirm("Sure?", yes=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: "\n", raising=False)
    with pytest.raises(click.exceptions.Exit):
        common.confirm("Sure?", yes=False)


def test_a_draft_model_in_a_line() -> None:
    draft = {"model": "small", "memory_bytes": 138_000_000, "drafted_tokens": 0, "right_drafts": 0, "off": ""}
    assert common.draft_shown(draft) == "small, 138 MB on the processors, has not guessed yet"
    some = draft | {"drafted_tokens": 1000, "right_drafts": 640, "on": "card"}
    assert common.draft_shown(some) == "small, 138 MB on the card, 640 of 1,000 guessed tokens were right"
    assert common.draft_shown(draft | {"off": "it failed: x"}) == "small, 138 MB on the processors, off: it failed: x"
    assert common.draft_shown({}) == common.draft_shown(None) == "-"


def test_a_watched_card_in_a_line() -> None:
    told = {"state": "watching", "free_bytes": 2 * 10**9, "others_bytes": 18 * 10**9, "yielded_bytes": 15 * 10**8}
    assert common.card_shown(told) == "1.5 GB of pages gave way: others hold 18.0 GB, 2.0 GB are free"
    assert common.card_shown({**told, "yielded_bytes": 0}).startswith("no page had to give way")
    assert common.card_shown({"state": "off", "reason": "NVML: x"}) == "not watched any more: NVML: x"
    assert common.card_shown({"state": "idle"}) == "watched, when an engine computes on it"
    assert common.card_shown({"state": "unknown"}).startswith("watched, but it was not told")
    assert common.card_shown({}) == common.card_shown(None) == ""

"""Keys that the user has chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.rig import FakeFeed, running, text_of, until
from tierd.daemon.errors import BadConfig
from tierd.tui.app import actions
from tierd.tui.keymap import clash, load


def written(path: Path, text: str) -> dict[str, str]:
    file = path / "top.toml"
    file.write_text(text)
    return load(file, actions())


def test_no_file_changes_nothing(tmp_path: Path) -> None:
    assert load(tmp_path / "top.toml", actions()) == {}


def test_keys_are_read(tmp_path: Path) -> None:
    assert written(tmp_path, '[keys]\n"app.quit" = "ctrl+q,x"\n') == {"app.quit": "ctrl+q,x"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[keys", "not valid TOML"), ("[key]\n", "'key'"), ("keys = 3\n", "not a table"),
        ('[keys]\n"app.quitt" = "x"\n', "app.quitt"), ('[keys]\n"app.quit" = 3\n', "app.quit"),
        ('[keys]\n"app.quit" = "a,,b"\n', "app.quit"), ('[keys]\n"app.quit" = ""\n', "app.quit"),
        ('[keys]\n"app.quit" = "x"\n"app.help" = "x"\n', "same key 'x'"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_keymap_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadConfig, match=named):
        written(tmp_path, text)


def test_a_mistyped_action_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(BadConfig) as caught:
        written(tmp_path, '[keys]\n"app.quitt" = "x"\n')
    assert "app.quit" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('"act.pin" = "q"', "act.pin and app.quit .*'q'"), ('"app.theme" = "x,z"', "app.theme and app.maximize .*'z'"),
        ('"app.theme" = "x, k"', "app.theme and list.up .*'k'"), ('"app.quit" = "x,y"\n"act.pin" = "y,P"', "'y'"),
        ('"map.fit" = "left"', "map.fit and map.left"), ('"prefixes.sort" = "j"', "prefixes.sort and list.down"),
        ('"app.help" = "question_mark,p"', "app.help and act.pin"),
        ('"confirm.yes" = "n"', "confirm.yes and confirm.no"),
    ],
)  # fmt: skip
def test_a_key_of_another_action_is_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadConfig, match=named):
        written(tmp_path, f"[keys]\n{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        '"app.quit" = "z"\n"app.maximize" = "q"',  # changed places
        '"act.pin" = "q"\n"app.quit" = "ctrl+q"', '"map.fit" = "s"', '"help.close" = "escape,p"', '"list.up" = "up,o"',
        '"app.theme" = "t"',
    ],
)  # fmt: skip
def test_a_key_that_means_one_thing_at_a_time_is_taken(tmp_path: Path, text: str) -> None:
    assert written(tmp_path, f"[keys]\n{text}\n")


def test_no_key_means_two_things_by_itself() -> None:
    assert clash({}, actions()) is None


async def test_an_action_hears_to_its_new_key_alone(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, (100, 30), keymap={"app.pause": "x"}) as (app, pilot):
        await pilot.press("space")
        await pilot.pause()
        assert not app.paused
        await pilot.press("x")
        await until(pilot, lambda: app.paused)


async def test_help_tells_the_new_key(busy_feed: FakeFeed) -> None:
    async with running(busy_feed, (100, 40), keymap={"app.pause": "ctrl+y"}) as (app, pilot):
        await pilot.press("f1")
        await until(pilot, lambda: "ctrl+y" in text_of(app))

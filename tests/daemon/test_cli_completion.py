"""Completion scripts, and the words that they get."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tierd.daemon.cli import VERBS, main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_TIERD_COMPLETE" in script and "tierd" in script
    if program := shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True, timeout=30)


def words(line: str, number: int) -> list[str]:
    environment = os.environ | {"_TIERD_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(number)}
    done = subprocess.run(
        [sys.executable, "-m", "tierd.daemon.cli"], env=environment, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_verbs_are_completed() -> None:
    assert set(words("tierd ", 1)) == set(VERBS)


def test_words_behind_a_verb_are_completed() -> None:
    assert words("tierd key a", 2) == ["add"]


def test_a_word_that_is_no_verb_breaks_nothing() -> None:
    assert "run" in words("tierd nonsense ", 2)  # as click has it: the word is skipped

"""batch --exclusive: the machine is asked for, and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_batch_rig import COMMAND, Front, batch_cli, chat, write
from cli_rig import Cli

from tierd.daemon.errors import Conflict

GIVEN = {"streams": 8, "why": ["8 sequences at once"], "unloaded": ["beta"], "planned_tokens_per_s": 12.5}
ALONE = (*COMMAND, "--exclusive")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return batch_cli(tmp_path, monkeypatch, capsys)


def alone(front: Front, op: str) -> list[dict[str, Any]]:
    return [dict(request.args) for request in front.requests if request.op == op]


def test_the_machine_is_asked_for_and_given_back(cli: Cli) -> None:
    write(*(chat(str(n), "echo a b c", max_tokens=10) for n in range(30)))
    with Front(cli.socket) as front:
        front.answers |= {"reserve": GIVEN, "reserved": {}, "release": {}}
        front.width = 10  # some wait for the place of one that ends
        said = cli(*ALONE)
    assert said.code == 0 and "30 answered" in said.out, said.err
    (wish,) = alone(front, "reserve")
    assert (wish["model"], wish["requests"], wish["answer_tokens"], wish["streams"]) == ("alpha", 30, 10, None)
    assert "unloaded for it: beta; loaded again" in said.err
    assert front.most == 10 and "8 sequences at once" in said.err and "planned: 12.5 tokens/s" in said.err
    assert alone(front, "reserved")[-1]["done"] == 30 and len(alone(front, "release")) == 1
    ops = [request.op for request in front.requests]
    assert ops.index("reserve") < ops.index("generate") < ops.index("release")


def test_as_many_at_once_as_asked_for_alone(cli: Cli) -> None:
    write(*(chat(str(n), "echo a") for n in range(4)))
    with Front(cli.socket) as front:
        front.answers |= {"reserve": GIVEN | {"streams": 3}, "reserved": {}, "release": {}}
        assert cli(*ALONE, "--concurrency", "3").code == 0
    assert alone(front, "reserve")[0]["streams"] == 3


def test_only_what_is_not_answered_is_planned_for(cli: Cli) -> None:
    write(chat("1", "echo a"), chat("2", "drop"))
    with Front(cli.socket) as front:
        front.answers |= {"reserve": GIVEN, "reserved": {}, "release": {}}
        assert cli(*COMMAND, "--concurrency", "1").code == 69
        assert cli(*ALONE).code == 69
    assert alone(front, "reserve")[0]["requests"] == 1


def test_a_machine_that_is_not_given_runs_nothing(cli: Cli) -> None:
    write(chat("1", "echo a"))
    with Front(cli.socket) as front:
        front.answers["reserve"] = Conflict("another batch has the machine for itself")
        said = cli(*ALONE)
        assert front.submits == []
    assert said.code == 1 and "another batch has the machine" in said.err


def test_the_machine_is_for_one_model(cli: Cli) -> None:
    write(chat("1", "echo a"), chat("2", "echo a", model="beta"))
    with Front(cli.socket) as front:
        said = cli(*ALONE)
        assert alone(front, "reserve") == []
    assert said.code == 2 and "2 models" in said.err and "--model" in said.err

"""batch: through a fake front, and through a real one with a fake engine where processes are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_rig import Cli
from fake_engine import whole_text
from fake_front import USAGE, FakeFront
from front_harness import Daemon, make_model

from tierd.daemon import batch_run
from tierd.daemon.cli_batch import Tally
from tierd.daemon.errors import Conflict, EngineFailed, ModelNotFound, Reserved, TierdError, TooBusy, to_wire
from tierd.daemon.limits import MAX_PRIORITY
from tierd.daemon.protocol import Event, Request, encode, to_submit

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    cli = Cli(tmp_path, monkeypatch, capsys)
    make_model(cli.home / "models", "alpha")
    monkeypatch.setattr(batch_run, "FIRST_PAUSE_S", 0.001)
    monkeypatch.chdir(tmp_path)
    return cli


class Front(FakeFront):
    """A front that knows the model alpha.

    `faults`: the first errors of each prompt. `width`: nothing is answered before so many requests came at once.
    """

    def __init__(self, path: Path, *faults: TierdError) -> None:
        super().__init__(path)
        self.answers["show"] = {"name": "alpha"}
        self.faults = faults
        self.live = self.most = self.width = 0
        self._reached = asyncio.Event()
        self._tries: dict[str, int] = {}

    async def _generate(self, request: Request, writer: asyncio.StreamWriter) -> None:
        prompt = str(to_submit(request.args).prompt or request.args.get("messages"))
        self._tries[prompt] = tried = self._tries.get(prompt, 0) + 1
        if tried <= len(self.faults):
            writer.write(encode(Event(request.id, "failed", dict(to_wire(self.faults[tried - 1])))))
            return
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            if self.most >= self.width:
                self._reached.set()
            await self._reached.wait()
            await super()._generate(request, writer)
        finally:
            self.live -= 1


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    body = {"model": "alpha", "messages": [{"role": "user", "content": text}]} | body
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETION, "body": {"model": "alpha"} | body}


def write(*lines: dict[str, Any]) -> None:
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers() -> dict[str, dict[str, Any]]:
    """The lines of the output by their custom_id, each there once."""
    lines = [json.loads(text) for text in Path("out.jsonl").read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


COMMAND = ("batch", "in.jsonl", "-o", "out.jsonl")


def test_both_kinds_of_requests(cli: Cli) -> None:
    write(chat("c", "echo one two"), completion("t", prompt="echo three", max_tokens=5, echo=True))
    with Front(cli.socket) as front:
        said = cli(*COMMAND)
    assert said.code == 0, said.err
    found = answers()
    body = found["c"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "one two "
    assert body["choices"][0]["finish_reason"] == "stop" and body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens"] == USAGE["prompt_tokens"]
    assert found["c"]["response"]["status_code"] == 200 and found["c"]["error"] is None
    assert found["t"]["response"]["body"]["choices"][0]["text"] == "echo threethree "
    assert {submit.priority for submit in front.submits} == {MAX_PRIORITY}  # behind whoever asks
    assert "2 requests, 2 answered; 3 tokens" in said.out


def test_it_loads_no_http_library() -> None:
    code = "import sys, tierd.daemon.cli_batch; print(*[m for m in ('aiohttp', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_vectors(cli: Cli) -> None:
    body = {"model": "alpha", "input": ["a", "b"]}
    write({"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": body})
    with Front(cli.socket) as front:
        vector = array("f", [0.0, 1.0]).tobytes()
        front.answers["embed"] = {"vectors": [vector] * 2, "usage": {"prompt_tokens": 5, "cached_tokens": 0}}
        assert cli(*COMMAND).code == 0
    body = answers()["e"]["response"]["body"]
    assert [item["embedding"] for item in body["data"]] == [[0.0, 1.0]] * 2 and body["usage"]["prompt_tokens"] == 5
    assert front.requests[-1].args["priority"] == MAX_PRIORITY


def test_several_prompts_of_one_request_are_its_choices(cli: Cli) -> None:
    write(completion("t", prompt=["echo a", "echo b c"]))
    with Front(cli.socket):
        assert cli(*COMMAND).code == 0
    body = answers()["t"]["response"]["body"]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a "), (1, "b c ")]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    assert body["usage"]["completion_tokens"] == 2 * USAGE["completion_tokens"]


def test_an_error_is_a_line_and_the_rest_goes_on(cli: Cli) -> None:
    write(
        chat("long", "refuse"), chat("stream", "echo a", stream=True), chat("field", "echo a", colour="red"),
        chat("surrogate", "echo a", seed=1 << 70), chat("good", "echo a"),
    )  # fmt: skip
    with Front(cli.socket):
        said = cli(*COMMAND)
    assert said.code == 0 and "1 answered, 4 with an error" in said.out
    found = answers()
    assert found["long"]["error"]["code"] == "context_length_exceeded"
    assert found["long"]["response"]["status_code"] == 400
    assert "8192" in found["long"]["response"]["body"]["error"]["message"]
    assert "no streams" in found["stream"]["error"]["message"]
    assert "colour" in found["field"]["error"]["message"]
    assert found["surrogate"]["response"]["status_code"] == 400
    assert found["good"]["error"] is None


def test_bad_lines_are_told_before_anything_runs(cli: Cli) -> None:
    write(chat("a", "echo a"), chat("a", "echo b"), completion("b") | {"url": "/v1/moderations"})
    with Front(cli.socket) as front:
        said = cli(*COMMAND)
        assert front.submits == []
    assert said.code == 2
    assert "line 2: custom_id 'a' is that of line 1 too" in said.err
    assert "line 3: url '/v1/moderations' is not served" in said.err
    assert "2 lines of in.jsonl cannot be used; nothing was run" in said.err
    assert not Path("out.jsonl").exists()


def test_a_model_that_is_not_there_is_told_before_anything_runs(cli: Cli) -> None:
    write(chat("a", "echo a", model="gpt-9"))
    with Front(cli.socket) as front:
        front.answers["show"] = ModelNotFound("no model")
        said = cli(*COMMAND)
        assert front.submits == []
    assert said.code == 1 and said.hinted
    assert "line 1: there is no model 'gpt-9'" in said.err and "--model" in said.err


def test_a_model_for_all(cli: Cli) -> None:
    write(chat("a", "echo a", model="gpt-9"), completion("b", prompt="echo b", model=None))
    with Front(cli.socket) as front:
        assert cli(*COMMAND, "--model", "alpha").code == 0
    assert [submit.model for submit in front.submits] == ["alpha", "alpha"]
    assert answers()["b"]["error"] is None


def test_an_empty_input(cli: Cli) -> None:
    write()
    said = cli(*COMMAND)
    assert said.code == 2 and said.hinted and "holds no request" in said.err


def test_no_more_at_once_than_asked_for(cli: Cli) -> None:
    write(*(chat(str(n), f"echo {n} a b c") for n in range(12)))
    with Front(cli.socket) as front:
        front.width = 3
        assert cli(*COMMAND, "--concurrency", "3").code == 0
    assert front.most == 3 and front.connections == 2  # one to look, one for all requests


def test_as_many_at_once_as_the_daemon_writes(cli: Cli) -> None:
    write(*(chat(str(n), f"echo {n} a b c") for n in range(12)))
    with Front(cli.socket) as front:
        front.width = 5
        assert cli(*COMMAND, "--max-streams", "5").code == 0
    assert front.most == 5


def test_a_busy_daemon_is_asked_again(cli: Cli) -> None:
    write(chat("a", "echo a"), chat("b", "echo b"))
    with Front(cli.socket, TooBusy("full"), TooBusy("full"), TooBusy("full")):
        said = cli(*COMMAND)
    assert said.code == 0 and [line["error"] for line in answers().values()] == [None, None]


def test_while_another_batch_has_the_machine_it_waits_however_long(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "BUSY_S", 0.0)  # of an ordinary refusal: it would give up at once
    write(chat("a", "echo a"))
    with Front(cli.socket, *[Reserved("a batch has the machine")] * 3):
        assert cli(*COMMAND).code == 0
    assert answers()["a"]["error"] is None


@pytest.mark.parametrize(("deaths", "code"), [(2, None), (3, "engine_failed")])
def test_an_engine_that_dies_is_tried_again(cli: Cli, deaths: int, code: str | None) -> None:
    write(chat("a", "echo a"))
    with Front(cli.socket, *[EngineFailed("died")] * deaths):
        assert cli(*COMMAND).code == 0
    error = answers()["a"]["error"]
    assert (error and error["code"]) == code


def test_a_lost_daemon_ends_the_batch_and_the_next_call_goes_on(cli: Cli) -> None:
    write(chat("1", "echo a"), chat("2", "drop"), chat("3", "echo b"))
    with Front(cli.socket) as front:
        said = cli(*COMMAND, "--concurrency", "1")
        assert said.code == 69 and "the same command goes on" in said.err
        kept = Path("out.jsonl").read_bytes()
        assert list(answers()) == ["1"]
        front.submits.clear()
        assert cli(*COMMAND, "--concurrency", "1").code == 69
        assert [submit.messages[0].content for submit in front.submits] == ["drop"]
    assert Path("out.jsonl").read_bytes() == kept


def test_bytes_that_are_no_frame_are_the_fault_of_no_request(cli: Cli) -> None:
    write(chat("1", "echo a"), chat("2", "garbage"), chat("3", "echo b"))
    with Front(cli.socket):
        said = cli(*COMMAND, "--concurrency", "1")
    assert said.code == 1 and "0xc1 is no value" in said.err
    assert list(answers()) == ["1"]


def test_a_request_that_somebody_stops_has_no_line(cli: Cli) -> None:
    class Stopping(Front):
        async def _generate(self, request: Request, writer: asyncio.StreamWriter) -> None:
            if "stop me" in str(request.args):
                writer.write(encode(Event(request.id, "aborted", {})))
                return
            await super()._generate(request, writer)

    write(chat("1", "stop me"), chat("2", "echo a"))
    with Stopping(cli.socket):
        said = cli(*COMMAND)
    assert said.code == 1 and "1 stopped: the same command tries them again" in said.out
    assert list(answers()) == ["2"]


def test_a_finished_batch_asks_nobody(cli: Cli) -> None:
    write(chat("1", "echo a"), chat("2", "refuse"))
    with Front(cli.socket):
        assert cli(*COMMAND).code == 0
    kept = Path("out.jsonl").read_bytes()
    said = cli(*COMMAND)  # no daemon runs
    assert said.code == 0 and "2 there already" in said.out
    assert Path("out.jsonl").read_bytes() == kept


def test_json(cli: Cli) -> None:
    write(chat("1", "echo a b"), chat("2", "refuse"))
    with Front(cli.socket):
        document = cli(*COMMAND, "--json").json
    counts = {name: document[name] for name in ("total", "resumed", "answered", "failed", "stopped", "tokens")}
    assert counts == {"total": 2, "resumed": 0, "answered": 1, "failed": 1, "stopped": 0, "tokens": 2}
    assert document["output"] == "out.jsonl" and document["tokens_per_s"] > 0


def test_a_line_per_tenth_without_a_terminal(cli: Cli) -> None:
    write(*(chat(str(n), "echo a") for n in range(40)))
    with Front(cli.socket):
        said = cli(*COMMAND)
    assert len([text for text in said.err.splitlines() if " of 40 requests, " in text]) == 10


def test_one_moving_line_on_a_terminal(cli: Cli) -> None:
    write(*(chat(str(n), "echo a") for n in range(5)))
    with Front(cli.socket):
        said = cli(*COMMAND, terminal=True)
    assert "\r\x1b[K5 of 5 requests, " in said.err and "0s left" in said.err


# -- alone ----------------------------------------------------------------------------------------------------------


GIVEN = {"streams": 8, "why": ["8 sequences at once"], "planned_tokens_per_s": 12.5}
ALONE = (*COMMAND, "--exclusive")


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


def test_the_tally() -> None:
    tally = Tally(total=100, resumed=20, started_s=1000.0)
    assert tally.left_s(1010.0) is None and "- left" in tally.line(1010.0)
    tally.answered, tally.failed, tally.tokens = 15, 5, 400
    assert (tally.done, tally.left_s(1010.0), tally.tokens_per_s(1010.0)) == (40, 30.0, 40.0)
    assert tally.line(1010.0) == "40 of 100 requests, 5 with an error, 40.0 tok/s, 30s left"


# -- processes ------------------------------------------------------------------------------------------------------


# A shell's background jobs ignore SIGINT, and so does what they start: a suite that runs in one is such a thing.
HEARS_CTRL_C = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tierd.daemon.cli import main
sys.exit(main())
"""


def start(socket: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C, *COMMAND], env=os.environ | {"TIERD_SOCKET": str(socket)},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    limit_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < limit_s, "it never came true"
        time.sleep(0.02)


def lines_written() -> int:
    return Path("out.jsonl").read_bytes().count(b"\n") if Path("out.jsonl").exists() else 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
def test_a_batch_that_is_ended_goes_on(cli: Cli, daemon: Callable[..., Daemon], number: int) -> None:
    # `!still`: the first time a request of these words comes, it hangs.
    write(*(chat(str(n), f"say {n}" + " !still" * (n >= 4), max_tokens=4, temperature=0) for n in range(8)))
    running = daemon()
    running.wait()
    process = start(running.socket)
    until(lambda: lines_written() == 4)
    process.send_signal(number)
    said = process.communicate(timeout=30)[1]
    if number == signal.SIGINT:
        assert process.returncode == 130 and "the same command goes on" in said and "Traceback" not in said
    kept = Path("out.jsonl").read_bytes()
    with Path("out.jsonl").open("ab") as file:
        file.write(kept[:70])  # as if it had been killed while it wrote
    ended = cli("--socket", str(running.socket), *COMMAND)
    assert ended.code == 0 and "8 requests, 4 answered, 4 there already" in ended.out, ended.err
    assert Path("out.jsonl").read_bytes().startswith(kept)
    texts = {key: line["response"]["body"]["choices"][0]["message"]["content"] for key, line in answers().items()}
    assert texts == {str(n): whole_text(f"user:say {n}{' !still' * (n >= 4)}\n", 4) for n in range(8)}

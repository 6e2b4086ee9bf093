"""batch: through a fake front, and through a real one with a fake engine where processes are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_batch_rig import COMMAND, Front, answers, batch_cli, chat, completion, write
from cli_rig import Cli
from fake_engine import whole_text
from fake_front import USAGE
from front_harness import Daemon

from tierd.daemon import batch_run
from tierd.daemon.cli_batch import Tally
from tierd.daemon.errors import EngineFailed, ModelNotFound, Reserved, TooBusy
from tierd.daemon.limits import MAX_PRIORITY
from tierd.daemon.protocol import Event, Request, encode


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return batch_cli(tmp_path, monkeypatch, capsys)


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

"""Files of requests and answers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierd.daemon import batch
from tierd.daemon.batch import Answer, Fault, Output, Requests, Response
from tierd.daemon.errors import BadRequest, Conflict, NotFound, OutOfSpace, PermissionDenied


def line(custom_id: str, text: str = "hi", **changes: Any) -> dict[str, Any]:
    body = {"model": "alpha", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


def write(path: Path, *lines: Any) -> Path:
    texts = [text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) for text in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def answer(item: batch.Item) -> Answer:
    return Answer(item.id, item.custom_id, Response(200, "req", {"text": "ä\n"}))


def ids(requests: Requests) -> list[str]:
    return [item.custom_id for item in requests]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def finish(source: Path, target: Path, count: int) -> list[str]:
    with Output(target) as output, Requests(source, output.finished) as requests:
        done = [item for item, _ in zip(requests, range(count), strict=False)]
        for item in done:
            output.append(answer(item))
    return [item.custom_id for item in done]


# -- the input ------------------------------------------------------------------------------------------------------


def test_items_are_what_the_lines_say(source: Path) -> None:
    write(source, line("a", "größe"), "", line("b", url="/v1/completions", body={"model": "beta", "prompt": "x"}))
    with Requests(source, {}) as requests:
        found = {item.custom_id: item for item in requests}
        assert (requests.total, len(requests), requests.models) == (2, 2, {"alpha": 1, "beta": 3})
    assert json.loads(found["a"].body)["messages"][0]["content"] == "größe"
    assert (found["b"].number, found["b"].url) == (3, "/v1/completions")


def test_prompts_with_a_common_beginning_stand_together(source: Path) -> None:
    shared = [f"{group} " * 400 for group in ("alpha", "beta", "gamma")]
    inner = [shared[0] + f"{group} " * 400 for group in ("one", "two")]
    texts = {f"{group}-{n}": shared[group] + f"tail {n}" for group in (1, 2) for n in range(8)}
    texts |= {f"in{group}-{n}": inner[group] + f"tail {n}" for group in (0, 1) for n in range(8)}
    lines = [line(name, text) for name, text in texts.items()]
    random.Random(3).shuffle(lines)
    with Requests(write(source, *lines), {}) as requests:
        groups = [name.partition("-")[0] for name in ids(requests)]
    runs = [group for index, group in enumerate(groups) if index == 0 or groups[index - 1] != group]
    assert sorted(runs) == ["1", "2", "in0", "in1"]
    assert abs(runs.index("in0") - runs.index("in1")) == 1  # they share their first half


def test_models_stand_together(source: Path) -> None:
    lines = [line(f"{model}{n}", body={"model": model, "messages": []}) for n in range(4) for model in ("a", "b")]
    with Requests(write(source, *lines), {}) as requests:
        models = [name[0] for name in ids(requests)]
    assert models in (list("aaaabbbb"), list("bbbbaaaa"))


def test_equal_prompts_keep_their_order(source: Path) -> None:
    with Requests(write(source, *(line(str(n)) for n in range(12))), {}) as requests:
        assert ids(requests) == [str(n) for n in range(12)]


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ("{", "not valid JSON"),
        ("[]", "Expected object"),
        ("\xff", "not valid JSON"),
        (line("x") | {"custom_id": 3}, "custom_id"),
        ({"custom_id": "x", "method": "POST", "url": "/v1/completions"}, "body"),
        (line("x", body=[]), "body is not an object"),
        (line("x", method="GET"), "'GET' is not POST"),
        (line("x", url="/v1/moderations"), "'/v1/moderations' is not served"),
        (line("x", more=1), "more"),
        (line("a"), "'a' is that of line 1 too"),
        ("x" * (batch.MAX_LINE_BYTES + 5), "more than 16 MiB"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_used_is_named(source: Path, bad: Any, what: str) -> None:
    write(source, line("a"), bad, line("b"))
    with Requests(source, {}) as requests:
        [problem] = requests.problems
        assert problem.number == 2 and what in problem.what
        assert ids(requests) == ["a", "b"]  # and the lines around it are read


def test_problems_are_counted_beyond_those_that_are_told(source: Path) -> None:
    with Requests(write(source, *["{"] * 50), {}) as requests:
        assert (len(requests.problems), requests.problem_count) == (batch.MAX_PROBLEMS, 50)


def test_a_last_line_without_an_end_counts(source: Path) -> None:
    source.write_text(json.dumps(line("a")))
    with Requests(source, {}) as requests:
        assert ids(requests) == ["a"]


def test_an_input_that_changes_is_noticed(source: Path) -> None:
    with Requests(write(source, line("a"), line("b")), {}) as requests:
        items = iter(requests)
        next(items)
        write(source, line("a"), line("b", "other"), line("c"))
        with pytest.raises(Conflict, match="was changed"):
            next(items)


def test_what_is_no_file_is_told(source: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        Requests(source, {})
    os.mkfifo(source)
    for path in (source, tmp_path):
        with pytest.raises(BadRequest, match="no regular file"):
            Requests(path, {})


@pytest.mark.long
def test_a_large_input_is_not_held_in_memory(source: Path) -> None:
    text = "word " * 2000
    with source.open("w") as file:
        for number in range(30_000):
            file.write(json.dumps(line(str(number), text + str(number))) + "\n")
    assert source.stat().st_size > 300_000_000
    code = (
        "import resource, sys, pathlib; from tierd.daemon.batch import Requests\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "requests = Requests(pathlib.Path(sys.argv[1]), {})\n"
        "assert sum(1 for _ in requests) == 30_000\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(source)], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 24 << 10  # kB; an index of 30,000 lines and one line


# -- the output -----------------------------------------------------------------------------------------------------


def test_a_line_has_the_shape_of_openai(source: Path, target: Path) -> None:
    with Output(target) as output, Requests(write(source, line("a"), line("b")), {}) as requests:
        first, second = requests
        output.append(answer(first))
        output.append(Answer(second.id, "b", Response(400, "req", {"error": {}}), Fault("bad_request", "no")))
    good, bad = map(json.loads, target.read_text().splitlines())
    assert good == {
        "id": first.id, "custom_id": "a", "error": None,
        "response": {"status_code": 200, "request_id": "req", "body": {"text": "ä\n"}},
    }  # fmt: skip
    assert bad["error"] == {"code": "bad_request", "message": "no"} and bad["response"]["status_code"] == 400


def test_what_is_finished_is_not_given_again(source: Path, target: Path) -> None:
    write(source, *(line(str(n)) for n in range(5)))
    assert finish(source, target, 2) == ["0", "1"]
    with Output(target) as output, Requests(source, output.finished) as requests:
        assert (requests.total, ids(requests)) == (5, ["2", "3", "4"])


def test_a_line_cut_at_any_byte_is_dropped(source: Path, target: Path) -> None:
    write(source, line("0"), line("1"))
    finish(source, target, 2)
    whole = target.read_bytes()
    first = whole.index(b"\n") + 1
    for end in (first, first + 1, first + 9, (first + len(whole)) // 2, len(whole) - 1):
        target.write_bytes(whole[:end])
        with Output(target) as output, Requests(source, output.finished) as requests:
            assert ids(requests) == ["1"]
        assert target.read_bytes() == whole[:first]


def test_zeros_that_a_power_cut_left_are_dropped(source: Path, target: Path) -> None:
    write(source, line("0"), line("1"))
    finish(source, target, 1)
    with target.open("ab") as file:
        file.write(b"\0" * 100)
    assert finish(source, target, 5) == ["1"]
    assert len([json.loads(text) for text in target.read_text().splitlines()]) == 2


@pytest.mark.parametrize("text", ["precious", "precious\n", '{"id":"batch_req_x"}\n', '{"id":"other"'])
def test_a_file_of_somebody_else_is_left_alone(target: Path, text: str) -> None:
    target.write_text(text)
    with pytest.raises(Conflict, match="was not written by"):
        Output(target)
    assert target.read_text() == text


def test_the_input_is_no_output(source: Path) -> None:
    before = write(source, line("a")).read_bytes()
    with pytest.raises(Conflict):
        Output(source)
    assert source.read_bytes() == before


@pytest.mark.parametrize("change", [{"text": "other"}, {"url": "/v1/completions"}])
def test_an_answer_to_another_request_is_told(source: Path, target: Path, change: dict[str, str]) -> None:
    write(source, line("a"), line("b"))
    finish(source, target, 1)
    write(source, line("a", **change), line("b"))
    with Output(target) as output, Requests(source, output.finished) as requests:
        assert [problem.number for problem in requests.problems] == [1]
        assert "another request" in requests.problems[0].what


def test_another_model_makes_another_request(source: Path, target: Path) -> None:
    write(source, line("a"))
    finish(source, target, 1)
    with Output(target) as output, Requests(source, output.finished, "beta") as requests:
        assert requests.problem_count == 1


def test_an_output_of_another_input_is_told(source: Path, target: Path) -> None:
    finish(write(source, line("a"), line("b")), target, 2)
    write(source, line("b"))
    with Output(target) as output, pytest.raises(Conflict, match="1 answers to requests"):
        Requests(source, output.finished)


def test_more_lines_of_input_go_on(source: Path, target: Path) -> None:
    finish(write(source, line("a")), target, 1)
    assert finish(write(source, line("a"), line("b")), target, 9) == ["b"]


def test_two_at_once_are_refused(target: Path) -> None:
    with Output(target), pytest.raises(Conflict, match="another"):
        Output(target)


def test_nothing_is_left_when_nothing_ran(target: Path) -> None:
    with Output(target):
        assert target.exists()
    assert not target.exists()
    target.touch()
    with Output(target):
        pass
    assert target.exists()  # it was there before


def test_an_output_that_cannot_be_is_told(target: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="directory"):
        Output(tmp_path)
    with pytest.raises(NotFound):
        Output(tmp_path / "none" / "out.jsonl")
    os.mkfifo(target)
    with pytest.raises(BadRequest, match="no regular file"):
        Output(target)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_output_without_permission(target: Path) -> None:
    target.touch(0o400)
    with pytest.raises(PermissionDenied):
        Output(target)


def test_who_may_read_an_output(target: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with Output(target), Output(tmp_path / "private.jsonl", 0o600) as private:
            assert target.stat().st_mode & 0o777 == 0o644  # as any tool's
            assert private.path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("text", ['{"custom_id": "a"}', ""])
def test_no_more_is_looked_at_than_asked_for(source: Path, text: str) -> None:
    write(source, line("a"), text, "{")
    with Requests(source, {}, max_lines=3) as requests:
        assert not requests.is_too_long and requests.problems[-1].number == 3
    with Requests(source, {}, max_lines=2) as requests:
        assert requests.is_too_long and requests.total == 1 and requests.problem_count == bool(text)


def test_a_full_disk_is_told_and_its_half_line_is_dropped(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source, line("a"), line("b"))
    real, written = os.write, []

    def half(fd: int, data: Any) -> int:
        if written:
            raise OSError(28, "No space left on device")
        written.append(real(fd, data[:20]))
        return written[0]

    with Output(target) as output, Requests(source, output.finished) as requests:
        monkeypatch.setattr(os, "write", half)
        first, second = requests
        with pytest.raises(OutOfSpace, match="no space"):
            output.append(answer(first))
        monkeypatch.undo()
        with pytest.raises(OutOfSpace):  # of another request that ends at the same moment
            output.append(answer(second))
    assert target.stat().st_size == 20
    assert finish(source, target, 9) == ["a", "b"]

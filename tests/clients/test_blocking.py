"""The blocking client over a real socket."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_front import TIMINGS, USAGE, FakeFront

from tierd.clients import Client
from tierd.clients.common import EMBED_INPUTS
from tierd.daemon.errors import (
    BadRequest,
    ContextLengthExceeded,
    DaemonUnreachable,
    EngineFailed,
    ModelNotFound,
    PermissionDenied,
    ProtocolError,
    TimedOut,
)
from tierd.daemon.protocol import Event, Message, Sampling, Submit

pytestmark = pytest.mark.usefixtures("no_files_left")


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FakeFront]:
    with FakeFront(tmp_path / "s") as front:
        yield front


@pytest.fixture
def client(front: FakeFront) -> Iterator[Client]:
    with Client(front.path) as client:
        yield client


def ask(prompt: str) -> Submit:
    return Submit(model="m", prompt=prompt)


def test_call_returns_the_result(client: Client, front: FakeFront) -> None:
    front.answers["ps"] = {"engines": [{"model": "a"}]}
    assert client.call("ps") == {"engines": [{"model": "a"}]}


def test_call_passes_arguments_and_progress(client: Client, front: FakeFront) -> None:
    front.answers["load"] = {"model": "m"}
    seen: list[Event] = []
    assert client.call("load", model="m", timeout_s=3, on_progress=seen.append) == {"model": "m"}
    assert front.requests[-1].args == {"model": "m", "timeout_s": 3}
    assert [event.data["done"] for event in seen] == [0, 5, 10]


def test_vectors_of_many_inputs_come_in_parts(client: Client, front: FakeFront) -> None:
    front.answers["embed"] = {"vectors": [array("f", [0.0, 1.0]).tobytes()] * EMBED_INPUTS, "usage": {}}
    assert len(client.embed("m", ["a"] * (2 * EMBED_INPUTS))) == 2 * EMBED_INPUTS
    assert [len(request.args["inputs"]) for request in front.requests] == [EMBED_INPUTS] * 2


@pytest.mark.parametrize(
    ("submit", "text"),
    [
        (Submit(model="m", prompt="p", sampling=Sampling(seed=1 << 64)), "sampling.seed is a number beyond 64 bits"),
        (Submit(model="m", prompt="p", sampling=Sampling(max_tokens=10**30)), "sampling.max_tokens is a number"),
        (Submit(model="m", prompt="p", sampling=Sampling(logit_bias={1 << 64: 1.0})), "sampling.logit_bias has a num"),
        (Submit(model="m", messages=(Message("user", "\udcff"),)), r"messages\[0\].content is not valid text"),
        (Submit(model="\udcff", prompt="p"), "model is not valid text"),
    ],
)
def test_what_no_frame_can_hold_is_a_bad_request(client: Client, submit: Submit, text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        list(client.generate(submit))
    assert client.call("ps") == {"engines": []}, "the connection is as good as before"


def test_a_call_that_no_frame_can_hold(client: Client) -> None:
    with pytest.raises(BadRequest, match="show has a name|is not valid"):
        client.call("show", **{"\udcff": 1})
    with pytest.raises(BadRequest, match="model is not valid text") as caught:
        client.call("show", model="\udcff")
    assert caught.value.param == "model"
    assert client.call("ps") == {"engines": []}


def test_call_raises_the_error_of_the_daemon(client: Client, front: FakeFront) -> None:
    front.answers["show"] = ModelNotFound("no such model", hint="tierd list", param="model")
    with pytest.raises(ModelNotFound, match="no such model") as caught:
        client.call("show", model="m")
    assert (caught.value.hint, caught.value.param) == ("tierd list", "model")
    assert client.call("ps") == {"engines": []}, "the connection is still good"


def test_generate_ends_with_done(client: Client) -> None:
    events = list(client.generate(ask("echo one two")))
    assert [event.ev for event in events] == ["accepted", "text", "text", "done"]
    assert events[-1].data == {"finish": "stop", "usage": USAGE, "timings": TIMINGS}


def test_unknown_events_pass(client: Client) -> None:
    assert [event.ev for event in client.generate(ask("noise"))] == ["accepted", "weather", "done"]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refuse", ContextLengthExceeded),
        ("fail", EngineFailed),
        ("drop", DaemonUnreachable),
        ("garbage", ProtocolError),
    ],
)
def test_generate_raises_typed_errors(client: Client, prompt: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        list(client.generate(ask(prompt)))


def test_silence_has_a_deadline_and_cancels(client: Client, front: FakeFront) -> None:
    with pytest.raises(TimedOut, match="within 0.05 s"):
        list(client.generate(ask("silent"), wait_s=0.05))
    assert front.wait_for_cancel() == [1]


def test_closing_early_cancels_and_the_next_request_works(client: Client, front: FakeFront) -> None:
    events = client.generate(ask("slow"))
    assert next(events).ev == "accepted"
    assert next(events).ev == "text"
    events.close()
    assert front.wait_for_cancel() == [1]
    assert [event.ev for event in client.generate(ask("echo x"))] == ["accepted", "text", "done"]
    assert client.call("ps") == {"engines": []}


def test_an_interrupt_in_the_loop_cancels(client: Client, front: FakeFront) -> None:
    def read() -> None:
        for event in client.generate(ask("slow")):
            if event.ev == "text":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read()
    assert front.wait_for_cancel() == [1]


def test_a_second_request_while_streaming_is_refused(client: Client) -> None:
    events = client.generate(ask("slow"))
    next(events)
    with pytest.raises(RuntimeError, match="use a second one"):
        client.call("ps")
    with pytest.raises(RuntimeError):
        next(client.generate(ask("echo x")))
    events.close()


def test_no_socket(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="no daemon runs") as caught:
        Client(tmp_path / "none").connect()
    assert "tierd start" in str(caught.value.hint)


def test_stale_socket(tmp_path: Path) -> None:
    path = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    with pytest.raises(DaemonUnreachable, match="left over") as caught:
        Client(path).connect()
    assert "tierd start" in str(caught.value.hint)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sock: socket.socket, address: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(PermissionDenied):
        Client(tmp_path / "s").connect()


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable):
        Client(tmp_path / ("x" * 200)).connect()


def test_the_daemon_goes_away_between_requests(tmp_path: Path) -> None:
    front = FakeFront(tmp_path / "s")
    with front:
        client = Client(front.path).connect()
        client.call("ps")
    with client, pytest.raises(DaemonUnreachable):
        client.call("ps")


def test_a_message_that_is_too_large_is_told_before_it_is_sent(client: Client) -> None:
    with pytest.raises(ProtocolError, match="a frame holds"):
        list(client.generate(ask("x" * (17 << 20))))
    assert client.call("ps") == {"engines": []}


def test_close_twice_and_reconnect(front: FakeFront) -> None:
    client = Client(front.path).connect()
    client.close()
    client.close()
    assert client.call("ps") == {"engines": []}
    client.close()


def test_two_clients_in_two_threads(front: FakeFront) -> None:
    texts: list[str] = []

    def work(word: str) -> None:
        with Client(front.path) as client:
            events = client.generate(ask(f"echo {word} {word}"))
            texts.append("".join(event.data["text"] for event in events if event.ev == "text"))

    threads = [threading.Thread(target=work, args=(word,)) for word in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == ["a a ", "b b "]


def test_prefixes_and_sizes(client: Client, front: FakeFront) -> None:
    front.answers["prefix"] = {"model": "m", "prefixes": [{"id": "ab"}], "total": 1, "pages": 4}
    front.answers["resize"] = {"model": "m", "device_bytes": 5}
    assert client.prefixes(limit=7) == [{"id": "ab"}]
    assert front.requests[-1].args == {"action": "ls", "model": None, "limit": 7}
    for verb, call in (("pin", client.pin), ("unpin", client.unpin), ("drop", client.drop)):
        assert call("abcd", model="m") == 4
        assert front.requests[-1].args == {"action": verb, "model": "m", "id": "abcd"}
    assert client.resize(device_bytes=5, timeout_s=2.0) == {"model": "m", "device_bytes": 5}
    assert front.requests[-1].args == {"model": None, "timeout_s": 2.0, "device_bytes": 5, "host_bytes": None}

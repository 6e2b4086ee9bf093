"""An engine without a model: a real process on a real socketpair whose tokens are a function of prompt and position.

`fake.json` in the model directory sets how it starts and ends: `start_s`, `token_s`, `flush_s`, `fail` ({code, message}
said instead of ready), `exit` (a code, at the start), `stays` (after `stop`), `status` (what it tells of itself). Words
in the prompt set what happens to a request: `!crash=N` kills the process when token N is due, once for the same prompt,
`!always=N` whenever N new tokens were said, `!die` on arrival, `!refuse`, `!hang` (no token ever comes), `!still` (the
same, once), `!freeze` (the whole process stands still), `!garbage`, `!big=N` (N characters a token), `!think=N` (the
first N tokens are thinking), `!calls=N` (as many calls of functions after the text, of the request's first tool),
`!stop` (the stop string `END` ends it; `!stop=N` after N tokens), `!echo` (the text is the request as JSON, in one
token). Where logprobs are asked for, they are told. A format is answered with the least JSON that fits, or with its own
source; a `tool_choice` that demands a call with one alone. After the answer of a tool nothing is called.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

if __name__ == "__main__":
    # Started with -S and without ssl, and finding the package by hand: 0.11 s of processor time instead of 0.18,
    # over a hundred times in a run of the tests.
    sys.modules["ssl"] = None  # type: ignore[assignment]  # asyncio does without
    sys.path.append(sys.argv[1])  # where msgspec is
    sys.modules["tierd"] = types.ModuleType("tierd")
    sys.modules["tierd"].__path__ = [str(Path(__file__).resolve().parents[2])]

import argparse
import array
import asyncio
import fcntl
import hashlib
import json
import os
import re
import signal
import socket
import time
import zlib

from tierd.daemon.protocol import Event, FrameDecoder, Request, encode, to_request

WORDS = ("page", "tier", "lease", "token", "Größe", "slot", "prefix", "日本", "store", "arena")


def token(prompt: str, seed: int, position: int) -> int:
    return zlib.crc32(f"{prompt}|{position}|{seed}".encode()) % 32000


def text_of(token_id: int) -> str:
    return f"{WORDS[token_id % len(WORDS)]}{token_id} "


def whole_text(prompt: str, count: int, seed: int = 0) -> str:
    return "".join(text_of(token(prompt, seed, position)) for position in range(count))


def vector_of(text: str) -> bytes:
    values = [1.0, *(zlib.crc32(f"{text}|{n}".encode()) / 2**33 for n in range(3))]
    length = sum(x * x for x in values) ** 0.5
    return array.array("f", [x / length for x in values]).tobytes()


def numbers(text: str) -> list[float]:
    return list(array.array("f", vector_of(text)))


def prompt_of(args: dict) -> str:
    if "messages" in args:
        return "".join(f"{m['role']}:{m['content']}\n" for m in args["messages"])
    if "tokens" in args:
        return " ".join(map(str, args["tokens"]))
    return args["prompt"]


def instance(schema: dict) -> object:
    """The least value of a simple schema."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: instance(inner) for name, inner in schema.get("properties", {}).items()}
    return {"string": "page", "integer": 7, "number": 1.5, "boolean": True, "array": [], "null": None}[kind]


def pieces(text: str, size: int = 8) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def held_to(form: dict) -> list[str]:
    """What each token of an answer in this format says."""
    if form["kind"] in ("regex", "grammar"):
        return pieces(form["source"], max(8, len(form["source"]) // 64))
    return pieces(json.dumps(instance(json.loads(form["source"] or "{}"))))


def calls_of(args: dict, words: dict) -> int:
    demanded = args.get("tool_choice", "auto") not in ("auto", "none")
    answered = "messages" in args and args["messages"][-1]["role"] == "tool"
    return 0 if answered else int(words.get("calls", demanded))


def logprob(token_id: int, text: str, alternatives: int) -> dict:
    one = {"token": token_id, "text": text, "bytes": text.encode(), "logprob": -(token_id % 97) / 10}
    return {**one, "top": [{**one, "logprob": one["logprob"] - n} for n in range(alternatives)]}


class Fake:
    def __init__(self, config: dict, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.directory = Path(config["model_dir"])
        self.nvme_bytes, self.cache_dir = config["nvme_bytes"], config["cache_dir"]
        self.device_bytes = config["device_bytes"]
        path = self.directory / "fake.json"
        self.options = json.loads(path.read_text()) if path.exists() else {}
        self.reader, self.writer = reader, writer
        self.running: dict[int, asyncio.Task] = {}
        self.started_s = time.monotonic()
        self.cancelled: list[int] = []
        self.calls: list[int] = []  # of `embed`: how many inputs
        self.tasks: set[asyncio.Task] = set()

    def send(self, event_id: int, ev: str, **data) -> None:
        self.writer.write(encode(Event(event_id, ev, data)))

    async def serve(self) -> None:
        if code := self.options.get("exit"):
            print(f"Traceback: /home/someone/secret.py at 0xdeadbeef ends with {code}", file=sys.stderr)
            os._exit(code)
        for done in range(3):
            self.send(0, "progress", stage="weights", done=done, total=3, text="reading weights")
            await asyncio.sleep(self.options.get("start_s", 0.0) / 3)
        if fail := self.options.get("fail"):
            self.send(0, "failed", **fail)
            await self.writer.drain()
            os._exit(1)
        namespace = hashlib.blake2b(self.directory.name.encode(), digest_size=16).hexdigest()
        store = Path(self.cache_dir) / namespace
        store.mkdir(parents=True, exist_ok=True)
        self.lock = (store / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        on_card = self.options.get("on_card", False)
        self.send(
            0, "ready", model=self.directory.name, context=4096, start_ms=1.0, namespace=namespace, on_card=on_card
        )
        decoder = FrameDecoder()
        while data := await self.reader.read(65536):
            for message in decoder.feed(data):
                await self.handle(to_request(message))

    async def handle(self, request: Request) -> None:
        match request.op:
            case "generate":
                task = asyncio.create_task(self.answer(request))
                self.running[request.id] = task
            case "cancel":
                target = request.args["target"]
                if target in self.running:
                    self.cancelled.append(target)
                    self.running.pop(target).cancel()
                    self.send(target, "aborted", usage={})
                self.send(request.id, "result")
            case "status":
                nvme = {"cap_bytes": self.nvme_bytes}
                device = {"total_pages": 8, "used_pages": 3, "total_bytes": self.device_bytes,
                          "needed_bytes": self.options.get("needed_bytes", 0)}
                tiers = {"device": device, "host": {}, "nvme": nvme}
                status = {"state": "ready", "running": len(self.running), "waiting": 0, "tiers": tiers,
                          "cancelled": len(self.cancelled), "calls": self.calls}
                self.send(request.id, "result", **(status | self.options.get("status", {})))
            case "embed":
                task = asyncio.create_task(self.embed(request))
                self.running[request.id] = task
            case "tokenize":
                self.send(request.id, "result", tokens=[len(str(request.args))])
            case "flush":
                await asyncio.sleep(self.options.get("flush_s", 0.0))
                (self.directory / "flushed").touch()
                self.send(request.id, "result", left=0)
            case "cache" if "cache_stands" in self.options:
                self.running[request.id] = asyncio.create_task(asyncio.sleep(600))
                self.send(request.id, "progress", stage="verify", done=3, total=9, text="3 of 9 pages are read")
            case "cache":
                self.send(request.id, "result", action=request.args["action"], problems=[])
            case "resize" if "refuse_resize" in self.options:
                self.send(request.id, "refused", code="out_of_space", message="running requests need it")
            case "resize" if request.args.get("device_bytes", 1 << 60) < self.options.get("needs_bytes", 0):
                self.send(request.id, "refused", code="out_of_space", message="running requests need more")
            case "resize":
                self.device_bytes = request.args.get("device_bytes", self.device_bytes)
                self.send(request.id, "result", **(request.args | {"args": request.args}))
            case "prefix" | "pages" | "top" | "page":
                self.send(request.id, "result", args=request.args)
            case "stop":
                self.send(request.id, "result")
                await self.writer.drain()
                if not self.options.get("stays"):
                    os._exit(0)
            case _:
                self.send(request.id, "refused", code="unsupported_parameter", message=f"unknown: {request.op}")

    async def embed(self, request: Request) -> None:
        """Vectors of four values, the first of them the largest: a function of the input alone."""
        self.calls.append(len(request.args["inputs"]))
        vectors, tokens = [], 0
        for given in request.args["inputs"]:
            text = given if isinstance(given, str) else " ".join(map(str, given))
            words = dict(found for found in re.findall(r"!(\w+)=?(\d*)", text))
            if "die" in words or ("crash" in words and self.first_time(text)):
                os.kill(os.getpid(), signal.SIGKILL)
            if "refuse" in words:
                self.running.pop(request.id)
                self.send(request.id, "refused", code="context_length_exceeded", message="input[0]: too long")
                return
            if "hang" in words:
                await asyncio.sleep(600)
            vectors.append(vector_of(text))
            tokens += len(text.split())
        self.running.pop(request.id, None)
        self.send(request.id, "result", vectors=vectors, usage={"prompt_tokens": tokens, "cached_tokens": 0})

    def first_time(self, prompt: str) -> bool:
        """Whether no process has come here with this prompt."""
        mark = self.directory / f"seen-{zlib.crc32(prompt.encode())}"
        if mark.exists():
            return False
        mark.touch()
        return True

    async def answer(self, request: Request) -> None:
        try:
            await self.generate(request)
        except (KeyError, TypeError, ValueError, AttributeError):  # a schema of the client that we can't answer
            self.running.pop(request.id, None)
            self.send(request.id, "refused", code="bad_request", message="the format makes no sense")

    async def generate(self, request: Request) -> None:
        args, sampling = request.args, request.args.get("sampling", {})
        prompt, resume = prompt_of(args), len(args.get("resume", ()))
        seed = sampling.get("seed", 0) if sampling.get("temperature") else 0
        words = dict(found for found in re.findall(r"!(\w+)=?(\d*)", prompt))
        count = sampling.get("max_tokens") or 16
        if words.get("stop"):
            count = min(count, int(words["stop"]))
        if "die" in words:
            print("fake engine dies on arrival", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if "refuse" in words:
            self.running.pop(request.id)
            self.send(request.id, "refused", code="context_length_exceeded", hint="shorten it",
                      message="the prompt is too long: 5000 tokens used, 4096 allowed")
            return
        if "freeze" in words and self.first_time(prompt):
            self.send(request.id, "accepted", prompt_tokens=5, cached_tokens=2)
            self.send(request.id, "text", text=text_of(token(prompt, seed, 0)), tokens=[token(prompt, seed, 0)])
            await self.writer.drain()
            time.sleep(600)  # noqa: ASYNC251  (a process that stands still is the point)
        self.send(request.id, "accepted", prompt_tokens=len(prompt.split()) + resume, cached_tokens=2 + resume)
        if "hang" in words or ("still" in words and self.first_time(prompt)):
            await asyncio.sleep(600)
        if "garbage" in words and self.first_time(prompt):
            self.writer.write(b"\xff\xff\xff\xff garbage")
            return
        if args.get("beam_width"):
            self.running.pop(request.id)
            self.send_beams(request.id, prompt, count, args.get("n", 1))
            return
        held = held_to(args["format"]) if "format" in args else None
        calls, logprob_sum = calls_of(args, words), 0.0
        if held is not None:
            count = len(held)
        elif calls and args.get("tool_choice", "auto") != "auto":
            count = 0
        for position in range(resume, count):
            if ("crash" in words and position == int(words["crash"]) and self.first_time(prompt)) or (
                "always" in words and position - resume == int(words["always"])
            ):
                await self.writer.drain()
                print(f"fake engine crashes at token {position}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if delay_s := self.options.get("token_s", 0.0):
                await asyncio.sleep(delay_s)
            token_id = token(prompt, seed, position)
            text = "x" * int(words["big"]) if "big" in words else text_of(token_id)
            if "echo" in words:
                text = json.dumps(args) if position == 0 else ""
            if held is not None:
                text = held[position]
            said = {"text": text, "tokens": [token_id]}
            if position < int(words.get("think", 0)):
                said |= {"text": "", "thinking": text, "thinking_tokens": 1}
            if (alternatives := args.get("logprobs")) is not None:
                said["logprobs"] = [logprob(token_id, text, alternatives)]
                logprob_sum += said["logprobs"][0]["logprob"]
            self.send(request.id, "text", **said)
            await self.writer.drain()
        for call in range(calls):
            self.send_call(request.id, call, args)
        self.running.pop(request.id, None)
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": count, "cached_tokens": 2 + resume}
        timings = {"ttft_ms": 1.0, "decode_tokens_per_s": 9.0, "recomputed": 3}
        finish = "tool_calls" if calls else "stop" if "stop" in words or held is not None else "length"
        stop = "END" if "stop" in words else None
        summed = {} if args.get("logprobs") is None else {"logprob_sum": logprob_sum}
        if args.get("tell_prompt"):
            summed["prompt"] = [*args.get("before", ()), len(prompt)]
        self.send(request.id, "done", finish=finish, stop=stop, usage=usage, timings=timings, **summed)

    def send_beams(self, request_id: int, prompt: str, count: int, answers: int) -> None:
        """The answers of a beam search, one after the other, as the engine tells them at its end."""
        for choice in range(answers):
            tokens = [token(prompt, choice, position) for position in range(count)]
            which = {"choice": choice} if answers > 1 else {}
            self.send(request_id, "text", text="".join(map(text_of, tokens)), tokens=tokens, **which)
            if which:
                self.send(request_id, "choice", **which, finish="stop", stop=None)
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": count * answers, "cached_tokens": 2}
        self.send(request_id, "done", finish="stop", usage=usage, timings={})

    def send_call(self, request_id: int, index: int, args: dict) -> None:
        """A call in pieces, as it comes while a model writes it."""
        tools = args.get("tools") or [{"name": "look"}]
        named = args.get("tool_choice", "auto").removeprefix("function:")
        used = next((tool for tool in tools if tool["name"] == named), tools[0])
        first = {"index": index, "id": f"call_{index}", "name": used["name"], "arguments": ""}
        self.send(request_id, "text", text="", tokens=[], calls=[first])
        schema = used.get("parameters", {})
        said = pieces(json.dumps(instance(schema))) if schema.get("properties") else [
            '{"number": ', f"{index}, ", '"unit": "Größe"}'
        ]
        for piece in said:
            self.send(request_id, "text", text="", tokens=[], calls=[{"index": index, "arguments": piece}])


async def main(fd: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    await Fake(json.loads(os.environ["TIERD_ENGINE_CONFIG"]), reader, writer).serve()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("packages")
    parser.add_argument("--fd", type=int, required=True)
    asyncio.run(main(parser.parse_args().fd))

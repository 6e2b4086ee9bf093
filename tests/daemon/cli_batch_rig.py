"""Batches of the command line, for tests: a front that knows a model, lines of the input, lines of the output."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cli_rig import Cli
from fake_front import FakeFront
from front_harness import make_model

from tierd.daemon import batch_run
from tierd.daemon.errors import TierdError, to_wire
from tierd.daemon.protocol import Event, Request, encode, to_submit

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def batch_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
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

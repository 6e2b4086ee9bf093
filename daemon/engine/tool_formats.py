"""How a model writes reasoning and calls of tools, as its chat template and its special tokens tell. Pure.

The template decides: a fine-tuned Llama whose template asks for `<tool_call>` writes that, whatever its vocabulary
holds.
"""

from __future__ import annotations

import enum
import secrets
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from tierd.daemon.engine.answer import CONTROL, Parser
from tierd.daemon.engine.tool_harmony import Harmony
from tierd.daemon.engine.tool_parsers import Bare, Reasoning, Tagged, Untagged, Verbatim


class Style(enum.Enum):
    """How calls are written."""

    NONE = "none"  # not at all, or in a way that is not known here
    TAGGED = "tagged"  # JSON between two tags: Hermes, Qwen, SmolLM3
    MISTRAL = "mistral"
    LLAMA = "llama"
    HARMONY = "harmony"


_TAGS = (("<tool_call>", "</tool_call>"), ("<|tool_call|>", "<|/tool_call|>"), ("<TOOLCALL>", "</TOOLCALL>"))
_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_LLAMA_ENDS = ("<|eom_id|>", "<|eot_id|>")
_ID_CHARS = string.ascii_letters + string.digits
MISTRAL_ID_CHARS = 9  # its templates insist


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one model does. Markers stand as the parser gets them: those of special tokens behind `CONTROL`."""

    style: Style = Style.NONE
    opening: str = ""  # begins a call
    closing: str = ""
    arguments: str = ""  # between a name and its arguments
    thinking: tuple[str, str] | None = None
    controls: Mapping[int, str] = field(default_factory=dict)  # special tokens that the parser has to see
    end_ids: frozenset[int] = frozenset()  # tokens that end an answer, beside those that the model's files name
    opening_id: int | None = None  # the token that begins a call, where it is one

    def parser(self, tools: Collection[str], *, begun: bool = False) -> Parser:
        """A parser for one answer. `tools`: names that may be called; `begun`: the prompt opened the reasoning."""
        rest = self._calls(tools)
        return Reasoning(*self.thinking, rest, begun=begun) if self.thinking else rest

    def _calls(self, tools: Collection[str]) -> Parser:
        match self.style:
            case Style.HARMONY:
                return Harmony()
            case _ if not tools:
                return Verbatim()
            case Style.NONE:
                return Verbatim()
            case Style.TAGGED:
                return Untagged(tools, Tagged(self.opening, self.closing))
            case Style.MISTRAL:
                return Tagged(self.opening, self.closing, self.arguments)
            case Style.LLAMA:
                return Bare(self.opening, tools)
            case _:
                assert_never(self.style)

    def opens_thinking(self, rendered: str) -> bool:
        """Whether a prompt ends inside of reasoning."""
        return self.thinking is not None and rendered.rstrip().endswith(self.thinking[0].replace(CONTROL, ""))

    @property
    def no_thought(self) -> str:
        """What ends a reasoning that the prompt has begun."""
        return f"\n\n{self.thinking[1].replace(CONTROL, '')}\n\n" if self.thinking is not None else ""

    def call_id(self) -> str:
        """A new id of a call, of the form that the model's template takes."""
        if self.style is Style.MISTRAL:
            return "".join(secrets.choice(_ID_CHARS) for _ in range(MISTRAL_ID_CHARS))
        return f"call_{secrets.token_hex(12)}"


def detect(template: str, special: Mapping[str, int], added: Mapping[str, int]) -> Dialect:
    """The dialect of a model. `special`: its special tokens; `added`: those and others of a whole word each."""

    def marker(text: str) -> str:
        return CONTROL + text if text in special else text

    def build(style: Style, *texts: str, ends: Collection[str] = (), more: Collection[str] = ()) -> Dialect:
        opening, closing, arguments = (marker(text) if text else "" for text in (*texts, "", "", "")[:3])
        seen = [text for text in (*texts, *more, *(thinking or ())) if text in special]
        return Dialect(
            style,
            opening,
            closing,
            arguments,
            (marker(thinking[0]), marker(thinking[1])) if thinking else None,
            {special[text]: CONTROL + text for text in seen},
            frozenset(special[text] for text in ends if text in special),
            added.get(texts[0]) if texts else None,
        )

    thinking = next((pair for pair in _THINKING if pair[1] in template or set(pair) <= added.keys()), None)
    if {"<|channel|>", "<|message|>"} <= special.keys():
        thinking = None  # its channels say what is reasoning
        return build(Style.HARMONY, more=_HARMONY, ends=("<|call|>", "<|return|>"))
    for opening, closing in _TAGS:
        if opening in template and "tools" in template:
            return build(Style.TAGGED, opening, closing)
    if "[TOOL_CALLS]" in added:
        return build(Style.MISTRAL, "[TOOL_CALLS]", "", "[ARGS]", more=("[CALL_ID]",))
    if "<|python_tag|>" in special and "tools" in template:
        return build(Style.LLAMA, "<|python_tag|>", ends=_LLAMA_ENDS)
    return build(Style.NONE)

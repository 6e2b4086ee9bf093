"""What an answer is held to, as one grammar for llguidance: the format, the calls of tools, and the model's own forms.

Pure. The result is llguidance's JSON form: a main grammar in its dialect of Lark that says how reasoning, calls and
answer follow one another, and one grammar each for what the request gave: a schema, an expression, arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, assert_never

from llguidance import regex_to_lark

from tierd.daemon.engine.answer import CONTROL
from tierd.daemon.engine.tool_formats import Dialect, Style
from tierd.daemon.errors import BadRequest, Unsupported
from tierd.daemon.generation import MAX_FORMAT_CHARS, MAX_TOOLS
from tierd.daemon.protocol import Format, Submit, Tool

MAX_CALLS = 16  # in one forced answer: a small model that must call may not know how to end
# White space between JSON tokens as Python writes it. Free white space is the way in which a small model never ends.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GAP = r"/\s{0,4}/"  # behind reasoning; not more, for the same reason
_TEXT = r"TEXT: /(.|\n)*/"
_FUNCTION = "function:"


def grammar_of(submit: Submit, dialect: Dialect, added: Mapping[str, int], *, thinking: bool | None) -> str | None:
    """The grammar of a request, None when its answer is free.

    Args:
        added: tokens that stand for a text of their own.
        thinking: True when the prompt ends inside of reasoning, None when the model may begin one.

    Raises BadRequest, Unsupported.
    """
    tools = chosen(submit)
    forced = tools and submit.tool_choice not in ("auto", "none")
    held = tools and (forced or any(tool.strict for tool in tools))
    if submit.format is None and not held:
        return None
    main = _Main(dialect, added, thinking)
    bodies = []
    if submit.format is not None and not forced:
        bodies.append(main.answer(submit.format))
    if held or (tools and submit.format is not None and submit.tool_choice == "auto"):
        free = not forced and submit.format is None
        parallel = submit.parallel_tool_calls and not submit.tool_choice.startswith(_FUNCTION)
        bodies.append(main.calls(tools, parallel, after_text=free))
        if free:
            bodies.append(main.free())
    return main.source(bodies)


def chosen(submit: Submit) -> list[Tool]:
    """The tools that may be called. The front has checked them, and the choice (`daemon.limits`)."""
    choice = submit.tool_choice
    if choice == "none":
        return []
    assert choice in ("auto", "required") or choice.startswith(_FUNCTION), choice[:64]
    assert len(submit.tools) <= MAX_TOOLS, len(submit.tools)
    tools = list(submit.tools)
    if choice.startswith(_FUNCTION):
        tools = [tool for tool in tools if tool.name == choice.removeprefix(_FUNCTION)]
    assert choice == "auto" or tools, "no tool of this choice"
    return tools


class _Main:
    """The main grammar under construction, and the grammars that it refers to."""

    def __init__(self, dialect: Dialect, added: Mapping[str, int], thinking: bool | None) -> None:
        self._dialect = dialect
        self._added = added
        self._thinking = thinking
        self._parts: list[dict[str, Any]] = []
        self._rules: list[str] = []

    def answer(self, form: Format) -> str:
        """A rule for an answer of the form."""
        assert len(form.source) <= MAX_FORMAT_CHARS[form.kind], (form.kind, len(form.source))  # checked by the front
        match form.kind:
            case "json_object":
                rule = self._json({"type": "object"}, "format", strict=True)
            case "json_schema":
                rule = self._json(_schema(form.source), "format", strict=True)
            case "regex":
                rule = self._part({"lark_grammar": f"start: /{regex_to_lark(form.source)}/"})
            case "grammar":
                rule = self._part({"lark_grammar": form.source})
            case _:
                assert_never(form.kind)
        if self._dialect.style is Style.HARMONY:
            return f'{self._tag("<|channel|>")} "final" {self._tag("<|message|>")} {rule}'
        return rule

    def free(self) -> str:
        """A rule for an answer without calls."""
        if self._dialect.style is Style.HARMONY:
            return f'{self._tag("<|channel|>")} "final" {self._tag("<|message|>")} TEXT'
        # A bare object would be a call, so text begins in another way there.
        return r"/[^{\s](.|\n)*/" if self._dialect.style is Style.LLAMA else "TEXT"

    def calls(self, tools: list[Tool], parallel: bool, *, after_text: bool) -> str:
        """A rule for one call or more, after other text where the model may say some and a token ends it."""
        arguments = [self._arguments(tool) for tool in tools]
        names = [tool.name for tool in tools]
        dialect = self._dialect
        opening, closing, marker = (
            text.replace(CONTROL, "") for text in (dialect.opening, dialect.closing, dialect.arguments)
        )
        text = "TEXT " if after_text and opening in self._added else ""
        match dialect.style:
            case Style.TAGGED:
                objects = self._objects("arguments", names, arguments)
                self._rules += [f"call: {self._tag(opening)} NL ({objects}) NL {self._tag(closing)}", r"NL: /\n?/"]
                return text + (_more("NL call") if parallel else "call")
            case Style.MISTRAL if marker in self._added:
                called = [
                    f"{json.dumps(name)} {self._tag(marker)} {rule}"
                    for name, rule in zip(names, arguments, strict=True)
                ]
                self._rules.append(f"call: {self._tag(opening)} ({' | '.join(called)})")
                return text + (_more("call") if parallel else "call")
            case Style.MISTRAL:
                self._rules.append(f"call: {self._objects('arguments', names, arguments)}")
                several = _more('", " call') if parallel else "call"
                return text + f'{self._tag(opening)} "[" {several} "]"'
            case Style.LLAMA:
                self._rules.append(f"call: {self._objects('parameters', names, arguments)}")
                return _more('"; " call') if parallel else "call"
            case Style.HARMONY:
                called = [
                    f'{json.dumps(f"commentary to=functions.{name} ")} {self._tag("<|constrain|>")} "json" '
                    f"{self._tag('<|message|>')} {rule}"
                    for name, rule in zip(names, arguments, strict=True)
                ]
                self._rules.append(f"call: {self._tag('<|channel|>')} ({' | '.join(called)})")
                return "call"
            case Style.NONE:
                raise Unsupported("this model does not know how to call tools", param="tools")
            case _:
                assert_never(dialect.style)

    def source(self, bodies: list[str]) -> str:
        """The whole grammar: any of the bodies, after reasoning where the model may reason."""
        lines = [f"start: {self._before()}({' | '.join(bodies)})", _TEXT, *self._rules]
        try:
            return json.dumps({"grammars": [{"name": "main", "lark_grammar": "\n".join(lines)}, *self._parts]})
        except RecursionError:
            raise BadRequest("the schema is nested too deep", param="format") from None

    def _before(self) -> str:
        dialect = self._dialect
        if dialect.style is Style.HARMONY:
            self._rules.append(
                f'analysis: {self._tag("<|channel|>")} "analysis" {self._tag("<|message|>")} TEXT '
                f'{self._tag("<|end|>")} {self._tag("<|start|>")} "assistant"'
            )
            return "analysis? "
        if dialect.thinking is None or self._thinking is False:
            return ""
        opening, closing = (text.replace(CONTROL, "") for text in dialect.thinking)
        if closing in self._added:
            self._rules.append(f"thought: TEXT {self._tag(closing)} {_GAP}")
        else:
            self._rules += [f"spelled[suffix={json.dumps(closing)}]: /(.|\\n)*/", f"thought: spelled {_GAP}"]
        return "thought " if self._thinking else f"({self._tag(opening)} thought)? "

    def _arguments(self, tool: Tool) -> str:
        schema = tool.parameters or {"type": "object", "properties": {}}
        if tool.strict:
            return self._json(schema, "tools", strict=True)
        # Held to what can be held to: a forced call of a tool whose schema says more is better than none.
        return self._json({"type": "object", **schema}, "tools", strict=False)

    def _objects(self, key: str, names: list[str], arguments: list[str]) -> str:
        objects = []
        for name, rule in zip(names, arguments, strict=True):
            head = '{"name": ' + json.dumps(name, ensure_ascii=False) + f', "{key}": '
            objects.append(f'{json.dumps(head)} {rule} "}}"')
        return " | ".join(objects)

    def _json(self, schema: Any, param: str, *, strict: bool) -> str:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict):
            raise BadRequest("a JSON schema is an object", param=param)
        return self._part({"json_schema": {**schema, "x-guidance": {**_SPACING, "lenient": not strict}}})

    def _part(self, part: dict[str, Any]) -> str:
        name = f"part{len(self._parts)}"
        self._parts.append({"name": name, **part})
        return f"@{name}"

    def _tag(self, text: str) -> str:
        """A marker: its token where it is one, else its characters."""
        return f"<[{self._added[text]}]>" if text in self._added else json.dumps(text)


def _more(item: str) -> str:
    return f"call ({item}){{0,{MAX_CALLS - 1}}}"


def _schema(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        raise BadRequest("the schema is no JSON", param="format") from None

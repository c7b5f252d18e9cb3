"""Tool calls as JSON between the tags of ``ModelSpec.tool_calls``: a grammar, and a streaming parser."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vlfit.api.conversation import Tool, ToolCall
from vlfit.api.sampling_params import SPACING, Grammar
from vlfit.api.schema_limits import check_schema
from vlfit.models.registry import ToolCallSyntax


def _partial_call(syntax: ToolCallSyntax) -> re.Pattern[str]:
    """A call whose arguments may be cut off."""
    return re.compile(
        rf'{re.escape(syntax.open)}\s*\{{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"'
        r'\s*,\s*"arguments"\s*:(?P<arguments>.*)',
        re.DOTALL,
    )


def tool_call_grammar(
    tools: tuple[Tool, ...],
    syntax: ToolCallSyntax,
    *,
    parallel: bool,
    required: bool,
    otherwise: dict[str, Any] | None = None,
) -> Grammar:
    """A form with calls of ``tools``, their arguments by their schemas; several only if ``parallel``.

    ``required``: at least one call and nothing else. If not, any text may stand before, between and after,
    or, with a schema ``otherwise``, JSON of that in place of calls. Raises ``InvalidRequest`` for a schema
    that asks for too much.
    """
    check_schema([tool.parameters for tool in tools], "tools")
    check_schema(otherwise, "response_format")
    alone = required or otherwise is not None
    rules = [_rule(number, tool, syntax, alone) for number, tool in enumerate(tools)]
    call = " | ".join(f"call_{number}" for number in range(len(tools)))
    if alone:
        start = f"start: calls{'' if required else ' | answer'}"
        rest = [f"calls: call{' (BREAK call)*' if parallel else ''}", 'BREAK: "\\n"']
        if not required:
            rest.append(f"answer: %json {json.dumps({**(otherwise or {}), 'x-guidance': SPACING})}")
    else:
        start = f"start: call{'*' if parallel else '?'} text"
        words = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{syntax.open}(.|\n)*/"
        rest = ["text: TEXT", words, f"opened[lazy]: TEXT {json.dumps(syntax.open)}"]
    return Grammar("grammar", "\n".join(["%llguidance {}", start, f"call: {call}", *rest, *rules]), "tools")


def _rule(number: int, tool: Tool, syntax: ToolCallSyntax, alone: bool) -> str:
    begin = json.dumps(syntax.open) if alone else "opened"
    head = json.dumps(f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    schema = {"type": "object", **tool.parameters, "x-guidance": SPACING}
    return (
        f"call_{number}: {begin} {head} %json {json.dumps(schema)} {json.dumps('}' + chr(10) + syntax.close)}"
    )


@dataclass(slots=True)
class ToolCallReader:
    """Parses one streamed completion. ``names``: the offered functions; calls of others stay text.

    ``forced``: the one function that the completion has to call.
    """

    names: frozenset[str]
    syntax: ToolCallSyntax
    forced: str | None = None
    _held: str = ""
    _open: bool = False
    _looked: int = 0  # characters of the open call that were searched for a closing tag
    _called: bool = False  # and only white space followed

    def add(self, text: str) -> Iterator[str | ToolCall]:
        """Text that cannot be part of a call, and complete calls, in order."""
        self._held += text
        while True:
            said = "" if self._open else self._words()
            if said:
                self._called = self._called and not said.strip()
                yield said
            call = self._call() if self._open else None
            if call is None:
                return
            self._called = True
            yield call

    def flush(self, *, cut: bool = False) -> Iterator[str | ToolCall]:
        """End of the completion. A call that only lacks its closing tag counts; anything else is text.

        ``cut``: the answer was cut off. A call is then returned with its partial arguments, as OpenAI does;
        without even its name only if it was ``forced``.
        """
        rest, self._held = self._held, ""
        if self._open:
            call = self._read(rest[len(self.syntax.open) :]) or (self._half(rest) if cut else None)
            self._open = False
            if call is not None:
                yield call
                return
        if cut and self.forced is not None and not self._called and self._begins_call(rest):
            yield ToolCall(self.forced, "")
            return
        if cut and len(rest) > 5 and self._begins_call(rest):
            return
        if rest.strip() or (rest and not self._called):
            yield rest

    def _words(self) -> str:
        """Text before the next opening tag; line breaks right before it belong to the tag."""
        place = self._held.find(self.syntax.open)
        if place >= 0:
            self._open, self._looked = True, 0
            said, self._held = self._held[:place].rstrip("\n"), self._held[place:]
            return said
        keep = _may_open(self._held, self.syntax.open)
        said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return said

    def _call(self) -> ToolCall | None:
        """The open call, if complete: a closing tag inside an argument does not close it."""
        while (place := self._held.find(self.syntax.close, max(self._looked, len(self.syntax.open)))) >= 0:
            call = self._read(self._held[len(self.syntax.open) : place])
            self._looked = place + len(self.syntax.close)
            if call is not None:
                self._open, self._held = False, self._held[self._looked :]
                return call
        return None

    def _half(self, text: str) -> ToolCall | None:
        found = _partial_call(self.syntax).match(text)
        if found is None or found["name"] not in self.names:
            return None
        return ToolCall(found["name"], found["arguments"].lstrip())

    def _begins_call(self, text: str) -> bool:
        """Whether ``text`` is a prefix of a call up to its arguments, after any line breaks."""
        text = text.lstrip("\n")
        begins = (f'{self.syntax.open}\n{{"name": {json.dumps(name)}, "arguments": ' for name in self.names)
        return any(begin.startswith(text) for begin in begins)

    def _read(self, text: str) -> ToolCall | None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        name = found.get("name")
        if not isinstance(name, str) or name not in self.names:
            return None
        arguments = found.get("arguments", {})
        told = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall(name, told)


def _may_open(text: str, opening: str) -> int:
    """Length of the longest suffix of ``text`` that may begin line breaks and an opening tag."""
    tag = next((size for size in range(len(opening) - 1, 0, -1) if text.endswith(opening[:size])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip("\n"))

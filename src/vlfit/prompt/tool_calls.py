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
    """Grammar of answers that may call ``tools``, with arguments by the tools' JSON schemas.

    ``parallel``: more than one call is allowed. ``required``: the answer consists of calls, at least one, and
    nothing else. If not required: with a JSON schema ``otherwise``, the answer is calls or JSON of that
    schema; without, it is free text that may have calls in it. Raises ``InvalidRequest`` for a schema beyond
    the limits of ``schema_limits``.
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
class ToolCallParser:
    """Splits one streamed completion into text and tool calls: ``add`` each piece of text, then ``flush``.

    ``names``: the functions that may be called; calls of other functions stay text. ``forced``: the function
    that the completion must call; None: it is free to call any or none.
    """

    names: frozenset[str]
    syntax: ToolCallSyntax
    forced: str | None = None
    _buffer: str = ""
    _open: bool = False
    _searched: int = 0  # characters of the open call already searched for a closing tag
    _after_call: bool = False  # a call has ended, and only white space followed

    def add(self, text: str) -> Iterator[str | ToolCall]:
        """Add a piece of text. Yields text that cannot belong to a call, and complete calls, in order."""
        self._buffer += text
        while True:
            emitted = "" if self._open else self._next_text()
            if emitted:
                self._after_call = self._after_call and not emitted.strip()
                yield emitted
            call = self._next_call() if self._open else None
            if call is None:
                return
            self._after_call = True
            yield call

    def flush(self, *, cut: bool = False) -> Iterator[str | ToolCall]:
        """End the completion. Yields what was held back: a call that lacks only its closing tag, or text.

        ``cut``: the answer was cut off, by ``max_tokens`` for example. Then an incomplete call is yielded
        with its partial arguments, as OpenAI does; the beginning of a call whose name is incomplete is
        dropped or, with ``forced``, yielded as a call of that function with the arguments "". White space
        after a call is dropped.
        """
        rest, self._buffer = self._buffer, ""
        if self._open:
            call = self._parse_call(rest[len(self.syntax.open) :]) or (
                self._parse_partial_call(rest) if cut else None
            )
            self._open = False
            if call is not None:
                yield call
                return
        if cut and self.forced is not None and not self._after_call and self._begins_call(rest):
            yield ToolCall(self.forced, "")
            return
        if cut and len(rest) > 5 and self._begins_call(rest):
            return
        if rest.strip() or (rest and not self._after_call):
            yield rest

    def _next_text(self) -> str:
        """Text before the next opening tag; line breaks right before it belong to the tag."""
        index = self._buffer.find(self.syntax.open)
        if index >= 0:
            self._open, self._searched = True, 0
            emitted, self._buffer = self._buffer[:index].rstrip("\n"), self._buffer[index:]
            return emitted
        keep = _may_open(self._buffer, self.syntax.open)
        emitted, self._buffer = (
            self._buffer[: len(self._buffer) - keep],
            self._buffer[len(self._buffer) - keep :],
        )
        return emitted

    def _next_call(self) -> ToolCall | None:
        """The open call, if complete: a closing tag inside an argument does not close it."""
        while (
            index := self._buffer.find(self.syntax.close, max(self._searched, len(self.syntax.open)))
        ) >= 0:
            call = self._parse_call(self._buffer[len(self.syntax.open) : index])
            self._searched = index + len(self.syntax.close)
            if call is not None:
                self._open, self._buffer = False, self._buffer[self._searched :]
                return call
        return None

    def _parse_partial_call(self, text: str) -> ToolCall | None:
        found = _partial_call(self.syntax).match(text)
        if found is None or found["name"] not in self.names:
            return None
        return ToolCall(found["name"], found["arguments"].lstrip())

    def _begins_call(self, text: str) -> bool:
        """Whether ``text`` is a prefix of a call up to its arguments, after any line breaks."""
        text = text.lstrip("\n")
        begins = (f'{self.syntax.open}\n{{"name": {json.dumps(name)}, "arguments": ' for name in self.names)
        return any(begin.startswith(text) for begin in begins)

    def _parse_call(self, text: str) -> ToolCall | None:
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
        text_arguments = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        return ToolCall(name, text_arguments)


def _may_open(text: str, opening: str) -> int:
    """Length of the longest suffix of ``text`` that may begin line breaks and an opening tag."""
    tag = next((size for size in range(len(opening) - 1, 0, -1) if text.endswith(opening[:size])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip("\n"))

"""Calls of functions as Qwen writes them, in Hermes' form: JSON between ``<tool_call>`` and ``</tool_call>``.

Knows that form: how a grammar holds a model to it, and how calls are found in text that comes in pieces. Does
not know: how tools are told to the model (its chat template does that), or what they do. No torch.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vlfit.api.conversation import Tool, ToolCall
from vlfit.api.sampling_params import SPACING, Form
from vlfit.api.schema_limits import check_schema

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HALF = re.compile(
    rf'{_OPEN}\s*\{{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:(?P<arguments>.*)', re.DOTALL
)


def calls_form(
    tools: tuple[Tool, ...],
    *,
    parallel: bool,
    required: bool,
    otherwise: dict[str, Any] | None = None,
) -> Form:
    """A form with calls of ``tools``, their arguments by their schemas; several only if ``parallel``.

    ``required``: at least one call and nothing else. If not, any text may stand before, between and after,
    or, with a schema ``otherwise``, JSON of that in place of calls. Raises ``InvalidRequest`` for a schema
    that asks for too much.
    """
    check_schema([tool.parameters for tool in tools], "tools")
    check_schema(otherwise, "response_format")
    alone = required or otherwise is not None
    rules = [_rule(number, tool, alone) for number, tool in enumerate(tools)]
    call = " | ".join(f"call_{number}" for number in range(len(tools)))
    if alone:
        start = f"start: calls{'' if required else ' | answer'}"
        rest = [f"calls: call{' (BREAK call)*' if parallel else ''}", 'BREAK: "\\n"']
        if not required:
            rest.append(f"answer: %json {json.dumps({**(otherwise or {}), 'x-guidance': SPACING})}")
    else:
        start = f"start: call{'*' if parallel else '?'} text"
        words = rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{_OPEN}(.|\n)*/"
        rest = ["text: TEXT", words, f"opened[lazy]: TEXT {json.dumps(_OPEN)}"]
    return Form("grammar", "\n".join(["%llguidance {}", start, f"call: {call}", *rest, *rules]), "tools")


def _rule(number: int, tool: Tool, alone: bool) -> str:
    begin = json.dumps(_OPEN) if alone else "opened"
    head = json.dumps(f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    schema = {"type": "object", **tool.parameters, "x-guidance": SPACING}
    return f"call_{number}: {begin} {head} %json {json.dumps(schema)} {json.dumps('}' + chr(10) + _CLOSE)}"


@dataclass(slots=True)
class ToolCallReader:
    """Follows one completion. ``names``: the functions that were offered; what calls others stays text.
    ``forced``: the one that it can but call, however little of it comes.
    """

    names: frozenset[str]
    forced: str | None = None
    _held: str = ""
    _open: bool = False
    _looked: int = 0  # of what is held, behind how much a closing tag is sought
    _called: bool = False  # and nothing but spaces was said since

    def add(self, text: str) -> Iterator[str | ToolCall]:
        """Text that is safe to say and calls that are whole, in order."""
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
        """The end. A call that only lacks its closing tag is one; what is none was text after all.

        ``cut``: the answer was to go on. A call is then told with the part of its arguments that has come,
        as OpenAI does; one of which not even the name has come is told only if it was ``forced``.
        """
        rest, self._held = self._held, ""
        if self._open:
            call = self._read(rest[len(_OPEN) :]) or (self._half(rest) if cut else None)
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
        """What stands before the next opening tag; the line breaks right before it belong to the tag."""
        place = self._held.find(_OPEN)
        if place >= 0:
            self._open, self._looked = True, 0
            said, self._held = self._held[:place].rstrip("\n"), self._held[place:]
            return said
        keep = _may_open(self._held)
        said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return said

    def _call(self) -> ToolCall | None:
        """The call that is open, if it is whole: a closing tag inside of an argument does not close it."""
        while (place := self._held.find(_CLOSE, max(self._looked, len(_OPEN)))) >= 0:
            call = self._read(self._held[len(_OPEN) : place])
            self._looked = place + len(_CLOSE)
            if call is not None:
                self._open, self._held = False, self._held[self._looked :]
                return call
        return None

    def _half(self, text: str) -> ToolCall | None:
        found = _HALF.match(text)
        if found is None or found["name"] not in self.names:
            return None
        return ToolCall(found["name"], found["arguments"].lstrip())

    def _begins_call(self, text: str) -> bool:
        """Whether ``text`` is how a call begins, line breaks before it and all, up to its arguments."""
        text = text.lstrip("\n")
        begins = (f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": ' for name in self.names)
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


def _may_open(text: str) -> int:
    """Length of the longest tail of ``text`` that may begin line breaks and an opening tag."""
    tag = next((size for size in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:size])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip("\n"))

"""Tool calls between the tags of ``ModelSpec.tool_calls``, in JSON or XML: a grammar, and a streaming parser.

What an XML value means depends on the tool's schema: strings are written as they are, all else as JSON.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

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
    write_rules = _xml_rules if syntax.form == "xml" else _json_rules
    rules = [rule for number, tool in enumerate(tools) for rule in write_rules(number, tool, syntax, alone)]
    if syntax.form == "xml":
        rules += [_XML_TEXT, f"xml_text[lazy]: XML_TEXT {json.dumps(_XML_END)}"]
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


def _json_rules(number: int, tool: Tool, syntax: ToolCallSyntax, alone: bool) -> list[str]:
    begin = json.dumps(syntax.open) if alone else "opened"
    head = json.dumps(f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
    schema = {"type": "object", **tool.parameters, "x-guidance": SPACING}
    end = json.dumps("}\n" + syntax.close)
    return [f"call_{number}: {begin} {head} %json {json.dumps(schema)} {end}"]


_XML_END = "\n</parameter>\n"
_XML_TEXT = r"XML_TEXT: /(.|\n)*/ & ~/(.|\n)*<\/parameter>(.|\n)*/"
_XML_NAME = r"/[A-Za-z_][A-Za-z0-9_.-]*/"
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
    "string": (str,),
}


def _xml_rules(number: int, tool: Tool, syntax: ToolCallSyntax, alone: bool) -> list[str]:
    """Grammar of a call in XML: the declared parameters in order, or any if the schema declares none."""
    begin = json.dumps(syntax.open) if alone else "opened"
    head = json.dumps(f"\n<function={tool.name}>\n")
    tail = json.dumps(f"</function>\n{syntax.close}")
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required", ())
    if not isinstance(properties, dict) or not properties:
        free = "" if tool.parameters.get("additionalProperties") is False else f"any_{number}*"
        any_parameter = f'any_{number}: "<parameter=" {_XML_NAME} ">\\n" xml_text'
        return [f"call_{number}: {begin} {head} {free} {tail}", *([any_parameter] if free else [])]
    parts, rules = [], []
    for index, (name, schema) in enumerate(properties.items()):
        rule = f"parameter_{number}_{index}"
        parts.append(rule if name in required else f"{rule}?")
        opening = json.dumps(f"<parameter={name}>\n", ensure_ascii=False)
        value, more = _xml_value(schema, tool.parameters, rule)
        rules += [f"{rule}: {opening} {value}", *more]
    return [f"call_{number}: {begin} {head} {' '.join(parts)} {tail}", *rules]


def _xml_value(schema: Any, root: dict[str, Any], name: str) -> tuple[str, list[str]]:
    """What the grammar takes as a value of ``schema``, end tag included, and further rules for it."""
    end = json.dumps(_XML_END)
    schema = _resolve(schema, root)
    types = _types_of(schema)
    if types and "string" not in types:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"%json {json.dumps({**definitions, **schema, 'x-guidance': SPACING})} {end}", []
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
        return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {end}", []
    least, most = (
        limit if isinstance(limit := schema.get(key), int) and limit >= 0 else None
        for key in ("minLength", "maxLength")
    )
    pattern = schema.get("pattern") if types == {"string"} else None
    if types != {"string"} or (not least and most is None and not pattern):
        return "xml_text", []
    terminal = name.upper()
    limits = f"{{{least or 0},{'' if most is None else most}}}"
    rule = rf"{terminal}: /(.|\n){limits}/ & ~/(.|\n)*<\/parameter>(.|\n)*/"
    if isinstance(pattern, str) and pattern:
        before = "" if pattern.startswith("^") else r"(.|\n)*"
        after = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else r"(.|\n)*"
        inner = pattern.removeprefix("^") if not before else pattern
        inner = inner.removesuffix("$") if not after else inner
        rule += f" & /{before}({inner.replace('/', chr(92) + '/')}){after}/"
    return f"{name}_text", [f"{name}_text[lazy]: {terminal} {end}", rule]


def _resolve(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """``schema`` after following references within ``root``; {} for what is not understood."""
    for _ in range(16):
        if not isinstance(schema, dict):
            return {}
        target = schema.get("$ref")
        if not isinstance(target, str) or not target.startswith("#/"):
            return schema
        schema = root
        for key in target[2:].split("/"):
            schema = schema.get(key) if isinstance(schema, dict) else None
    return {}


def _types_of(schema: dict[str, Any]) -> set[str]:
    """Names of the types that values of ``schema`` may have; empty if it does not say."""
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {each for each in named if isinstance(each, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {
            next(name for name, kinds in _JSON_TYPES.items() if isinstance(value, kinds)) for value in values
        }
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            each = [_types_of(option) if isinstance(option, dict) else set() for option in options]
            return set().union(*each) if all(each) else set()
    return set()


def _xml_argument(text: str, schema: Any, root: dict[str, Any]) -> Any:
    """The value that ``text`` means for a parameter of ``schema``: JSON of its type, or the text itself."""
    types = _types_of(_resolve(schema, root))
    if types - {"string"}:
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return text
        kinds = tuple(kind for name in types - {"string"} for kind in _JSON_TYPES.get(name, ()))
        if "string" not in types or isinstance(value, kinds):
            return value
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# A value ends at the first closing tag that another parameter or the function's end follows.
_XML_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))",
    re.DOTALL,
)
_XML_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>")
_XML_CALL_END = re.compile(r"\s*</function>\s*")
_XML_PARTIAL = re.compile(r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*)", re.DOTALL)


def _without_cut_tag(value: str) -> str:
    """``value`` without what may be the beginning of its end, or of what follows it."""
    head, closed, tail = value.rpartition("</parameter>")
    if closed and any(tag.startswith(tail.strip()) for tag in ("<parameter=", "</function>")):
        return head.removesuffix("\n")
    cut = next((size for size in range(len(_XML_END), 0, -1) if value.endswith(_XML_END[:size])), 0)
    return value[: len(value) - cut]


def _read_xml(text: str) -> tuple[str, list[tuple[str, str]], str] | None:
    """Name, complete parameters as text, and the rest of a call in XML; None if it has no name yet."""
    found = _XML_FUNCTION.match(text)
    if found is None:
        return None
    parameters, at = [], found.end()
    while (parameter := _XML_PARAMETER.match(text, at)) is not None:
        parameters.append((parameter["name"], parameter["value"]))
        at = parameter.end()
    return found["name"], parameters, text[at:]


@dataclass(slots=True)
class ToolCallParser:
    """Splits one streamed completion into text and tool calls: ``add`` each piece of text, then ``flush``.

    ``names``: the functions that may be called; calls of other functions stay text. ``forced``: the function
    that the completion must call; None: it is free to call any or none. ``schemas``: JSON schema of each
    function's parameters, which tells the types of XML values; those of others are text.
    """

    names: frozenset[str]
    syntax: ToolCallSyntax
    forced: str | None = None
    schemas: Mapping[str, dict[str, Any]] = field(default_factory=dict)
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
        if self.syntax.form == "xml":
            return self._parse_partial_xml(text.removeprefix(self.syntax.open))
        found = _partial_call(self.syntax).match(text)
        if found is None or found["name"] not in self.names:
            return None
        return ToolCall(found["name"], found["arguments"].lstrip())

    def _begins_call(self, text: str) -> bool:
        """Whether ``text`` is a prefix of a call up to its arguments, after any line breaks."""
        text = text.lstrip("\n")
        if self.syntax.form == "xml":
            heads = (f"{self.syntax.open}\n<function={name}>\n" for name in self.names)
            return any(head.startswith(text) for head in heads)
        begins = (f'{self.syntax.open}\n{{"name": {json.dumps(name)}, "arguments": ' for name in self.names)
        return any(begin.startswith(text) for begin in begins)

    def _parse_partial_xml(self, text: str) -> ToolCall | None:
        """The call that ``text`` begins, its arguments as JSON without an end."""
        found = _read_xml(text)
        if found is None or found[0] not in self.names:
            return None
        name, parameters, rest = found
        arguments = self._xml_arguments(name, parameters)[:-1]
        if (partial := _XML_PARTIAL.match(rest)) is not None:
            schema = self._schema_of(name, partial["name"])
            value = _without_cut_tag(partial["value"])
            types = _types_of(_resolve(schema, self.schemas.get(name, {})))
            begun = value if types and "string" not in types else json.dumps(value, ensure_ascii=False)[:-1]
            arguments += f"{', ' if parameters else ''}{json.dumps(partial['name'])}: {begun}"
        return ToolCall(name, arguments)

    def _parse_xml(self, text: str) -> ToolCall | None:
        found = _read_xml(text)
        if found is None or found[0] not in self.names or not _XML_CALL_END.fullmatch(found[2]):
            return None
        return ToolCall(found[0], self._xml_arguments(found[0], found[1]))

    def _xml_arguments(self, name: str, parameters: list[tuple[str, str]]) -> str:
        root = self.schemas.get(name, {})
        values = {key: _xml_argument(text, self._schema_of(name, key), root) for key, text in parameters}
        return json.dumps(values, ensure_ascii=False)

    def _schema_of(self, name: str, parameter: str) -> Any:
        properties = self.schemas.get(name, {}).get("properties")
        return properties.get(parameter) if isinstance(properties, dict) else None

    def _parse_call(self, text: str) -> ToolCall | None:
        if self.syntax.form == "xml":
            return self._parse_xml(text)
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

"""Limits on JSON schemas."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from vlfit.api.conversation import Tool
from vlfit.api.schema_limits import MAX_PATTERN_SIZE, check_schema, check_schema_text, pattern_size
from vlfit.errors import InvalidRequest
from vlfit.models.registry import HERMES_TOOL_CALLS
from vlfit.prompt.tool_calls import tool_call_grammar

PATTERN = "(a|b)*a(a|b){%d}"


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def references(count: int) -> dict[str, Any]:
    chain = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(count)}
    return {"$defs": chain | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "items": ({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}, "form.minItems .* 10,000"),
    "items added up": ({"anyOf": [{"type": "array", "maxItems": 5000}] * 3}, r"form.anyOf\[2\].maxItems"),
    "properties": ({"type": "object", "minProperties": 10**6}, "form.minProperties"),
    "a multiple": ({"type": "integer", "multipleOf": 999_983}, "form.multipleOf .* 10,000"),
    "common multiple": ({"allOf": [{"multipleOf": n} for n in (97, 101, 103)]}, r"allOf\[1\].multipleOf"),
    "patterns together": ({"allOf": [{"pattern": PATTERN % n} for n in range(10, 30)]}, "form .* 8 "),
    "by references": (
        {"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", "pattern": PATTERN % n} for n in range(20)}},
        " 8 ",
    ),
    "names": ({"patternProperties": {PATTERN % n: {} for n in range(9)}}, "form.patternProperties"),
    "repetitions": ({"pattern": "^(a{1000}){1000}$"}, "form.pattern .* 10,000 "),
    "a long pattern": ({"pattern": "a" * 10_001}, "form.pattern .* 10,000 "),
    "deep": (nested(200), " 64 "),
    "references": (references(4000), " 2,000 "),
    "named": ({"properties": {f"p{number}": True for number in range(2001)}}, r"form\.properties .* 2,000 "),
    "required": ({"required": ["p"] * 2001}, r"form\.required .* 2,000 "),
    "parts": ({"anyOf": [{}] * 5001}, " 5,000 "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_too_large_schemas_are_refused_with_path_and_limit(name: str) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(InvalidRequest, match=words) as refused:
        check_schema(schema, "form")
    assert refused.value.param == "form"


@pytest.mark.parametrize(
    "schema",
    [
        nested(25),
        references(100),
        {"type": "array", "minItems": 1, "maxItems": 1000, "items": {"type": "number", "multipleOf": 0.01}},
        {"properties": {f"p{number}": {"type": "string", "pattern": r"^\d{1,64}$"} for number in range(100)}},
        {"properties": {f"p{number}": {"$ref": "#/$defs/a"} for number in range(900)}, "$defs": {"a": {}}},
        {"allOf": [{"properties": {"at": {"format": "date"}}}, {"properties": {"id": {"format": "uuid"}}}]},
        {"multipleOf": 1_000_000, "properties": {"minItems": {"type": "integer"}, "pattern": {"const": "a"}}},
        {"type": "object", "minItems": "none", "maxItems": True, "pattern": ["a"], "$ref": 3},
    ],
)
def test_usual_schemas_are_accepted(schema: dict[str, Any]) -> None:
    """What makes no sense is left to who knows schemas."""
    check_schema(schema, "form")


@pytest.mark.parametrize("text", ["[" * 200_000, "no JSON"])
def test_invalid_json(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_schema_text(text, "form")
    assert refused.value.param == "form"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "maxItems": 1e7},
        {"type": "array", "maxItems": float("inf")},
        {"properties": {"a": {"minLength": 10**9}}},
        {"anyOf": [True] * 5001},
        {"enum": list(range(30_000))},
        {"type": "object", "properties": {f"p{n}": {"pattern": f"^{n}a*$"} for n in range(400)}},
    ],
)
def test_llguidance_limits_the_rest(schema: dict[str, Any]) -> None:
    """It reads or refuses each within the time that a test has (by hand: 0.4 s and 100 MiB at most)."""
    check_schema(schema, "form")
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert any(matcher.compute_bitmask()) or matcher.is_error()


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        (r"^\d{4}-\d{2}$", 13 + 6),
        ("a{,10}b{ 10 }[a{5}]{3}", 22 + 10 + 10 + 5 + 3),
        ("(a{100}){100}", 13 * 10_000),
        ("(a{10}b)*{10}", 13 * 100),
        ("(a{10})?{ 10 }", 14 * 100),
        ("a{10}{10}", 9 * 100),
        ("(a{2,}b){0}", 11 * 2),
        ("(?x)a { #\n 1000 }", MAX_PATTERN_SIZE + 1),
        ("(?s-x:a)", MAX_PATTERN_SIZE + 1),
        ("(?P<x>a){3", 10),
    ],
)
def test_pattern_size_expands_repetitions(pattern: str, size: int) -> None:
    assert pattern_size(pattern) == size


def test_tool_schemas_are_checked() -> None:
    tool = Tool("look", "", {"type": "object", "properties": {"a": {"multipleOf": 999_983}}}, True)
    with pytest.raises(InvalidRequest, match=r"tools\[0\].properties.a.multipleOf") as refused:
        tool_call_grammar((tool,), HERMES_TOOL_CALLS, parallel=True, required=False)
    assert refused.value.param == "tools"
    with pytest.raises(InvalidRequest, match=r"response_format\.minItems"):
        tool_call_grammar((), HERMES_TOOL_CALLS, parallel=True, required=True, otherwise={"minItems": 10**9})

"""Parsing of request bodies, and pydantic's errors in one sentence that names the field."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vlfit.errors import InvalidRequest, VlfitError

Body = TypeVar("Body", bound=BaseModel)

MAX_COMMAS = 262_144  # as many as tokens in the longest Qwen3-VL context; takes at most 1 s to parse
_CONTENT_HINT = 'Use "text", "image_url", "video_url", "file", or "video" with "frames": [picture URLs].'
# Tags of union branches, which pydantic inserts into the path of a field.
_TAGS = {
    *("text", "parts", "nothing", "image_url", "video", "video_url", "file", "word", "one", "some"),
    *("str", "list[str]", "list[int]", "list[list[int]]", "json_object", "json_schema", "items"),
    *("message", "function_call", "function_call_output", "input_text", "input_image", "output_text"),
    *("input_file", "part", "object"),
}
_UNIONS = ("content", "stop", "tool_choice", "prompt", "input", "format", "output", "system")
# Of Anthropic's blocks, within the list ``parts`` and in ``source``; elsewhere they are fields.
_BLOCK_TAGS = {
    *("image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"),
    *("base64", "url", "content"),
}


def parse_body(kind: type[Body], body: bytes | bytearray) -> Body:
    """Parse JSON as the pydantic model ``kind``.

    Raises ``InvalidRequest`` for invalid JSON, more than ``MAX_COMMAS`` commas, or the first invalid field.
    """
    # Parsing holds the GIL. Values are separated by commas, so their number bounds the time.
    if body.count(b",") > MAX_COMMAS:
        raise InvalidRequest(
            f"the body has more than {MAX_COMMAS:,} commas, between its values or in its texts",
            "Send less in one request: no context has room for so much.",
        )
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


@contextmanager
def rename_params_in_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Rename a field in errors: in ``param``, message and hint of a ``VlfitError`` raised in the block.

    ``names``: from the internal name to the client's. An error whose ``param`` is none of them, or a part of
    one (``messages[0].content``), is not changed.
    """
    try:
        yield
    except VlfitError as error:
        for internal, sent in names.items():
            if error.param is not None and (
                error.param == internal or error.param.startswith((f"{internal}[", f"{internal}."))
            ):
                error.param = sent
                error.message, error.hint = (
                    re.sub(rf"\b{internal}\b", sent, text) for text in (error.message, error.hint)
                )
                break
        raise


def _explain(error: ValidationError) -> InvalidRequest:
    """The first error in one sentence; the value is quoted only if it is short."""
    first = error.errors(include_url=False, include_context=True, include_input=False)[0]
    kind, where = first["type"], _path(first["loc"])
    if kind == "too_long":  # do not fetch the value: it is too long to quote
        limit = first["ctx"]["max_length"]
        return InvalidRequest(f"{where} has more than {limit} items", f"Send at most {limit}.", param=where)
    sent = error.errors(include_url=False)[0].get("input")
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['msg']}", "Send a JSON object.")
    if kind == "model_type" and not where:
        return InvalidRequest("the body is JSON, but not an object", 'Send {"model": ..., ...}.')
    if kind == "missing":
        return InvalidRequest(f"{where} is missing", "See /docs on this server.", param=where)
    if kind == "union_tag_invalid":
        tag = first["ctx"]["tag"]
        return InvalidRequest(
            f"{where} has type {_short(tag)}, which vlfit does not support", _hint(where, first), param=where
        )
    if kind == "union_tag_not_found":
        return InvalidRequest(f"{where} has no type", _hint(where, first), param=where)
    return InvalidRequest(f"{where} is {_short(sent)}", f"{first['msg']}.", param=where)


def _hint(where: str, first: Any) -> str:
    if ".content[" in where or where.startswith("content["):
        expected = str(first.get("ctx", {}).get("expected_tags", ""))
        if not expected:
            return 'Give it a type, such as "text".'
        return _CONTENT_HINT if "image_url" in expected else f"Use {expected}."
    expected = first.get("ctx", {}).get("expected_tags")
    return f"Use {expected}." if expected else "See /docs on this server."


def _path(location: tuple[int | str, ...]) -> str:
    """Format a pydantic location as a field path, without the tags of unions.

    ``("messages", 0, "content", "parts", 1, "image_url", "image_url", "url")`` becomes
    ``messages[0].content[1].image_url.url``.
    """
    steps: list[str] = []
    for index, step in enumerate(location):
        before = location[index - 1] if index else None
        if isinstance(step, int):
            steps.append(f"[{step}]")
        elif not _is_tag(step, before, location[max(index - 2, 0) : index - 1]):
            steps.append(f".{step}" if steps else str(step))
    return "".join(steps)


def _is_tag(step: str, before: int | str | None, before_that: tuple[int | str, ...]) -> bool:
    """Whether ``step`` is the tag of a union's branch, not a field."""
    if step in _TAGS:
        return before in (*_UNIONS, "source") or isinstance(before, int)
    return step in _BLOCK_TAGS and (before == "source" or before_that == ("parts",))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"

"""What is wrong with a request's body, in one sentence that names the field.

Knows: pydantic's errors, and which of their steps say nothing to the sender. Does not know what fields mean.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vlfit.errors import InvalidRequest, VlfitError

Body = TypeVar("Body", bound=BaseModel)

MOST_COMMAS = 262_144  # tokens of the longest context of a Qwen3-VL; takes a second to read, at worst
_PARTS = 'use "text", "image_url", "video_url", or "video" with "frames": [picture URLs]'
# Names of the branches of unions, which pydantic puts on the way to a field.
_TAGS = {
    *("text", "parts", "nothing", "image_url", "video", "video_url", "word", "one", "some"),
    *("str", "list[str]", "list[int]", "list[list[int]]", "json_object", "json_schema", "items"),
    *("message", "function_call", "function_call_output", "input_text", "input_image", "output_text"),
}
_UNIONS = ("content", "stop", "tool_choice", "prompt", "input", "format", "output")


def read_body_as(kind: type[Body], body: bytes) -> Body:
    """``body`` as ``kind``. Raises ``InvalidRequest`` naming the first field that is wrong."""
    # While JSON is taken apart nothing else in this process has a turn. Values have commas between them.
    if body.count(b",") > MOST_COMMAS:
        raise InvalidRequest(
            f"the body holds more than {MOST_COMMAS:,} commas, between its values or in its texts",
            "send less at once: no context holds so much",
        )
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the field that was sent, in their words as well: ``names`` has it by the one that it was
    taken for.
    """
    try:
        yield
    except VlfitError as error:
        for taken, sent in names.items():
            if error.param is not None and (
                error.param == taken or error.param.startswith((f"{taken}[", f"{taken}."))
            ):
                error.param = sent
                error.message, error.hint = (
                    re.sub(rf"\b{taken}\b", sent, words) for words in (error.message, error.hint)
                )
                break
        raise


def _explain(error: ValidationError) -> InvalidRequest:
    """The first thing wrong, in one sentence; what was sent is quoted only if it is short."""
    first = error.errors(include_url=False, include_context=True, include_input=False)[0]
    kind, where = first["type"], _path(first["loc"])
    if kind == "too_long":  # what is too long to be read is too long to be quoted
        most = first["ctx"]["max_length"]
        return InvalidRequest(f"{where} holds more than {most}", f"send {most} at most", param=where)
    sent = error.errors(include_url=False)[0].get("input")
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {first['msg']}", "send a JSON object")
    if kind == "model_type" and not where:
        return InvalidRequest("the body is JSON, but not an object", 'send {"model": ..., ...}')
    if kind == "missing":
        return InvalidRequest(f"{where} is missing", "see OpenAI's API, or /docs here", param=where)
    if kind == "union_tag_invalid":
        tag = first["ctx"]["tag"]
        return InvalidRequest(
            f"{where} has type {_short(tag)}, which vlfit does not take", _hint(where, first), param=where
        )
    if kind == "union_tag_not_found":
        return InvalidRequest(f"{where} has no type", _hint(where, first), param=where)
    return InvalidRequest(f"{where} is {_short(sent)}", first["msg"], param=where)


def _hint(where: str, first: Any) -> str:
    if ".content[" in where or where.startswith("content["):
        expected = str(first.get("ctx", {}).get("expected_tags", ""))
        return _PARTS if "input_text" not in expected else f"use {expected}"
    expected = first.get("ctx", {}).get("expected_tags")
    return f"use {expected}" if expected else "see /docs"


def _path(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content", "parts", 1, "image_url", "image_url", "url")`` as a person writes it.

    Pydantic puts the tag of each union on the way; the tags say nothing to the sender and are dropped.
    """
    steps: list[str] = []
    for index, step in enumerate(location):
        before = location[index - 1] if index else None
        if isinstance(step, int):
            steps.append(f"[{step}]")
        elif step in _TAGS and (before in _UNIONS or isinstance(before, int)):
            continue
        else:
            steps.append(f".{step}" if steps else str(step))
    return "".join(steps)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"

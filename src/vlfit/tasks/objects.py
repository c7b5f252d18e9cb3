"""Scenes (summary, objects, visible text) and detection: objects with boxes, asked for as JSON.

Local models are held to the JSON schema by a grammar. Answers of other servers are parsed leniently; what is
repaired or dropped is listed in ``warnings``.
"""

from dataclasses import dataclass, replace
from typing import Any

from vlfit.api.conversation import ImagePart, single_turn
from vlfit.api.outputs import Answer, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend
from vlfit.errors import InvalidRequest
from vlfit.tasks.boxes import (
    BOX_KEYS,
    BOXES_SCHEMA,
    BoxReader,
    SceneObject,
    fenced_json_grammar,
    find_json,
    original_size,
    unreadable_answer,
)
from vlfit.tasks.describe import DETECT, SCENE
from vlfit.units import counted

SCENE_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "summary": {"type": "string"},
                "objects": BOXES_SCHEMA,
                "text": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["summary", "objects", "text"],
            "additionalProperties": False,
        },
        BOXES_SCHEMA,
    ]
}


@dataclass(frozen=True, slots=True)
class Scene:
    """Summary, objects and visible text of a picture. Parts that the model left out are empty.

    ``width``, ``height``: of the original picture turned upright, in pixels. ``answer``: the model's answer,
    unparsed. ``warnings``: what was repaired or dropped in parsing it.
    """

    summary: str
    objects: tuple[SceneObject, ...]
    text: tuple[str, ...]
    width: int
    height: int
    answer: Answer
    warnings: tuple[str, ...] = ()

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and the answer."""
        return self.answer.usage

    def __str__(self) -> str:
        return self.summary


def scene(backend: Backend, picture: ImagePart, sampling: SamplingParams | None = None) -> Scene:
    """Ask for a summary, objects with boxes, and the text visible in ``picture``.

    ``sampling``: None: greedy; its ``grammar`` is replaced. Raises ``UnreadableAnswer`` if the answer
    contains no JSON, ``PictureError``, and ``DoesNotFit`` if the prompt exceeds the planned context.
    """
    params = backend.without_thinking(sampling or SamplingParams())
    params = replace(params, grammar=fenced_json_grammar(SCENE_SCHEMA))
    answer = backend.stream(single_turn(SCENE, picture), params).answer()
    return read_scene(answer, *original_size(answer, picture))


def read_scene(answer: Answer, width: int, height: int) -> Scene:
    """Parse ``answer``, which is about a picture of ``width`` x ``height`` pixels (upright).

    Accepts JSON with ``summary``, ``objects`` and ``text``, or only a list of objects; missing parts are
    empty in the result, and what had to be repaired or dropped is in its ``warnings``. Boxes become pixels
    of the original picture. Raises ``UnreadableAnswer`` only if the answer contains no JSON.
    """
    found = find_json(answer.text)
    if found is None:
        raise unreadable_answer(answer)
    reader = _SceneReader(width, height, warnings=list(found.warnings))
    if answer.finish_reason == "length":
        reader.warnings.append(
            f"the answer was cut off at {counted(answer.usage.completion_tokens, 'token')}"
        )
    parts = _as_parts(found.value)
    return Scene(
        summary=reader.read_summary(parts.get("summary")),
        objects=reader.read_objects(parts.get("objects")),
        text=reader.read_text(parts.get("text")),
        width=width,
        height=height,
        answer=answer,
        warnings=tuple(reader.warnings),
    )


def _as_parts(value: Any) -> dict[str, Any]:
    """The three parts, also if the answer is only a list of objects, or a single object."""
    if isinstance(value, list):
        return {"objects": value}
    if any(name in value for name in BOX_KEYS):
        return {"objects": [value]}
    return dict(value)


class _SceneReader(BoxReader):
    """Reads the other parts of a scene, too."""

    def read_summary(self, value: Any) -> str:
        if isinstance(value, str):
            return value.strip()
        if value is not None:
            self.warnings.append(f"the summary is not a string and is dropped: {value!r}")
        return ""

    def read_text(self, value: Any) -> tuple[str, ...]:
        entries = [value] if isinstance(value, str) else value or []
        if not isinstance(entries, list):
            self.warnings.append(f"the visible text is not a list and is dropped: {value!r}")
            return ()
        dropped = [entry for entry in entries if not isinstance(entry, str)]
        if dropped:
            self.warnings.append(
                f"{len(dropped)} entries of the visible text are not strings and are dropped: {dropped!r}"
            )
        return tuple(entry for entry in entries if isinstance(entry, str) and entry.strip())


@dataclass(frozen=True, slots=True)
class Detection:
    """The objects found in a picture; ``objects`` is empty if the model found none.

    ``width``, ``height``: of the original picture turned upright, in pixels. ``answer``: the model's answer,
    unparsed. ``warnings``: what was repaired or dropped in parsing it.
    """

    objects: tuple[SceneObject, ...]
    width: int
    height: int
    answer: Answer
    warnings: tuple[str, ...] = ()

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and the answer."""
        return self.answer.usage


def detect(
    backend: Backend, picture: ImagePart, things: str, sampling: SamplingParams | None = None
) -> Detection:
    """Find ``things`` (``"cups"``, or several separated by commas) in ``picture``.

    ``sampling``: None: greedy; its ``grammar`` is replaced. Raises ``InvalidRequest`` if ``things`` is empty,
    ``UnreadableAnswer`` if the answer contains no JSON, ``PictureError``, and ``DoesNotFit`` if the prompt
    exceeds the planned context.
    """
    params = backend.without_thinking(sampling or SamplingParams())
    params = replace(params, grammar=fenced_json_grammar(BOXES_SCHEMA))
    answer = backend.stream(single_turn(detect_prompt(things), picture), params).answer()
    return read_detection(answer, *original_size(answer, picture))


def detect_prompt(things: str) -> str:
    """The prompt that asks for boxes of ``things``; double quotes and line breaks in them are removed.

    Raises ``InvalidRequest`` if no text is left.
    """
    cleaned = " ".join(things.replace('"', " ").split())
    if not cleaned:
        raise InvalidRequest("there is nothing to look for", 'name it, such as "cups"', param="things")
    return DETECT.format(cleaned)


def read_detection(answer: Answer, width: int, height: int) -> Detection:
    """Parse ``answer``, which is about a picture of ``width`` x ``height`` pixels (upright).

    Accepts a list of boxes, one box, or a scene, of which the objects are taken; what had to be repaired
    or dropped is in the result's ``warnings``. Boxes become pixels of the original picture. Raises
    ``UnreadableAnswer`` only if the answer contains no JSON.
    """
    found = find_json(answer.text)
    if found is None:
        raise unreadable_answer(answer)
    reader = BoxReader(width, height, warnings=list(found.warnings))
    if answer.finish_reason == "length":
        reader.warnings.append(
            f"the answer was cut off at {counted(answer.usage.completion_tokens, 'token')}"
        )
    value = found.value
    if isinstance(value, dict) and not any(name in value for name in BOX_KEYS):
        value = value.get("objects")  # a scene instead of a list
    return Detection(reader.read_objects(value), width, height, answer, tuple(reader.warnings))

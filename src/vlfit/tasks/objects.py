"""What is in a picture and where: asks for JSON, and reads what comes as generously as is sound.

Knows the three parts of a scene. Does not know how boxes are read (``boxes.py``). A model that runs here is
held to the form; what others answer is read all the same, and what is mended or dropped is said.
"""

from dataclasses import dataclass, replace
from typing import Any

from vlfit.api.conversation import ImagePart, ask
from vlfit.api.outputs import Answer, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend
from vlfit.errors import InvalidRequest
from vlfit.tasks.boxes import (
    BOX_NAMES,
    BOXES,
    BoxReader,
    SceneObject,
    fenced_json,
    find_json,
    original_size,
    unreadable,
)
from vlfit.tasks.describe import DETECT, SCENE

SCENE_FORM = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "summary": {"type": "string"},
                "objects": BOXES,
                "text": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["summary", "objects", "text"],
            "additionalProperties": False,
        },
        BOXES,
    ]
}


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture taken apart. ``width`` and ``height`` are the original's, in pixels, upright.

    ``warnings`` says in words what was mended or dropped of the model's answer.
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
        """Tokens that it cost."""
        return self.answer.usage

    def __str__(self) -> str:
        return self.summary


def scene(backend: Backend, picture: ImagePart, sampling: SamplingParams | None = None) -> Scene:
    """Ask for a summary, objects with boxes, and the words seen in ``picture``.

    Raises ``UnreadableAnswer`` if the model did not answer in JSON; ``PictureError`` and ``DoesNotFit`` as
    every task does.
    """
    wishes = replace(sampling or SamplingParams(), form=fenced_json(SCENE_FORM))
    answer = backend.stream(ask(SCENE, picture), wishes).answer()
    return read_scene(answer, *original_size(answer, picture))


def read_scene(answer: Answer, width: int, height: int) -> Scene:
    """What ``answer`` says of a picture of ``width`` x ``height`` pixels.

    It should be JSON with the three parts asked for, or a bare list of objects with boxes.
    """
    found = find_json(answer.text)
    if found is None:
        raise unreadable(answer)
    reader = _Reader(width, height, warnings=list(found.warnings))
    if answer.finish_reason == "length":
        reader.warnings.append(f"the answer was cut off at {answer.usage.completion_tokens} tokens")
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
    """The three parts, also when the model gave only its list of objects, or only one of them."""
    if isinstance(value, list):
        return {"objects": value}
    if any(name in value for name in BOX_NAMES):
        return {"objects": [value]}
    return dict(value)


class _Reader(BoxReader):
    """Of the other parts of a scene, too."""

    def read_summary(self, value: Any) -> str:
        if isinstance(value, str):
            return value.strip()
        if value is not None:
            self.warnings.append(f"the summary is no text and is dropped: {value!r}")
        return ""

    def read_text(self, value: Any) -> tuple[str, ...]:
        words = [value] if isinstance(value, str) else value or []
        if not isinstance(words, list):
            self.warnings.append(f"the text seen is no list and is dropped: {value!r}")
            return ()
        dropped = [word for word in words if not isinstance(word, str)]
        if dropped:
            self.warnings.append(f"{len(dropped)} of the words seen are no text and are dropped: {dropped!r}")
        return tuple(word for word in words if isinstance(word, str) and word.strip())


# Where things are in a picture: asks as Qwen3-VL was taught to be asked, and gives boxes in pixels.
#
# Knows the question. Does not know how boxes are read (``boxes.py``) or drawn (``tasks/objects.py``).


@dataclass(frozen=True, slots=True)
class Detection:
    """What was found of what was asked for. ``width`` and ``height`` are the original picture's, upright.

    ``warnings`` says in words what was mended or dropped of the model's answer.
    """

    objects: tuple[SceneObject, ...]
    width: int
    height: int
    answer: Answer
    warnings: tuple[str, ...] = ()

    @property
    def usage(self) -> Usage:
        """Tokens that it cost."""
        return self.answer.usage


def detect(
    backend: Backend, picture: ImagePart, things: str, sampling: SamplingParams | None = None
) -> Detection:
    """Ask where ``things`` (``"cups"``, or several with commas) are in ``picture``.

    Raises ``InvalidRequest`` for no things, ``UnreadableAnswer`` if the model did not answer in JSON;
    ``PictureError`` and ``DoesNotFit`` as every task does.
    """
    wishes = replace(sampling or SamplingParams(), form=fenced_json(BOXES))
    answer = backend.stream(ask(detect_prompt(things), picture), wishes).answer()
    return read_detection(answer, *original_size(answer, picture))


def detect_prompt(things: str) -> str:
    """The question for ``things``. Raises ``InvalidRequest`` if there are none."""
    wanted = " ".join(things.replace('"', " ").split())
    if not wanted:
        raise InvalidRequest("there is nothing to look for", 'name it, such as "cups"', param="things")
    return DETECT.format(wanted)


def read_detection(answer: Answer, width: int, height: int) -> Detection:
    """What ``answer`` says of a picture of ``width`` x ``height`` pixels: a list of boxes, or one box."""
    found = find_json(answer.text)
    if found is None:
        raise unreadable(answer)
    reader = BoxReader(width, height, warnings=list(found.warnings))
    if answer.finish_reason == "length":
        reader.warnings.append(f"the answer was cut off at {answer.usage.completion_tokens} tokens")
    value = found.value
    if isinstance(value, dict) and not any(name in value for name in BOX_NAMES):
        value = value.get("objects")  # as a scene would be told
    return Detection(reader.read_objects(value), width, height, answer, tuple(reader.warnings))

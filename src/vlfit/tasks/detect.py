"""Where things are in a picture: asks as Qwen3-VL was taught to be asked, and gives boxes in pixels.

Knows the question. Does not know how boxes are read (``boxes.py``) or drawn (``drawing.py``).
"""

from dataclasses import dataclass, replace

from vlfit.backends.base import Backend
from vlfit.engine.answer import Answer, Usage
from vlfit.engine.conversation import ImagePart, ask
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import InvalidRequest
from vlfit.tasks.boxes import BOX_NAMES, BOXES, BoxReader, SceneObject, fenced_json, original_size, unreadable
from vlfit.tasks.loose_json import find_json
from vlfit.tasks.prompts import DETECT


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

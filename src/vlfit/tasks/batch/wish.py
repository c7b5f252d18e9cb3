"""What is asked of every picture of a batch, and how the answer is read: one small record that pickles.

Knows the tasks (caption, ask, scene, detect, a form). Knows nothing of files, or of who answers.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from vlfit.engine import conversation
from vlfit.engine.answer import Answer
from vlfit.engine.conversation import Conversation, ImagePart
from vlfit.engine.sampling import Form, SamplingParams
from vlfit.errors import InvalidRequest, UnreadableAnswer
from vlfit.tasks.boxes import BOXES, fenced_json, original_size
from vlfit.tasks.detect import detect_prompt, read_detection
from vlfit.tasks.prompts import CAPTION_LONG, CAPTION_SHORT, SCENE
from vlfit.tasks.scene import SCENE_FORM, read_scene

# The model chooses its words better where it knows the fields; the form itself is kept to in any case.
_FORM = "Describe this picture as JSON that keeps to this schema: {}"

Kind = Literal["caption", "ask", "scene", "detect"]


@dataclass(frozen=True, slots=True)
class Wish:
    """Build with ``caption``, ``ask``, ``scene`` or ``detect``.

    ``prompt`` is the text that stands behind the picture. ``schema`` is a JSON schema as text, which answers
    must keep to; None: free words (or, for a scene and a detection, their own form).
    """

    kind: Kind
    prompt: str
    system: str = ""
    schema: str | None = None

    @classmethod
    def caption(cls, detail: Literal["short", "long"] = "short") -> Self:
        """What the picture shows, in a sentence or in as many as it takes."""
        return cls("caption", CAPTION_LONG if detail == "long" else CAPTION_SHORT)

    @classmethod
    def ask(cls, question: str, *, system: str = "", schema: str | None = None) -> Self:
        """An answer to ``question``. Raises ``InvalidRequest`` if that is empty, or ``schema`` no JSON."""
        if not question.strip():
            raise InvalidRequest("the question is empty", "ask something, such as: what is this?")
        if schema is not None:
            _check_schema(schema)
        return cls("ask", question, system, schema)

    @classmethod
    def form(cls, schema: str) -> Self:
        """The fields of ``schema``, filled in from what is seen. Raises ``InvalidRequest`` if it is none."""
        return cls.ask(_FORM.format(schema.strip()), schema=schema)

    @classmethod
    def scene(cls) -> Self:
        """A summary, objects with boxes, and the words seen."""
        return cls("scene", SCENE)

    @classmethod
    def detect(cls, things: str) -> Self:
        """Where ``things`` are. Raises ``InvalidRequest`` for none."""
        return cls("detect", detect_prompt(things))

    def conversation(self, picture: ImagePart) -> Conversation:
        """What is said to the model about ``picture``."""
        return conversation.ask(self.prompt, picture, system=self.system)

    def sampling(self, wanted: SamplingParams) -> SamplingParams:
        """``wanted`` with the form that this wish asks for."""
        if self.kind == "scene":
            return replace(wanted, form=fenced_json(SCENE_FORM))
        if self.kind == "detect":
            return replace(wanted, form=fenced_json(BOXES))
        if self.schema is not None:
            return replace(wanted, form=Form("json", self.schema))
        return wanted

    def fields(self, answer: Answer, picture: ImagePart) -> dict[str, Any]:
        """What ``answer`` says, as fields of a record beside its ``text``.

        Raises ``UnreadableAnswer`` where it is not in the form that was asked for.
        """
        if self.kind == "scene":
            scene = read_scene(answer, *original_size(answer, picture))
            return {
                "summary": scene.summary,
                "objects": [asdict(thing) for thing in scene.objects],
                "words": list(scene.text),
                "warnings": list(scene.warnings),
            }
        if self.kind == "detect":
            found = read_detection(answer, *original_size(answer, picture))
            return {
                "objects": [asdict(thing) for thing in found.objects],
                "width": found.width,
                "height": found.height,
                "warnings": list(found.warnings),
            }
        return {"value": _read_value(answer)} if self.schema is not None else {}


def _check_schema(schema: str) -> None:
    try:
        value = json.loads(schema)
    except ValueError as error:
        raise InvalidRequest(f"the schema is no JSON: {error}", "give a file with a JSON schema") from error
    if not isinstance(value, dict):
        raise InvalidRequest(
            "the schema is no JSON object", 'give one such as {"type": "object", "properties": ...}'
        )


def _read_value(answer: Answer) -> Any:
    """The JSON that an answer is. A server that does not hold its model to the form may send anything."""
    try:
        return json.loads(answer.text)
    except ValueError:
        cut = answer.finish_reason == "length"
        raise UnreadableAnswer(
            f"the answer is no JSON: {answer.text[:200]!r}",
            "give it more room with --max-tokens" if cut else "the server does not hold to a schema",
            answer=answer.text,
        ) from None

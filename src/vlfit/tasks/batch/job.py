"""A batch as one record that pickles, and its work on one picture: from an item and a backend to a record.

Knows how a picture is asked about and what a record holds. Does not know how many run at once (``runner.py``
and ``ray`` do), where items come from or where records go.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from vlfit.api import conversation
from vlfit.api.conversation import Conversation, ImagePart
from vlfit.api.outputs import Answer, ImageSeen, Usage
from vlfit.api.sampling_params import Form, SamplingParams
from vlfit.backends.base import Backend, LocalBackend, Prepared
from vlfit.errors import InvalidRequest, UnreadableAnswer
from vlfit.tasks.batch.items import Item, Record, shown_name
from vlfit.tasks.boxes import BOXES, fenced_json, original_size
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT, SCENE
from vlfit.tasks.objects import SCENE_FORM, detect_prompt, read_detection, read_scene
from vlfit.tasks.pictures import checked_picture

# What is asked of every picture of a batch, and how the answer is read: one small record that pickles.
#
# Knows the tasks (caption, ask, scene, detect, a form). Knows nothing of files, or of who answers.


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


@dataclass(frozen=True, slots=True)
class Job:
    """What to do with which pictures, and where the records go.

    ``sources`` are folders, globs, list files, tar shards or tables, as they were typed; ``output`` is a
    ``.jsonl`` or ``.parquet`` path; ``sidecars`` are kinds of files to write beside the pictures; ``shard``
    is the part of the pictures that it is about (``2/8``), or None for all. ``engine``: options of the engine
    that change what is said; None: whoever answers was opened by somebody else.
    """

    wish: Wish
    sampling: SamplingParams
    sources: tuple[str, ...]
    output: Path
    sidecars: tuple[str, ...] = ()
    shard: str | None = None
    engine: Mapping[str, Any] | None = None

    def facts(self) -> dict[str, Any]:
        """What decides the records, as JSON has it. Two jobs that differ here may not share an output."""
        return {
            "task": self.wish.kind,
            "prompt": self.wish.prompt,
            "system": self.wish.system,
            "schema": self.wish.schema,
            "sampling": asdict(self.sampling),
            "shard": self.shard or "all",
            **({} if self.engine is None else {"engine": dict(self.engine)}),
        }


@dataclass(frozen=True, slots=True)
class Work:
    """What is done with each item. Whoever has a backend can do it: ``run`` as a whole, from as many threads
    as the backend takes requests; or in steps, ``picture``, ``prepare`` and ``record``, to start it oneself.

    All raise ``PictureError``, ``DoesNotFit`` or ``UnreadableAnswer`` for this one picture, and what a
    backend raises for all.
    """

    wish: Wish
    sampling: SamplingParams

    @classmethod
    def of(cls, job: Job) -> "Work":
        """The work of ``job``; pickles, and so can go to another process."""
        return cls(job.wish, job.wish.sampling(job.sampling))

    def picture(self, item: Item) -> ImagePart:
        """Read the bytes. What is surely no picture is refused here already."""
        return checked_picture(item.read(), item.key)

    def prepare(self, backend: LocalBackend, picture: ImagePart) -> Prepared:
        """Decode and count: the request, ready to be started with ``self.sampling``."""
        return backend.prepare(self.wish.conversation(picture), self.sampling)

    def record(self, item: Item, picture: ImagePart, answer: Answer) -> Record:
        """The line of the output, as ``vlfit caption --json`` has it without the times: those would make two
        runs differ that say the same.
        """
        fields = {
            "key": item.key,
            "picture": shown_name(item.path) if item.path is not None else item.key,
            **self.wish.fields(answer, picture),
            "model": answer.model,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "images": [_facts(image) for image in answer.images],
            "usage": {**_facts(answer.usage), "total_tokens": answer.usage.total_tokens},
        }
        return {**fields, "extra": dict(item.extra)} if item.extra else fields

    def run(self, backend: Backend, item: Item) -> Record:
        """All of it, waiting for the answer."""
        picture = self.picture(item)
        answer = backend.stream(self.wish.conversation(picture), self.sampling).answer()
        return self.record(item, picture, answer)


def _facts(told: ImageSeen | Usage) -> dict[str, Any]:
    """Its fields: ``asdict`` copies what is in them too, and takes twenty times as long."""
    return {name: getattr(told, name) for name in told.__slots__}

"""What a batch does: the question for each picture, the whole job, and the task that makes an item a record.

All three are frozen dataclasses that pickle, so that a job can be sent to other machines.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from vlfit.api import conversation
from vlfit.api.conversation import Conversation, ImagePart
from vlfit.api.outputs import Answer, ImageSeen, Usage
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.backends.base import Backend, Prepared
from vlfit.errors import InvalidRequest, UnreadableAnswer
from vlfit.tasks.batch.items import Item, Record, shown_name
from vlfit.tasks.boxes import BOXES_SCHEMA, fenced_json, original_size
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT, SCENE
from vlfit.tasks.objects import SCENE_SCHEMA, detect_prompt, read_detection, read_scene
from vlfit.tasks.pictures import checked_picture

# The grammar enforces the schema anyway, but answers are better if the model knows the fields.
_SCHEMA_PROMPT = "Describe this picture as JSON that keeps to this schema: {}"

TaskKind = Literal["caption", "ask", "scene", "detect"]


@dataclass(frozen=True, slots=True)
class Wish:
    """What to ask about each picture. Build it with ``caption``, ``ask``, ``form``, ``scene`` or ``detect``.

    ``prompt`` follows the picture. ``schema`` is a JSON schema, as text, that answers must match; None: free
    text (scenes and detections have schemas of their own).
    """

    kind: TaskKind
    prompt: str
    system: str = ""
    schema: str | None = None

    @classmethod
    def caption(cls, detail: Literal["short", "long"] = "short") -> Self:
        """A caption, of one sentence or in detail."""
        return cls("caption", CAPTION_LONG if detail == "long" else CAPTION_SHORT)

    @classmethod
    def ask(cls, question: str, *, system: str = "", schema: str | None = None) -> Self:
        """An answer to ``question``, as JSON if there is a ``schema``.

        Raises ``InvalidRequest`` if the question is empty or the schema is not valid.
        """
        if not question.strip():
            raise InvalidRequest("the question is empty", "Ask something, such as: what is this?")
        if schema is not None:
            _check_schema(schema)
        return cls("ask", question, system, schema)

    @classmethod
    def form(cls, schema: str) -> Self:
        """Fields of ``schema``, filled in from the picture. Raises ``InvalidRequest`` if it is not valid."""
        return cls.ask(_SCHEMA_PROMPT.format(schema.strip()), schema=schema)

    @classmethod
    def scene(cls) -> Self:
        """A summary, objects with boxes, and visible text."""
        return cls("scene", SCENE)

    @classmethod
    def detect(cls, things: str) -> Self:
        """Boxes of ``things``. Raises ``InvalidRequest`` if it is empty."""
        return cls("detect", detect_prompt(things))

    def conversation(self, picture: ImagePart) -> Conversation:
        """The messages for ``picture``."""
        return conversation.ask(self.prompt, picture, system=self.system)

    def sampling(self, base: SamplingParams) -> SamplingParams:
        """``base`` with the grammar of this task, if it has one."""
        if self.kind == "scene":
            return replace(base, grammar=fenced_json(SCENE_SCHEMA))
        if self.kind == "detect":
            return replace(base, grammar=fenced_json(BOXES_SCHEMA))
        if self.schema is not None:
            return replace(base, grammar=Grammar("json", self.schema))
        return base

    def fields(self, answer: Answer, picture: ImagePart) -> dict[str, Any]:
        """Parse ``answer`` into fields of the record, besides ``text``.

        Raises ``UnreadableAnswer`` if it does not match the schema.
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
        raise InvalidRequest(f"the schema is not JSON: {error}", "Give a file with a JSON schema.") from error
    if not isinstance(value, dict):
        raise InvalidRequest(
            "the schema is not a JSON object", 'Write one such as {"type": "object", "properties": ...}.'
        )


def _read_value(answer: Answer) -> Any:
    """Parse an answer as JSON. Servers without structured output may send anything."""
    try:
        return json.loads(answer.text)
    except ValueError:
        cut = answer.finish_reason == "length"
        raise UnreadableAnswer(
            f"the answer is not JSON: {answer.text[:200]!r}",
            "Raise --max-tokens." if cut else "The server does not enforce JSON schemas: use another.",
            answer=answer.text,
        ) from None


@dataclass(frozen=True, slots=True)
class Job:
    """What to ask about which pictures, and where the records go.

    ``sources`` are folders, globs, list files, tar shards or tables, as typed; ``output`` is a ``.jsonl`` or
    ``.parquet`` path; ``sidecars`` are kinds of sidecar files; ``shard`` is the part of the pictures to do
    (``2/8``), None for all. ``engine``: engine options that affect answers; None if unknown, because the
    backend was opened elsewhere.
    """

    wish: Wish
    sampling: SamplingParams
    sources: tuple[str, ...]
    output: Path
    sidecars: tuple[str, ...] = ()
    shard: str | None = None
    engine: Mapping[str, Any] | None = None

    def facts(self) -> dict[str, Any]:
        """What determines the records, as JSON. Two jobs that differ here may not share an output."""
        sampling = asdict(self.sampling)
        sampling["form"] = sampling.pop("grammar")  # its name in the file
        return {
            "task": self.wish.kind,
            "prompt": self.wish.prompt,
            "system": self.wish.system,
            "schema": self.wish.schema,
            "sampling": sampling,
            "shard": self.shard or "all",
            **({} if self.engine is None else {"engine": dict(self.engine)}),
        }


@dataclass(frozen=True, slots=True)
class PictureTask:
    """Turns an item into a record: ``run`` does it all; ``load``, ``prepare`` and ``record`` are its steps.

    They raise ``PictureError``, ``DoesNotFit`` or ``UnreadableAnswer`` for this picture, and the backend's
    errors, which concern all pictures.
    """

    wish: Wish
    sampling: SamplingParams

    @classmethod
    def from_job(cls, job: Job) -> "PictureTask":
        """The task of ``job``."""
        return cls(job.wish, job.wish.sampling(job.sampling))

    def load(self, item: Item) -> ImagePart:
        """Read the picture's bytes. Raises ``NotAPicture`` if the first ones rule a picture out."""
        return checked_picture(item.read(), item.key)

    def prepare(self, backend: Backend, picture: ImagePart) -> Prepared:
        """Decode and tokenize: the request, ready to start with ``self.sampling``."""
        return backend.prepare(self.wish.conversation(picture), self.sampling)

    def record(self, item: Item, picture: ImagePart, answer: Answer) -> Record:
        """The record of an answer: the fields of ``vlfit caption --json`` without timings, which would make
        identical runs differ.
        """
        fields = {
            "key": item.key,
            "picture": shown_name(item.path) if item.path is not None else item.key,
            **self.wish.fields(answer, picture),
            "model": answer.model,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "images": [_to_dict(image) for image in answer.images],
            "usage": {**_to_dict(answer.usage), "total_tokens": answer.usage.total_tokens},
        }
        return {**fields, "extra": dict(item.extra)} if item.extra else fields

    def run(self, backend: Backend, item: Item) -> Record:
        """Load, ask and wait for the answer."""
        picture = self.load(item)
        answer = backend.stream(self.wish.conversation(picture), self.sampling).answer()
        return self.record(item, picture, answer)


def _to_dict(value: ImageSeen | Usage) -> dict[str, Any]:
    """Like ``asdict``, without its deep copies: twenty times as fast."""
    return {name: getattr(value, name) for name in value.__slots__}

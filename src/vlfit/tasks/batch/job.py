"""What a batch does: the question for each picture, the whole job, and the task that makes an item a record.

All three are frozen dataclasses that pickle, so that a job can be sent to other machines.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from vlfit.api import conversation
from vlfit.api.conversation import Conversation, ImagePart, VideoPart
from vlfit.api.outputs import Answer, ImageSeen, Usage
from vlfit.api.pooling import PoolingParams
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.backends.base import Backend, Prepared, QueuedStream
from vlfit.errors import DoesNotFit, InvalidRequest, NotAPicture, UnreadableAnswer, UsageError
from vlfit.prompt.reasoning import reasoning_then
from vlfit.tasks.batch.items import Item, Record, display_name
from vlfit.tasks.boxes import BOXES_SCHEMA, fenced_json_grammar, original_size
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT, SCENE, caption_prompt
from vlfit.tasks.embeddings import check_embeds, float_list, prepare_embedding
from vlfit.tasks.objects import SCENE_SCHEMA, detect_prompt, read_detection, read_scene
from vlfit.tasks.pictures import make_image_part

# The grammar enforces the schema anyway, but answers are better if the model knows the fields.
_SCHEMA_PROMPT = "Describe this picture as JSON that keeps to this schema: {}"

_MIN_FRAMES = 2  # of a clip

TaskKind = Literal["caption", "ask", "scene", "detect", "embed"]


@dataclass(frozen=True, slots=True)
class Wish:
    """What to ask about each picture.

    Create it with ``caption``, ``ask``, ``form``, ``scene``, ``detect`` or ``embed``. ``prompt`` follows the
    picture; of ``embed`` it is the instruction, empty for the model's own. ``schema`` is a JSON schema, as
    text, that answers must match; None: free text (scenes and detections have schemas of their own).
    ``dimensions``: of vectors; None: all.
    """

    kind: TaskKind
    prompt: str
    system: str = ""
    schema: str | None = None
    dimensions: int | None = None

    @classmethod
    def caption(cls, detail: Literal["short", "long"] = "short") -> Self:
        """A caption, of one sentence or in detail."""
        return cls("caption", CAPTION_LONG if detail == "long" else CAPTION_SHORT)

    @classmethod
    def ask(cls, question: str, *, system: str = "", schema: str | None = None) -> Self:
        """An answer to ``question``: JSON that matches ``schema`` (a JSON schema as text); None: free text.

        Raises ``InvalidRequest`` if the question is empty, or the schema is not a JSON object.
        """
        if not question.strip():
            raise InvalidRequest("the question is empty", "Ask something, such as: what is this?")
        if schema is not None:
            _check_schema(schema)
        return cls("ask", question, system, schema)

    @classmethod
    def form(cls, schema: str) -> Self:
        """JSON that matches ``schema`` (a JSON schema as text), filled in from the picture.

        Raises ``InvalidRequest`` if the schema is not a JSON object.
        """
        return cls.ask(_SCHEMA_PROMPT.format(schema.strip()), schema=schema)

    @classmethod
    def scene(cls) -> Self:
        """A summary, objects with boxes, and visible text."""
        return cls("scene", SCENE)

    @classmethod
    def detect(cls, things: str) -> Self:
        """Boxes of ``things`` (``"cups"``, or several separated by commas).

        Raises ``InvalidRequest`` if it is empty.
        """
        return cls("detect", detect_prompt(things))

    @classmethod
    def embed(cls, instruction: str = "", *, dimensions: int | None = None) -> Self:
        """The vector of each picture. ``instruction``: what it is for; empty: the model's own.

        ``dimensions``: the first components to keep; None: all. Raises ``InvalidRequest`` if it is below 1.
        """
        if dimensions is not None and dimensions < 1:
            raise InvalidRequest(f"dimensions is {dimensions}", "Use 1 or more.", param="dimensions")
        return cls("embed", instruction, dimensions=dimensions)

    def conversation(self, picture: ImagePart | VideoPart) -> Conversation:
        """The messages to send for ``picture``. For captions of clips, a prompt for clips replaces
        ``prompt``.
        """
        prompt = self.prompt
        if self.kind == "caption" and isinstance(picture, VideoPart):
            prompt = caption_prompt(picture, "long" if prompt == CAPTION_LONG else "short")
        return conversation.single_turn(prompt, picture, system=self.system)

    def with_grammar(self, base: SamplingParams) -> SamplingParams:
        """``base`` with the grammar that this task's answers must match; unchanged if they are free text."""
        if self.kind == "scene":
            return replace(base, grammar=fenced_json_grammar(SCENE_SCHEMA))
        if self.kind == "detect":
            return replace(base, grammar=fenced_json_grammar(BOXES_SCHEMA))
        if self.schema is not None:
            return replace(base, grammar=Grammar("json", self.schema))
        return base

    def parse_answer(self, answer: Answer, picture: ImagePart | VideoPart) -> dict[str, Any]:
        """Parse ``answer`` into the fields of a record besides ``text``.

        Scene: ``summary``, ``objects``, ``words``, ``warnings``; detection: ``objects``, ``width``,
        ``height``, ``warnings``; with ``schema``: ``value``; a vector: ``embedding``; free text: none. Boxes
        are in pixels of ``picture``'s original size. Raises ``UnreadableAnswer`` if the answer is not such
        JSON.
        """
        if self.kind == "embed":
            return {"embedding": [] if answer.pooled is None else float_list(answer.pooled)}
        if isinstance(picture, VideoPart):
            return {"value": _read_value(answer)} if self.schema is not None else {}
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

    ``sampling``: without the grammar of ``wish``. ``sources``: arguments of ``open_sources``, as typed.
    ``output``: a ``.jsonl``, ``.ndjson`` or ``.parquet`` path. ``sidecars``: of ``sidecars.KINDS``.
    ``shard``: the part of the pictures to do (``2/8``); None: all. ``engine``: engine options that affect
    answers; None if unknown, because the backend was opened elsewhere.
    """

    wish: Wish
    sampling: SamplingParams
    sources: tuple[str, ...]
    output: Path
    sidecars: tuple[str, ...] = ()
    shard: str | None = None
    engine: Mapping[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        """What determines the records, as JSON, without sources and model, for the job file.

        Jobs that differ in it may not share an output, except with ``--force``.
        """
        sampling = asdict(self.sampling)
        sampling["form"] = sampling.pop("grammar")  # its name in the file
        del sampling["template_variables"]  # none in a batch
        return {
            "task": self.wish.kind,
            "prompt": self.wish.prompt,
            "system": self.wish.system,
            "schema": self.wish.schema,
            "sampling": sampling,
            "shard": self.shard or "all",
            **({"dimensions": self.wish.dimensions} if self.wish.kind == "embed" else {}),
            **({} if self.engine is None else {"engine": dict(self.engine)}),
        }


@dataclass(frozen=True, slots=True)
class PictureTask:
    """The steps from an item to its record: ``load``, ``prepare``, ``record``; ``run`` does all of them.

    They raise ``PictureError``, ``DoesNotFit`` or ``UnreadableAnswer`` for this picture, and the backend's
    errors, which concern all pictures. ``sampling``: with the grammar of ``wish``.
    """

    wish: Wish
    sampling: SamplingParams

    @classmethod
    def from_job(cls, job: Job) -> "PictureTask":
        """The task of ``job``, with its grammar in ``sampling``."""
        return cls(job.wish, job.wish.with_grammar(job.sampling))

    def check(self, backend: Backend) -> None:
        """Raise ``UsageError`` if the model of ``backend`` is made for something else."""
        if self.wish.kind == "embed":
            check_embeds(backend)
        elif not backend.capabilities.generates:
            kind = backend.pooling.kind if backend.pooling is not None else "other"
            raise UsageError(
                f"{backend.model!r} writes no text: it is of the kind {kind}",
                "Add --embed, or name another model, such as 4B.",
                param="model",
            )

    def fitted(self, backend: Backend) -> "PictureTask":
        """This task for the model of ``backend``: without reasoning where the model has a choice.

        Where it has none, the grammar is for the answer after the reasoning.
        """
        params = backend.without_thinking(self.sampling)
        return replace(
            self, sampling=replace(params, grammar=reasoning_then(params.grammar, backend.thinking(params)))
        )

    def load(self, item: Item) -> ImagePart | VideoPart:
        """Read the item's picture or clip; it is labelled with the item's key, and not decoded yet.

        Raises ``PictureError``, also for bytes that are not a picture, and for a clip if a scene or boxes are
        asked for.
        """
        content = item.read()
        if isinstance(content, bytes):
            return make_image_part(content, item.key)
        if isinstance(content, ImagePart):
            return replace(content, label=item.key)
        if self.wish.kind in ("scene", "detect"):
            raise NotAPicture(
                f"{item.key} is a video, and a {self.wish.kind} is of a single picture",
                "Name times: --at 0:35.",
            )
        return replace(content, label=item.key)

    def prepare(self, backend: Backend, picture: ImagePart | VideoPart) -> Prepared:
        """Decode ``picture`` and tokenize the prompt: a request, ready for ``backend.start``.

        Every other frame of a clip is dropped until it fits. Raises ``DoesNotFit`` if a picture does not fit,
        or two frames do not.
        """
        while True:
            try:
                if self.wish.kind == "embed":
                    pooling = PoolingParams(dimensions=self.wish.dimensions)
                    return prepare_embedding(backend, (picture,), self.wish.prompt, pooling)
                return backend.prepare(self.wish.conversation(picture), self.sampling)
            except DoesNotFit:
                if not isinstance(picture, VideoPart) or len(picture.frames) <= _MIN_FRAMES:
                    raise
                picture = replace(picture, frames=picture.frames[::2], fps=picture.fps / 2)

    def record(self, item: Item, picture: ImagePart | VideoPart, answer: Answer) -> Record:
        """The record of ``item`` with ``answer``: the fields of ``vlfit caption --json``, without timings.

        Of a vector it has ``embedding`` in place of the text.
        Identical answers give identical records. Raises ``UnreadableAnswer``, as ``parse_answer`` does.
        """
        written = {"text": answer.text, "finish_reason": answer.finish_reason}
        fields = {
            "key": item.key,
            "picture": display_name(item.path) if item.path is not None else item.key,
            **self.wish.parse_answer(answer, picture),
            "model": answer.model,
            **({} if self.wish.kind == "embed" else written),
            "images": [_to_dict(image) for image in answer.images],
            "usage": {**_to_dict(answer.usage), "total_tokens": answer.usage.total_tokens},
        }
        return {**fields, "extra": dict(item.extra)} if item.extra else fields

    def run(self, backend: Backend, item: Item) -> Record:
        """Read the picture, wait for the answer, and return its record."""
        picture, task = self.load(item), self.fitted(backend)
        prepared, thinking = task.prepare(backend, picture), backend.thinking(task.sampling)
        return self.record(item, picture, QueuedStream(backend, prepared, task.sampling, thinking).answer())


def _to_dict(value: ImageSeen | Usage) -> dict[str, Any]:
    """Like ``asdict``, without its deep copies: twenty times as fast."""
    return {name: getattr(value, name) for name in value.__slots__}

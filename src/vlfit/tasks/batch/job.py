"""A batch as one record that pickles, and its work on one picture: from an item and a backend to a record.

Knows how a picture is asked about and what a record holds. Does not know how many run at once (``runner.py``
and ``ray`` do), where items come from or where records go.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlfit.backends.base import Backend, LocalBackend, Prepared
from vlfit.engine.answer import Answer, ImageSeen, Usage
from vlfit.engine.conversation import ImagePart
from vlfit.engine.sampling import SamplingParams
from vlfit.tasks.batch.item import Item, Record
from vlfit.tasks.batch.names import shown_name
from vlfit.tasks.batch.wish import Wish
from vlfit.tasks.pictures import checked_picture


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

"""Helpers for the tests of clusters: pictures as items that pickle, an output in memory, a job."""

import io
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.ray.conftest import AT_HOME
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.opening import BackendSpec
from vlfit.errors import PictureNotFound
from vlfit.tasks.batch.items import Item, KeySet, Record
from vlfit.tasks.batch.job import Job, Wish
from vlfit.tasks.batch.runner import BatchProgress


def png(number: int) -> bytes:
    """A picture like no other number's."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (number % 256, number // 256, 7)).save(file, "PNG")
    return file.getvalue()


@dataclass(frozen=True)
class GalleryPicture:
    """Reader of picture ``number``. ``ends``: reading it kills the process; ``far``: only the first machine
    has it; ``bad``: it is not a picture; ``after``: reading it waits until that file exists.
    """

    number: int
    ends: bool = False
    far: bool = False
    bad: bool = False
    after: Path | None = None

    def read(self) -> bytes:
        deadline = time.monotonic() + 300
        while self.after is not None and not self.after.exists():
            assert time.monotonic() < deadline, "the file never came"
            time.sleep(0.02)
        if self.ends:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.far and AT_HOME not in os.environ:
            raise PictureNotFound(f"{self.number}: no such file", "")
        return b"no picture" if self.bad else png(self.number)


@dataclass(frozen=True)
class Gallery:
    """A source of painted pictures."""

    pictures: tuple[GalleryPicture, ...]

    def __iter__(self) -> Iterator[Item]:
        return (Item(f"{picture.number:04}.png", picture.read) for picture in self.pictures)

    def count(self) -> int:
        return len(self.pictures)

    def notes(self) -> list[str]:
        return ["the gallery is closed"]


def gallery(many: int, free: int | None = None, after: Path | None = None) -> Gallery:
    """``many`` pictures; those but the first ``free`` wait for the file ``after``."""
    return Gallery(
        tuple(
            GalleryPicture(number, after=after if free is not None and number >= free else None)
            for number in range(many)
        )
    )


@dataclass
class MemoryOutput:
    """An output in memory."""

    records: dict[str, Record] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    model: str = ""
    cleaned: list[str] = field(default_factory=list)

    def is_settled(self, key: str) -> bool:
        return key in self.records or key in self.failures

    def clean_beside(self, item: Item) -> None:
        self.cleaned.append(item.key)

    def settled_hashes(self) -> NDArray[np.uint64]:
        return KeySet([*self.records, *self.failures]).hashes()

    def begin(self, model: str) -> None:
        self.model = model

    def write(self, item: Item, record: Record) -> None:
        assert item.key == record["key"]
        assert item.key not in self.records, "written twice"
        self.records[item.key] = record

    def record_failure(self, item: Item, error: Exception, tries: int) -> None:
        self.failures[item.key] = error

    def flush(self) -> None: ...


class RecordedProgress(BatchProgress):
    """Progress that collects the notes in ``said``; ``workers``: process ids of the workers."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)

    @property
    def workers(self) -> list[int]:
        return [int(text.rpartition(":")[2]) for text in self.said if "has begun" in text]


def job(max_tokens: int = 4) -> Job:
    return Job(Wish.caption(), SamplingParams(max_tokens=max_tokens), ("gallery",), Path("captions.jsonl"))


def at(url: str) -> BackendSpec:
    return BackendSpec(kind="remote", server=url)

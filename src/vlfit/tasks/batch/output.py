"""The output of a batch as it lies on the disk: records, the list of what failed, and the job they are of.

Beside ``captions.jsonl`` lie ``captions.jsonl.job.json`` (what was asked, of which model; while a run lasts
it is locked) and, if any failed, ``captions.jsonl.failed.jsonl``. Knows what is done and failed already, so
that a run that was ended at any instant goes on where it was. Does not know who answers, or how many at once.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlfit.errors import CannotWrite, UsageError, VlfitError
from vlfit.tasks.batch.failures import facts_of
from vlfit.tasks.batch.items import Item, KeySet, Record, Sidecar, Sink, key_of, shown_name
from vlfit.tasks.batch.job import Job
from vlfit.tasks.batch.jsonl import JsonlSink, Lines, keys_in, line_of, records_in, sync_folder
from vlfit.tasks.batch.sidecars.late import without_sidecars, write_late

if TYPE_CHECKING:
    from numpy.typing import NDArray


_TOO_MANY = 16  # sidecars that could not be written: if most cannot, it is not the pictures
_SOURCES = 5  # that are noted in the job: a shell may make thousands of one *.jpg
_FOREIGN = "begun by no batch that left its job beside it"


class Output:
    """Open it before the model is loaded, ``begin`` when its name is known, ``close`` in any case.

    ``began_with``: the sources that are noted in it, in words, if they are others than ``job``'s.
    ``force``: go on in an output that another job began. ``again``: what failed before is to be tried again.
    Raises ``UsageError`` for an output of another job, or one that another run writes to; ``CannotWrite``.
    """

    def __init__(
        self, job: Job, *, force: bool = False, again: bool = False, sidecars: Sequence[Sidecar] = ()
    ) -> None:
        self.path = job.output
        self.failed_path = beside(job.output, ".failed.jsonl")
        self._sidecars = sidecars
        self._kinds = set(job.sidecars)
        self._facts = job.facts()
        self._sources = _first_sources(job)
        self._force = force
        self.begun = False  # whether ``begin`` has been called: from there on something may be written
        self._sink: Sink | None = None
        self._failures: Lines | None = None
        self._header = _Header(beside(job.output, ".job.json"))
        try:
            self._check()
            self.began_with = _other(self._header.facts, job)
            self._sink = sink_of(job)
            self._done = KeySet(self._sink.done_keys())
            failed = KeySet(key for key in keys_in(self.failed_path) if key not in self._done)
        except BaseException:
            self._header.close()  # the sink has not been opened: what is refused stays as it is
            raise
        self.done_before = len(self._done)
        self.failed_before = len(failed)
        self._failed = KeySet() if again else failed
        self.failed = len(failed)
        # Kinds of sidecars that have been seen to for every record that is there.
        self._complete = self._kinds_before() if self.done_before else set(self._kinds)
        self.without_sidecar = 0
        self.sidecar_problem = ""  # why the first of those has none
        self._with_sidecar = 0

    def is_settled(self, key: str) -> bool:
        """Whether nothing is left to do: it is in the output, or failed and is not to be tried again."""
        return key in self._done or key in self._failed

    def begin(self, model: str) -> None:
        """Say which model answers, before the first record. Raises ``UsageError`` if it was another."""
        self._facts["model"] = model
        self._check()
        self.begun = True
        self._complete &= self._kinds
        # What this run cannot know (of its engine, from Python) stays as an earlier one has noted it.
        facts = {**(self._header.facts or {}), **self._facts, "sources": self._sources}
        facts["sidecars"] = sorted(self._complete)
        if self._header.facts != facts:
            self._header.write(facts)
        assert self._sink is not None
        self._sink.open()

    def settled(self) -> "NDArray[np.uint64]":
        """The hashes (``keys.hash_of``) of the keys that are settled, sorted."""
        return np.union1d(self._done.hashes(), self._failed.hashes())

    def write(self, item: Item, record: Record) -> None:
        """Sidecars first: a record says that they are there, or in ``sidecar_error`` why not. A key that is
        in the output already is left as it is.
        """
        assert self._sink is not None
        if item.key in self._done:
            return
        self._sink.write(self._with_sidecars(item, record))
        self._done.add(item.key)

    def late(self, *, overwrite: bool) -> KeySet:
        """The keys of records from earlier runs whose sidecars are to be written, or looked at again: all,
        if a kind is wanted that was not wanted then, or others' words are to be replaced (``overwrite``);
        else those that say that it could not be done.
        """
        if not self._sidecars or not self.done_before:
            return KeySet()
        return self._done if overwrite or self._kinds - self._complete else without_sidecars(self.path)

    def write_late(self, items: Iterable[Item], keys: KeySet) -> int:
        """The sidecars of those of ``items`` that are among ``keys``. Gives how many there were."""
        before = self.without_sidecar
        many = write_late(self.path, items, keys, self._with_sidecars)
        if many == self.done_before and self.without_sidecar == before and not self._kinds <= self._complete:
            self._complete |= self._kinds
            if self._header.facts is not None:
                self._header.write({**self._header.facts, "sidecars": sorted(self._complete)})
        return many

    def _with_sidecars(self, item: Item, record: Record) -> Record:
        """Write what is to stand beside ``item``. Gives the record, with the reason if that cannot be."""
        for sidecar in self._sidecars:
            try:
                sidecar.write(item, record)
            except VlfitError as error:
                self.without_sidecar += 1
                self.sidecar_problem = self.sidecar_problem or error.message
                if self.without_sidecar > _TOO_MANY and self.without_sidecar > self._with_sidecar:
                    raise
                record = {**record, "sidecar_error": error.message}
            else:
                self._with_sidecar += 1
        return record

    def _kinds_before(self) -> set[str]:
        known = (self._header.facts or {}).get("sidecars")
        return set(map(str, known)) if isinstance(known, list) else set()

    def fail(self, item: Item, error: Exception, tries: int) -> None:
        """Put ``item`` on the list of what failed."""
        if self._failures is None:
            self._failures = Lines(self.failed_path)
        picture = shown_name(item.path) if item.path is not None else item.key
        self._failures.append({"key": item.key, "picture": picture, **facts_of(error, tries)})
        self._failed.add(item.key)

    def flush(self) -> None:
        """Let all of it survive the end of the machine."""
        if self._sink is not None:
            self._sink.flush()
        if self._failures is not None:
            self._failures.flush()

    def close(self) -> None:
        """Flush, take from the list what has succeeded since, and let another run have the output."""
        try:
            for part in (self._sink, self._failures):
                if part is not None:
                    part.close()
            if self._sink is not None and self._header.held:
                self.failed = self._tidy()
        finally:
            self._header.close()

    def _check(self) -> None:
        known, wanted = self._header.facts, self._facts
        if self._force:
            return
        if known is None:
            if self.path.exists() and (self.path.is_dir() or self.path.stat().st_size):
                raise UsageError(
                    f"{self.path} is there already, {_FOREIGN}",
                    "name another file, or go on in it with --force",
                )
            return
        changed = [name for name, value in wanted.items() if name in known and _differ(known[name], value)]
        if changed:
            what = "; ".join(_difference(name, known[name], wanted[name]) for name in changed)
            raise UsageError(
                f"{self.path} is the output of another job: {what}",
                "name another file, or mix both in this one with --force",
            )

    def _tidy(self) -> int:
        """Leave one line for each key that has failed and not succeeded since. Gives how many there are."""
        if not self.failed_path.exists():
            return 0
        last: dict[str, int] = {}
        lines = 0
        for lines, record in enumerate(records_in(self.failed_path), start=1):
            if (key := str(record.get("key"))) not in self._done:
                last[key] = lines
        if not last:
            self.failed_path.unlink()
        elif len(last) < lines:
            fresh = beside(self.failed_path, ".new")
            with fresh.open("wb") as file:
                for number, record in enumerate(records_in(self.failed_path), start=1):
                    if last.get(str(record.get("key"))) == number:
                        file.write(line_of(record))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.failed_path)
            sync_folder(self.failed_path.parent)
        return len(last)


class _Header:
    """The file that says of which job an output is. ``facts`` is None until it has been written whole; if it
    never is, the file is taken away again, and so is the folder that was made for it.
    """

    def __init__(self, path: Path) -> None:
        self.held = False
        self._made = [place for place in (path, path.parent) if not place.exists()]
        try:
            path.parent.mkdir(exist_ok=True)  # one level: more is a slip, or a disk that is not there
            self._file = _opened(path)
        except FileNotFoundError as error:
            raise CannotWrite(
                f"cannot write {_output_of(path)}: there is no folder {path.parent.parent}",
                "make it, or check the name",
            ) from error
        except OSError as error:
            raise CannotWrite(f"cannot write {path}: {error.strerror}", "name another output") from error
        self.held = True
        self._path = path
        self.facts = self._read()

    def _read(self) -> dict[str, Any] | None:
        try:
            facts = json.loads(os.pread(self._file, os.fstat(self._file).st_size, 0))
        except ValueError:
            return None  # made, and the process ended before a word was in it
        return facts if isinstance(facts, dict) else None

    def write(self, facts: dict[str, Any]) -> None:
        data = (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode()
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, data, 0)
            os.fsync(self._file)
            sync_folder(self._path.parent)
        except OSError as error:
            raise CannotWrite(f"cannot write {self._path}: {error.strerror}", "make room") from error
        self.facts = facts

    def close(self) -> None:
        if not self.held:
            return
        self.held = False
        try:
            if self.facts is None:
                self._take_away()
        finally:
            os.close(self._file)  # last: nobody else has it before it is gone

    def _take_away(self) -> None:
        with suppress(OSError):  # of a folder in which something lies by now
            for place in self._made:
                place.rmdir() if place.is_dir() else place.unlink()


def _opened(path: Path) -> int:
    """``path``, made if it is not there, and locked for this process. Raises ``OSError``, ``UsageError``."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go when the process ends
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file  # else who had it has taken it away meanwhile
        except OSError as error:
            os.close(file)
            raise UsageError(
                f"another run writes to {_output_of(path).name} now",
                "wait for it, or name another output",
            ) from error
        os.close(file)


def _other(known: dict[str, Any] | None, job: Job) -> str | None:
    """What an output was begun with, in words, if those are not the sources of ``job``. None: they are, or
    nobody knows.
    """
    sources = (known or {}).get("sources")
    if not isinstance(sources, list) or sources == _first_sources(job):
        return None
    return ", ".join(map(str, sources))


def _first_sources(job: Job) -> list[str]:
    # Names of files may be no UTF-8.
    return [key_of(source.rstrip("/") or "/") for source in job.sources[:_SOURCES]]


def sink_of(job: Job) -> Sink:
    """What writes the output, by its name."""
    if is_table(job.output):
        from vlfit.tasks.batch.parquet_sink import ParquetSink

        return ParquetSink(job.output, kind=job.wish.kind)
    return JsonlSink(job.output)


def is_table(output: Path) -> bool:
    """Whether ``output`` is to be Parquet. Raises ``UsageError`` for a kind of file that is not written."""
    kind = output.suffix.lower()
    if kind not in (".jsonl", ".ndjson", ".parquet"):
        raise UsageError(
            f"{output} is neither .jsonl nor .parquet",
            "the end of its name says what is written: -o captions.jsonl",
        )
    return kind == ".parquet"


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _output_of(header: Path) -> Path:
    return header.with_name(header.name.removesuffix(".job.json"))


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples are lists there."""
    return json.loads(json.dumps(value))


def _differ(known: Any, wanted: Any) -> list[str]:
    """Where the two say different things, in words. What only one has, a version of vlfit brought."""
    known, wanted = _plain(known), _plain(wanted)
    if isinstance(known, dict) and isinstance(wanted, dict):
        return [
            f"{name} was {value!r} and is {wanted[name]!r}"
            for name, value in known.items()
            if name in wanted and value != wanted[name]
        ]
    return [] if known == wanted else [f"was {known!r} and is {wanted!r}"]


def _difference(name: str, known: Any, wanted: Any) -> str:
    found = _differ(known, wanted)
    return ", ".join(found) if isinstance(wanted, dict) else f"its {name} {found[0]}"

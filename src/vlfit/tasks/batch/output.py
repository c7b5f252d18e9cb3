"""The output of a batch on disk: records, the list of failures, and the job that they belong to.

Beside ``captions.jsonl`` there are ``captions.jsonl.job.json`` (task and model; locked while a run lasts)
and, if pictures failed, ``captions.jsonl.failed.jsonl``. A run that was killed at any time is continued from
these files.
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
from vlfit.tasks.batch.failures import failure_fields
from vlfit.tasks.batch.items import Item, KeySet, Record, Sidecar, Sink, display_name, key_of
from vlfit.tasks.batch.job import Job
from vlfit.tasks.batch.jsonl import JsonlFile, JsonlSink, read_keys, read_records, sync_folder, to_line
from vlfit.tasks.batch.sidecars.backfill import backfill, keys_without_sidecars

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MAX_SIDECAR_FAILURES = 16  # if this many sidecars fail, and more than succeed, the run stops
_MAX_NOTED_SOURCES = 5  # noted in the job file: a shell may expand *.jpg to thousands
_NO_JOB_FILE = "and has no job file beside it"


class Output:
    """The output of ``job``: records, list of failures, and job file. Locks the output until ``close``.

    Create it before the model is loaded, to find mistakes early; call ``begin`` once the model's name is
    known; then ``write`` or ``record_failure`` per picture that is not settled; then ``close``.

    ``force``: continue the output of another job. ``again``: retry pictures that failed in earlier runs.
    ``sidecars``: written with each record.

    Attributes: ``done_before``, ``failed_before``: numbers of pictures done and failed in earlier runs.
    ``failed``: pictures that failed in any run and were not done since; valid after ``close``.
    ``earlier_sources``: the sources noted by earlier runs, as text; None if they are those of ``job``, or
    there are none. ``without_sidecar``: sidecars of this run that could not be written; ``sidecar_problem``:
    why the first of them could not, empty if none. ``begun``: whether ``begin`` was called.

    Raises ``UsageError`` if the output belongs to another job, another run has locked it, or its extension is
    unknown; ``CannotWrite``.
    """

    def __init__(
        self, job: Job, *, force: bool = False, again: bool = False, sidecars: Sequence[Sidecar] = ()
    ) -> None:
        self.path = job.output
        self.failed_path = append_suffix(job.output, ".failed.jsonl")
        self._sidecars = sidecars
        self._kinds = set(job.sidecars)
        self._facts = job.identity()
        self._sources = _noted_sources(job)
        self._force = force
        self.begun = False  # whether ``begin`` was called, so that something may have been written
        self._sink: Sink | None = None
        self._failures: JsonlFile | None = None
        self._job_file = _JobFile(append_suffix(job.output, ".job.json"))
        try:
            self._check_same_job()
            self.earlier_sources = _earlier_sources(self._job_file.facts, job)
            self._sink = make_sink(job)
            self._done = KeySet(self._sink.done_keys())
            failed = KeySet(key for key in read_keys(self.failed_path) if key not in self._done)
        except BaseException:
            self._job_file.close()  # the sink was not opened: a refused output stays unchanged
            raise
        self.done_before = len(self._done)
        self.failed_before = len(failed)
        self._failed = KeySet() if again else failed
        self.failed = len(failed)
        # Kinds of sidecars that every record has.
        self._complete_kinds = self._earlier_kinds() if self.done_before else set(self._kinds)
        self.without_sidecar = 0
        self.sidecar_problem = ""  # the first error
        self._num_sidecars = 0

    def is_settled(self, key: str) -> bool:
        """Whether nothing is left to do for ``key``: it has a record, or failed.

        A failure of an earlier run does not count with ``again``.
        """
        return key in self._done or key in self._failed

    def clean_beside(self, item: Item) -> None:
        """Remove unfinished sidecars that a killed run left beside ``item``. Never raises."""
        for sidecar in self._sidecars:
            sidecar.clean(item)

    def begin(self, model: str) -> None:
        """Write the job file, with the name of the model, and create or repair the file of records.

        Raises ``UsageError`` if the output has records of another model, unless ``force``; ``CannotWrite``.
        """
        self._facts["model"] = model
        self._check_same_job()
        self.begun = True
        self._complete_kinds &= self._kinds
        # Facts that this run does not know (such as engine options, from Python) are kept.
        facts = {**(self._job_file.facts or {}), **self._facts, "sources": self._sources}
        facts["sidecars"] = sorted(self._complete_kinds)
        if self._job_file.facts != facts:
            self._job_file.write(facts)
        assert self._sink is not None
        self._sink.open()

    def settled_hashes(self) -> "NDArray[np.uint64]":
        """Sorted hashes (``items.hash_of``) of all keys for which ``is_settled`` is true."""
        return np.union1d(self._done.hashes(), self._failed.hashes())

    def write(self, item: Item, record: Record) -> None:
        """Write the sidecars of ``item``, then ``record``, with a field ``sidecar_error`` if a sidecar
        failed.

        Does nothing if the item's key has a record. Raises ``CannotWrite``; and the error of the sidecar if
        over 16 sidecars have failed, and more than have succeeded.
        """
        assert self._sink is not None
        if item.key in self._done:
            return
        self._sink.write(self._write_sidecars(item, record))
        self._done.add(item.key)

    def keys_to_backfill(self, *, overwrite: bool) -> KeySet:
        """Keys of earlier runs' records whose sidecars must be written, for ``backfill_sidecars``.

        All keys with ``overwrite``, or if earlier runs did not write one of the job's kinds of sidecar; else
        those of records with a ``sidecar_error``. Empty without sidecars or earlier records.
        """
        if not self._sidecars or not self.done_before:
            return KeySet()
        return (
            self._done
            if overwrite or self._kinds - self._complete_kinds
            else keys_without_sidecars(self.path)
        )

    def backfill_sidecars(self, items: Iterable[Item], keys: KeySet) -> int:
        """Write the sidecars of those ``items`` whose key is in ``keys``, from their records in the output.

        Returns the number of these items, including those whose sidecars could not be written. Needs no
        model.
        """
        before = self.without_sidecar
        num_records = backfill(self.path, items, keys, self._write_sidecars)
        if (
            num_records == self.done_before
            and self.without_sidecar == before
            and not self._kinds <= self._complete_kinds
        ):
            self._complete_kinds |= self._kinds
            if self._job_file.facts is not None:
                self._job_file.write({**self._job_file.facts, "sidecars": sorted(self._complete_kinds)})
        return num_records

    def _write_sidecars(self, item: Item, record: Record) -> Record:
        """Write all sidecars of ``item``. Returns the record, with ``sidecar_error`` if one failed."""
        for sidecar in self._sidecars:
            try:
                sidecar.write(item, record)
            except VlfitError as error:
                self.without_sidecar += 1
                self.sidecar_problem = self.sidecar_problem or error.message
                if self.without_sidecar > _MAX_SIDECAR_FAILURES and self.without_sidecar > self._num_sidecars:
                    raise
                record = {**record, "sidecar_error": error.message}
            else:
                self._num_sidecars += 1
        return record

    def _earlier_kinds(self) -> set[str]:
        known = (self._job_file.facts or {}).get("sidecars")
        return set(map(str, known)) if isinstance(known, list) else set()

    def record_failure(self, item: Item, error: Exception, tries: int) -> None:
        """Append ``item`` with its ``error`` to the failures file. ``tries``: attempts that were made.

        Removes unfinished sidecars beside it, as ``clean_beside``: a run on a cluster may not have.
        """
        self.clean_beside(item)
        if self._failures is None:
            self._failures = JsonlFile(self.failed_path)
        picture = display_name(item.path) if item.path is not None else item.key
        self._failures.append({"key": item.key, "picture": picture, **failure_fields(error, tries)})
        self._failed.add(item.key)

    def flush(self) -> None:
        """Make the records and failures written so far survive a power failure."""
        if self._sink is not None:
            self._sink.flush()
        if self._failures is not None:
            self._failures.flush()

    def close(self) -> None:
        """Flush and unlock the output. Idempotent.

        Removes items from the failures file that a later try completed, and sets ``failed`` to the number
        that remain. Without ``begin``, removes the job file and the folder if this object created them.
        """
        try:
            for part in (self._sink, self._failures):
                if part is not None:
                    part.close()
            if self._sink is not None and self._job_file.locked:
                self.failed = self._compact_failures()
        finally:
            self._job_file.close()

    def _check_same_job(self) -> None:
        known, current = self._job_file.facts, self._facts
        if self._force:
            return
        if known is None:
            if self.path.exists() and (self.path.is_dir() or self.path.stat().st_size):
                raise UsageError(
                    f"{self.path} exists already, {_NO_JOB_FILE}",
                    "Name another file, or append to it with --force.",
                )
            return
        changed = [
            name for name, value in current.items() if name in known and _differences(known[name], value)
        ]
        if changed:
            what = "; ".join(_describe_difference(name, known[name], current[name]) for name in changed)
            raise UsageError(
                f"{self.path} is the output of another job: {what}",
                "Name another file, or mix both in this one with --force.",
            )

    def _compact_failures(self) -> int:
        """Keep one line for each key that failed and has not succeeded since. Returns their number."""
        if not self.failed_path.exists():
            return 0
        last: dict[str, int] = {}
        lines = 0
        for lines, record in enumerate(read_records(self.failed_path), start=1):
            if (key := str(record.get("key"))) not in self._done:
                last[key] = lines
        if not last:
            self.failed_path.unlink()
        elif len(last) < lines:
            fresh = append_suffix(self.failed_path, ".new")
            with fresh.open("wb") as file:
                for number, record in enumerate(read_records(self.failed_path), start=1):
                    if last.get(str(record.get("key"))) == number:
                        file.write(to_line(record))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.failed_path)
            sync_folder(self.failed_path.parent)
        return len(last)


class _JobFile:
    """``FILE.job.json``, which is also the lock of an output. ``facts`` is its content, None if it has none.

    If nothing is written to it, ``close`` removes the file, and the folder if it was created for it.
    """

    def __init__(self, path: Path) -> None:
        self.locked = False
        self._created = [each for each in (path, path.parent) if not each.exists()]
        try:
            path.parent.mkdir(exist_ok=True)  # one level: more is a typo, or an unmounted disk
            self._file = _open_locked(path)
        except FileNotFoundError as error:
            raise CannotWrite(
                f"cannot write {_output_path(path)}: there is no folder {path.parent.parent}",
                "Create it, or check the name.",
            ) from error
        except OSError as error:
            raise CannotWrite(f"cannot write {path}: {error.strerror}", "Name another output.") from error
        self.locked = True
        self._path = path
        self.facts = self._read()

    def _read(self) -> dict[str, Any] | None:
        try:
            facts = json.loads(os.pread(self._file, os.fstat(self._file).st_size, 0))
        except ValueError:
            return None  # empty: the process that created it was killed
        return facts if isinstance(facts, dict) else None

    def write(self, facts: dict[str, Any]) -> None:
        data = (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode()
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, data, 0)
            os.fsync(self._file)
            sync_folder(self._path.parent)
        except OSError as error:
            raise CannotWrite(f"cannot write {self._path}: {error.strerror}", "Free disk space.") from error
        self.facts = facts

    def close(self) -> None:
        if not self.locked:
            return
        self.locked = False
        try:
            if self.facts is None:
                self._remove_created()
        finally:
            os.close(self._file)  # last: it stays locked until it is removed

    def _remove_created(self) -> None:
        with suppress(OSError):  # a folder that is no longer empty
            for path in self._created:
                path.rmdir() if path.is_dir() else path.unlink()


def _open_locked(path: Path) -> int:
    """Open or create ``path``, and lock it. Raises ``OSError``; ``UsageError`` if another run has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file  # else its owner removed it meanwhile: try again
        except OSError as error:
            os.close(file)
            raise UsageError(
                f"another run is writing to {_output_path(path).name}",
                "Wait for it, or name another output.",
            ) from error
        os.close(file)


def _earlier_sources(known: dict[str, Any] | None, job: Job) -> str | None:
    """The sources noted in an output, as text, if they differ from those of ``job``."""
    sources = (known or {}).get("sources")
    if not isinstance(sources, list) or sources == _noted_sources(job):
        return None
    return ", ".join(map(str, sources))


def _noted_sources(job: Job) -> list[str]:
    # Names may not be UTF-8, so they are noted as keys.
    return [key_of(source.rstrip("/") or "/") for source in job.sources[:_MAX_NOTED_SOURCES]]


def make_sink(job: Job) -> Sink:
    """Create the sink for ``job.output``: JSON lines or Parquet, by the extension.

    Raises ``UsageError`` for another extension, and for Parquet if pyarrow is missing.
    """
    if is_parquet(job.output):
        from vlfit.tasks.batch.parquet_sink import ParquetSink

        return ParquetSink(job.output, kind=job.wish.kind)
    return JsonlSink(job.output)


def is_parquet(output: Path) -> bool:
    """Whether ``output`` ends in ``.parquet``.

    Raises ``UsageError`` unless it is that, ``.jsonl`` or ``.ndjson``.
    """
    kind = output.suffix.lower()
    if kind not in (".jsonl", ".ndjson", ".parquet"):
        raise UsageError(
            f"{output} is neither .jsonl nor .parquet",
            "Name one of these: -o captions.jsonl.",
        )
    return kind == ".parquet"


def append_suffix(path: Path, suffix: str) -> Path:
    """Append ``suffix`` to the name of ``path``: ``a.jsonl`` becomes ``a.jsonl.new``."""
    return path.with_name(path.name + suffix)


def _output_path(header: Path) -> Path:
    return header.with_name(header.name.removesuffix(".job.json"))


def _as_json(value: Any) -> Any:
    """``value`` after a round trip through JSON, which turns tuples into lists."""
    return json.loads(json.dumps(value))


def _differences(known: Any, current: Any) -> list[str]:
    """Differences as text. Fields that only one side has are ignored: versions of vlfit add and drop some."""
    known, current = _as_json(known), _as_json(current)
    if isinstance(known, dict) and isinstance(current, dict):
        return [
            f"{name} was {value!r} and is {current[name]!r}"
            for name, value in known.items()
            if name in current and value != current[name]
        ]
    return [] if known == current else [f"was {known!r} and is {current!r}"]


def _describe_difference(name: str, known: Any, current: Any) -> str:
    differences = _differences(known, current)
    return ", ".join(differences) if isinstance(current, dict) else f"its {name} {differences[0]}"

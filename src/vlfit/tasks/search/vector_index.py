"""The index of a folder in one SQLite file: which files were seen, and a vector for each picture in them.

Vectors are rows of bfloat16 that a query streams through numpy: exact search, in memory that does not grow.
docs/search.md compares this with sqlite-vec, usearch and faiss. Every change is a transaction of SQLite, so a
killed process loses at most what it had not committed, and the file is never half-written.
"""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from vlfit.api.pooling import Vector
from vlfit.errors import CannotWrite, UsageError
from vlfit.tasks.batch.items import key_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1
_APPLICATION = 0x766C6669  # "vlfi" in the file's header: what makes a SQLite file an index of ours
_ROWS = 1024  # vectors in memory at a time: 8 MiB of 2,048 float32
_PAGE_BYTES = 65536  # holds 15 vectors of 2,048 components; a page of 8 KiB one, and half of it empty
_WAIT_SECONDS = 60.0  # for another process that is writing
_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE files (id INTEGER PRIMARY KEY, path TEXT UNIQUE NOT NULL, size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL, error TEXT);
CREATE TABLE pictures (id INTEGER PRIMARY KEY,
    file INTEGER NOT NULL REFERENCES files (id) ON DELETE CASCADE,
    key TEXT NOT NULL, digest BLOB NOT NULL, vector BLOB NOT NULL);
CREATE INDEX pictures_by_file ON pictures (file);
CREATE INDEX pictures_by_digest ON pictures (digest);
"""


class WrongIndex(UsageError):
    """A file that is no index, one of another folder, or one that another model has made."""

    code = "wrong_index"


@dataclass(frozen=True, slots=True)
class IndexModel:
    """What all vectors of an index have in common. ``instruction``: for pictures; empty: the model's own."""

    name: str
    dimensions: int
    instruction: str = ""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file as it was when it was indexed. ``error``: why it has no vectors; None if it has."""

    size: int
    mtime_ns: int
    error: str | None


@dataclass(frozen=True, slots=True)
class IndexedPicture:
    """A picture of a file. ``key``: the file's key, with a page or time (``report.pdf#3``)."""

    key: str
    digest: bytes
    vector: Vector


@dataclass(frozen=True, slots=True)
class Hit:
    """A picture found. ``path``: the key of its file, relative to the folder; ``score``: cosine, -1 to 1."""

    key: str
    path: str
    score: float


def index_path(folder: Path) -> Path:
    """Where the index of ``folder`` lies by default: ``vlfit/search`` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    root = os.path.realpath(folder)
    name = "".join(each if each.isalnum() or each in "-_" else "-" for each in os.path.basename(root))[:40]
    digest = blake2b(os.fsencode(root), digest_size=6).hexdigest()
    return Path(home).expanduser().absolute() / "vlfit" / "search" / f"{name or 'root'}-{digest}.index"


class VectorIndex:
    """An index, open for reading and writing; a context manager. Belongs to one thread.

    ``path``: the file, created if it is missing unless ``create`` is False. ``folder``: the folder it is
    about. Raises ``WrongIndex`` for a file that is no index, or one of another folder; ``CannotWrite`` if it
    cannot be created or opened.
    """

    def __init__(self, path: Path, folder: Path, *, create: bool = True) -> None:
        self.path = path
        root = key_of(os.path.realpath(folder))
        try:
            exists = path.exists() and path.stat().st_size > 0
            if not exists and not create:
                raise UsageError(
                    f"{key_of(str(folder))} has no index at {key_of(str(path))}",
                    f"Make one: vlfit search {key_of(str(folder))}",
                )
            if not exists:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it tells of private pictures
            self._database = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
        except OSError as error:
            raise CannotWrite(
                f"cannot open {key_of(str(path))}: {error.strerror}", "Name another with --index FILE."
            ) from error
        except sqlite3.Error as error:
            raise CannotWrite(
                f"cannot open {key_of(str(path))}: {error}", "Name another with --index FILE."
            ) from error
        try:
            self._open(root)
        except BaseException:
            self._database.close()
            raise

    def _open(self, root: str) -> None:
        with self._errors():
            self._database.execute("PRAGMA foreign_keys = ON")
            self._database.execute("PRAGMA trusted_schema = OFF")
            if self._is_empty():
                self._database.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
                with self._transaction():
                    if self._is_empty():  # another process may have been faster
                        for statement in _TABLES.split(";"):
                            self._database.execute(statement)
                        self._database.execute(f"PRAGMA application_id = {_APPLICATION}")
                        self._database.execute(f"PRAGMA user_version = {VERSION}")
                        self._set("folder", root)
            kind = self._database.execute("PRAGMA application_id").fetchone()[0]
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
            if kind != _APPLICATION:
                raise self._no_index()
            if version != VERSION:
                raise WrongIndex(
                    f"{key_of(str(self.path))} is an index of version {version}; this vlfit has {VERSION}",
                    "Delete it; it is made anew.",
                )
            indexed = self._get("folder")
            if indexed != root:
                raise WrongIndex(
                    f"{key_of(str(self.path))} is the index of {indexed}, not of {root}",
                    "Name another file with --index.",
                )

    def close(self) -> None:
        """Close the file. What was not committed is lost."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def opened_as(self) -> str | None:
        """The name by which the model was opened, to open it again; None if it ran on a server."""
        with self._errors():
            return self._get("opened_as")

    @opened_as.setter
    def opened_as(self, name: str) -> None:
        with self._errors():
            if self._get("opened_as") != name:
                self._set("opened_as", name)

    @property
    def model(self) -> IndexModel | None:
        """The model of all vectors; None as long as there are none."""
        with self._errors():
            name, dimensions = self._get("model"), self._get("dimensions")
        if name is None or dimensions is None:
            return None
        return IndexModel(name, int(dimensions), self._get("instruction") or "")

    def use_model(self, model: IndexModel, *, rebuild: bool = False) -> None:
        """Say which model makes the vectors. Raises ``WrongIndex`` if the index has those of another.

        ``rebuild``: empty the index instead of raising.
        """
        before = self.model
        if before == model and not rebuild:
            return
        if before is not None and not rebuild:
            raise WrongIndex(
                f"the index was made by {_named(before)}, and vectors of {_named(model)} do not compare",
                f"Search with --model {before.name}, or make all vectors anew with --rebuild.",
            )
        with self._errors(), self._transaction():
            self._database.execute("DELETE FROM files")
            self._set("model", model.name)
            self._set("dimensions", str(model.dimensions))
            self._set("instruction", model.instruction)

    def files(self) -> dict[str, IndexedFile]:
        """All files by their path relative to the folder."""
        with self._errors():
            rows = self._database.execute("SELECT path, size, mtime_ns, error FROM files").fetchall()
        return {path: IndexedFile(size, mtime_ns, error) for path, size, mtime_ns, error in rows}

    def count(self) -> tuple[int, int]:
        """Numbers of pictures and of files that have vectors."""
        with self._errors():
            pictures = self._database.execute(
                "SELECT COUNT(*), COUNT(DISTINCT file) FROM pictures"
            ).fetchone()
        return int(pictures[0]), int(pictures[1])

    def put(self, files: Sequence[tuple[str, IndexedFile, Sequence[IndexedPicture]]]) -> None:
        """Write ``files`` with their pictures, in place of what the index had of them, in one transaction."""
        with self._errors(), self._transaction():
            for path, file, pictures in files:
                self._database.execute("DELETE FROM files WHERE path = ?", (path,))
                added = self._database.execute(
                    "INSERT INTO files (path, size, mtime_ns, error) VALUES (?, ?, ?, ?)",
                    (path, file.size, file.mtime_ns, file.error),
                )
                self._database.executemany(
                    "INSERT INTO pictures (file, key, digest, vector) VALUES (?, ?, ?, ?)",
                    ((added.lastrowid, each.key, each.digest, _encode(each.vector)) for each in pictures),
                )

    def remove(self, paths: Sequence[str]) -> None:
        """Remove the files ``paths`` and their pictures."""
        with self._errors(), self._transaction():
            self._database.executemany("DELETE FROM files WHERE path = ?", ((path,) for path in paths))

    def all_digests(self) -> set[bytes]:
        """Digests of all pictures: 16 bytes each."""
        with self._errors():
            return {row[0] for row in self._database.execute("SELECT DISTINCT digest FROM pictures")}

    def has(self, path: str, key: str) -> bool:
        """Whether the file ``path`` has the picture ``key``."""
        with self._errors():
            row = self._database.execute(
                "SELECT 1 FROM pictures JOIN files ON files.id = pictures.file WHERE path = ? AND key = ?",
                (path, key),
            ).fetchone()
        return row is not None

    def vector_of(self, digest: bytes) -> Vector | None:
        """The vector of a picture with these bytes; None if there is none."""
        model = self.model
        if model is None:
            return None
        with self._errors():
            row = self._database.execute(
                "SELECT vector FROM pictures WHERE digest = ? LIMIT 1", (digest,)
            ).fetchone()
        return None if row is None else self._vectors([row[0]], model.dimensions)[0]

    def nearest(self, vector: Vector, n: int) -> list[Hit]:
        """The ``n`` pictures whose vectors are most alike, best first; those alike by name.

        ``vector``: float32 [dimensions], of length 1. Reads every vector.
        """
        model = self.model
        if model is None or n < 1:
            return []
        if vector.shape != (model.dimensions,):
            raise WrongIndex(
                f"the query has {vector.size} components, the index {model.dimensions}",
                "Search with the index's own model, or use --rebuild.",
            )
        scores: NDArray[np.float32] = np.empty(0, np.float32)
        ids: NDArray[np.int64] = np.empty(0, np.int64)
        with self._errors():
            rows = self._database.execute("SELECT id, vector FROM pictures ORDER BY id")
            while batch := rows.fetchmany(_ROWS):
                found = self._vectors([row[1] for row in batch], model.dimensions) @ vector
                scores = np.concatenate((scores, found))
                ids = np.concatenate((ids, np.fromiter((row[0] for row in batch), np.int64, len(batch))))
                if len(scores) > n:
                    best = np.argpartition(-scores, n - 1)[:n]
                    scores, ids = scores[best], ids[best]
            hits = []
            for score, number in zip(scores.tolist(), ids.tolist(), strict=True):
                key, path = self._database.execute(
                    "SELECT key, path FROM pictures JOIN files ON files.id = pictures.file"
                    " WHERE pictures.id = ?",
                    (number,),
                ).fetchone()
                hits.append(Hit(key, path, round(min(max(score, -1.0), 1.0), 4)))
        return sorted(hits, key=lambda hit: (-hit.score, hit.key))

    def _vectors(self, blobs: Sequence[bytes], dimensions: int) -> "NDArray[np.float32]":
        if any(len(blob) != 2 * dimensions for blob in blobs):
            raise self._no_index()
        bits = np.frombuffer(b"".join(blobs), "<u2").astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32).reshape(len(blobs), dimensions)

    def _is_empty(self) -> bool:
        return bool(self._database.execute("SELECT COUNT(*) = 0 FROM sqlite_schema").fetchone()[0])

    def _get(self, name: str) -> str | None:
        row = self._database.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _set(self, name: str, value: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, value))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors as vlfit's."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise CannotWrite(
                f"{key_of(str(self.path))}: {error}",
                "Is the disk full, or does another process write to it? Nothing that was stored is lost.",
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._no_index() from error

    def _no_index(self) -> WrongIndex:
        return WrongIndex(
            f"{key_of(str(self.path))} is not an index of vlfit, or it is damaged",
            "Name another file with --index, or delete it; an index is made anew.",
        )


def _named(model: IndexModel) -> str:
    words = f"{model.name} ({model.dimensions} components)"
    return f"{words}, instruction {model.instruction!r}" if model.instruction else words


def _encode(vector: Vector) -> bytes:
    """``vector`` as bfloat16, rounded to even: the upper halves of float32, which numpy decodes by a shift.

    Of a vector of 2,048 components the score changes by about 0.00003; models compute in bfloat16 themselves.
    """
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()

"""Bring an index up to date with its folder: new and changed files get vectors, deleted ones are dropped."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.api.pooling import Vector
from vlfit.errors import DoesNotFit, InvalidRequest, PictureError
from vlfit.images.file_kinds import PICTURE_EXTENSIONS
from vlfit.images.media_kinds import MEDIA_EXTENSIONS, MediaKind, is_installed
from vlfit.tasks.batch.folders import FolderSource, check_folder
from vlfit.tasks.batch.items import Item, Unreadable, digest_of, key_of
from vlfit.tasks.batch.media_items import file_items
from vlfit.tasks.files import FilePart, MediaOptions
from vlfit.tasks.search.vector_index import IndexedFile, IndexedPicture, IndexModel, VectorIndex

COMMIT_SECONDS = 5.0  # work that a killed process may lose
_COMMIT_FILES = 256
_RECENT_NS = 2_000_000_000  # a file that changed so recently may change again within its time stamp
# Errors that concern one picture; after any other the next one would fail, too.
_PICTURE_ERRORS = (PictureError, DoesNotFit, InvalidRequest)


class Embedder(Protocol):
    """What makes vectors. ``embed`` may be called from many threads at once."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def dimensions(self) -> int:
        """Components of a vector."""
        ...

    def embed(self, text: str, *files: FilePart, instruction: str | None = None) -> Vector:
        """The vector of ``text`` and ``files`` together, float32 [dimensions], of length 1.

        ``instruction`` None: the model's own. Raises ``PictureError``, ``DoesNotFit``, ``InvalidRequest``.
        """
        ...


@dataclass(slots=True)
class UpdateTally:
    """What an update did, in files; ``pictures``: vectors made; ``errors``: of files without vectors.

    ``unchanged``: files whose bytes were as before. ``kept``: the folder had no picture at all, so the
    index was left as it was.
    """

    added: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    pictures: int = 0
    kept: bool = False
    errors: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Files that were looked into."""
        return self.added + self.changed


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Which files an update reads, and how many at once.

    ``include``: kinds of files beside pictures. ``hidden``: also names that start with a dot. ``threads``:
    files in progress at a time.
    """

    include: frozenset[MediaKind] = frozenset()
    hidden: bool = False
    threads: int = 8


def installed_kinds() -> frozenset[MediaKind]:
    """Kinds of files that the installed extras can take apart: pdf, raw, video."""
    return frozenset(kind for kind in MEDIA_EXTENSIONS if is_installed(kind))


def update_index(
    index: VectorIndex,
    folder: Path,
    open_embedder: Callable[[], Embedder],
    options: UpdateOptions = UpdateOptions(),
    *,
    rebuild: bool = False,
    report: Callable[[UpdateTally, int], None] = lambda tally, total: None,
) -> UpdateTally:
    """Bring ``index`` up to date with ``folder``, and return what was done.

    A file is read if its path is new, or its size or modification time has changed; vectors are made of
    pictures whose bytes the index does not know. ``open_embedder`` is called once, before the
    first such vector; not at all if none is needed. ``rebuild``: forget all vectors first. ``report`` is
    called from time to time with the tally and the number of files to look into.

    May be interrupted at any time: the next call continues. Raises ``PictureNotFound`` for no folder,
    ``WrongIndex`` if the index was made by another model, and errors that concern all pictures.
    """
    check_folder(str(folder))
    updating = _Update(index, folder, open_embedder, options, rebuild, report)
    return updating.run()


@dataclass(frozen=True, slots=True)
class _Found:
    """A file to look into. ``before``: what the index has of it; None: nothing."""

    name: str
    path: str
    size: int
    mtime_ns: int
    before: IndexedFile | None


class _Update:
    def __init__(
        self,
        index: VectorIndex,
        folder: Path,
        open_embedder: Callable[[], Embedder],
        options: UpdateOptions,
        rebuild: bool,
        report: Callable[[UpdateTally, int], None],
    ) -> None:
        self._index = index
        self._folder = folder
        self._open_embedder = open_embedder
        self._options = options
        self._rebuild = rebuild
        self._report = report
        self._embedder: Embedder | None = None
        self._digests: set[bytes] = set()
        self._waiting: list[tuple[str, IndexedFile, Sequence[IndexedPicture]]] = []
        self._committed = time.monotonic()
        self.tally = UpdateTally()

    def run(self) -> UpdateTally:
        if self._rebuild:
            self._open()
        known = self._index.files()
        found, gone = self._compare(known)
        self._digests = self._index.all_digests() if found else set()
        if found:
            with ThreadPoolExecutor(self._options.threads, "vlfit-search") as pool:
                try:
                    self._look_into(found, pool)
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
                finally:
                    self._commit()
        if gone:  # last, as a file that was moved takes its vectors along
            self._index.remove(gone)
            self.tally.removed = len(gone)
        return self.tally

    def _compare(self, known: dict[str, IndexedFile]) -> tuple[list[_Found], list[str]]:
        """The files to look into, and the paths of those that are gone. Counts the others."""
        extensions = PICTURE_EXTENSIONS.union(*(MEDIA_EXTENSIONS[kind] for kind in self._options.include))
        source = FolderSource(str(self._folder), None, extensions, self._options.hidden)
        found: list[_Found] = []
        seen: set[str] = set()
        unreadable: list[str] = []
        for name in source.names():
            if isinstance(name, Unreadable):
                unreadable.append(key_of(name.name))
                self.tally.errors[key_of(name.name)] = name.message
                continue
            path = key_of(name)
            seen.add(path)
            try:
                status = os.stat(os.path.join(self._folder, name))
            except OSError as error:
                self.tally.errors[path] = error.strerror or "cannot be read"
                continue
            before = known.get(path)
            if before is not None and (before.size, before.mtime_ns) == (status.st_size, status.st_mtime_ns):
                self.tally.unchanged += 1
                if before.error is not None:
                    self.tally.errors[path] = before.error
                continue
            found.append(_Found(name, path, status.st_size, status.st_mtime_ns, before))
        self.tally.notes += source.notes()
        if known and not seen:
            # A disk that is not mounted looks like this: hours of work are not thrown away for it.
            self.tally.kept = True
            return [], []
        lost = tuple(folder if folder.endswith("/") else f"{folder}/" for folder in unreadable)
        gone = [path for path in known if path not in seen and not path.startswith(lost)]
        return found, gone

    def _look_into(self, found: list[_Found], pool: ThreadPoolExecutor) -> None:
        upcoming = iter(found)
        running: dict[Future[_Read | None], _Found] = {}

        def submit(file: _Found | None, *, reuse: bool = True) -> None:
            if file is not None:
                running[pool.submit(self._read, file, self._embedder, reuse=reuse)] = file

        for _ in range(2 * self._options.threads):
            submit(next(upcoming, None))
        while running:
            done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                file, read = running.pop(future), future.result()
                if read is None:
                    self._open()
                    submit(file)
                elif self._store(file, read):
                    submit(next(upcoming, None))
                else:
                    submit(file, reuse=False)
            self._report(self.tally, len(found))
            if time.monotonic() - self._committed > COMMIT_SECONDS or len(self._waiting) >= _COMMIT_FILES:
                self._commit()

    def _read(self, file: _Found, embedder: Embedder | None, *, reuse: bool) -> "_Read | None":
        """The pictures of ``file`` with their vectors.

        ``reuse``: None in place of a vector that the index has for the same bytes. ``embedder`` None: the
        model is not open yet; returns None if it is needed. Runs in threads.
        """
        full = os.path.join(os.path.abspath(self._folder), file.name)
        read = _Read()
        try:
            for item in file_items(file.path, full, Path(full), MediaOptions()):
                content = item.read()
                digest = digest_of(content)
                if reuse and digest in self._digests:
                    read.pictures.append((item.key, digest, None))
                elif embedder is None:
                    return None
                else:
                    vector = embedder.embed("", _part(item, content))
                    read.pictures.append((item.key, digest, vector))
        except _PICTURE_ERRORS as error:
            # Of a document that fails on page 7, six pages are found all the same.
            read.error = error.message
        return read

    def _store(self, file: _Found, read: "_Read") -> bool:
        """Keep the pictures of ``file`` for the next commit; False if a vector to reuse is gone meanwhile."""
        pictures = []
        for key, digest, vector in read.pictures:
            vector = vector if vector is not None else self._index.vector_of(digest)
            if vector is None:
                return False
            pictures.append(IndexedPicture(key, digest, vector))
        # A file that was written just now may change again without another time: look again the next time.
        is_settled = time.time_ns() - file.mtime_ns > _RECENT_NS
        indexed = IndexedFile(file.size, file.mtime_ns if is_settled else -1, read.error)
        self._waiting.append((file.path, indexed, pictures))
        made = sum(vector is not None for _, _, vector in read.pictures)
        self.tally.pictures += made
        if read.error is not None:
            self.tally.errors[file.path] = read.error
        if file.before is None:
            self.tally.added += 1
        elif made or read.error is not None:
            self.tally.changed += 1
        else:
            self.tally.unchanged += 1
        return True

    def _commit(self) -> None:
        if self._waiting:
            self._index.put(self._waiting)
            self._digests.update(each.digest for _, _, pictures in self._waiting for each in pictures)
            self._waiting = []
        self._committed = time.monotonic()

    def _open(self) -> Embedder:
        """The model, opened once. Only in the thread that the index belongs to, as the two are compared."""
        if self._embedder is None:
            self._embedder = self._open_embedder()
            model = IndexModel(self._embedder.model, self._embedder.dimensions)
            self._index.use_model(model, rebuild=self._rebuild)
        return self._embedder


@dataclass(slots=True)
class _Read:
    """Pictures of a file: key, digest and vector (None: the index has it); why it could not be read on."""

    pictures: list[tuple[str, bytes, Vector | None]] = field(default_factory=list)
    error: str | None = None


def _part(item: Item, content: bytes | ImagePart | VideoPart) -> ImagePart | VideoPart:
    return ImagePart(content, item.key) if isinstance(content, bytes) else content

"""``vlfit search``: find pictures in a folder by words, or by another picture."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.options import ANSWERING, SAMPLING, CommandOptions, takes_options
from vlfit.errors import UsageError
from vlfit.units import counted

if TYPE_CHECKING:
    from vlfit.api.progress import LoadProgress
    from vlfit.backends.base import Backend
    from vlfit.backends.opening import BackendSpec
    from vlfit.cli.printing import Printer
    from vlfit.cli.session import Session
    from vlfit.tasks.search.indexing import UpdateTally
    from vlfit.tasks.search.searching import BackendEmbedder
    from vlfit.tasks.search.vector_index import Hit, VectorIndex

_REPORT_SECONDS = 10.0
_SHOWN_ERRORS = 5


@takes_options(
    *(name for name in ANSWERING if name not in (*SAMPLING, "stream")),
    json="Print one JSON object: results, and what was updated.",
)
def search(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of pictures.")],
    query: Annotated[
        str | None,
        typer.Argument(metavar="WORDS", help="What to look for; without it the index is brought up to date."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like", metavar="PICTURE", help="Find what is like this picture, too.", show_default=False
        ),
    ] = None,
    number: Annotated[
        int, typer.Option("-n", "--number", metavar="N", help="How many to show.", min=1, max=1000)
    ] = 10,
    paths: Annotated[bool, typer.Option("--paths", help="Print paths only, one a line, for pipes.")] = False,
    null: Annotated[
        bool, typer.Option("--null", "-0", help="With --paths: end each with NUL instead, for xargs -0.")
    ] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update/--no-update",
            help="Look for new, changed and deleted files first.  [default: update]",
            show_default=False,
        ),
    ] = True,
    index: Annotated[
        Path | None,
        typer.Option(
            "--index",
            metavar="FILE",
            help="Where the index lies.  [default: in the cache folder, ~/.cache/vlfit/search]",
            show_default=False,
        ),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make all vectors anew, such as with another --model.")
    ] = False,
    hidden: Annotated[
        bool, typer.Option("--hidden", help="Also files and folders whose names start with a dot.")
    ] = False,
    *,
    options: CommandOptions,
) -> None:
    """Find pictures in a folder by words.

    The first search makes a vector of every picture, page and video below the folder and keeps them in an
    index; later ones add what is new or changed, and drop what is gone. It may be interrupted at any time and
    goes on where it was. Nothing is written into the folder.

    \b
    Examples:
      vlfit search photos/ "red bicycle at the beach"
      vlfit search photos/ --like photo.jpg -n 3
      vlfit search photos/ "receipts" --paths -0 | xargs -0 cp -t receipts/
      vlfit search photos/ "sunset" --json | jq -r '.results[0].path'
      vlfit search photos/
    """
    from vlfit.cli.session import Session
    from vlfit.tasks.batch.folders import check_folder
    from vlfit.tasks.files import load_file
    from vlfit.tasks.search.searching import MAX_RESULTS, Query
    from vlfit.tasks.search.vector_index import VectorIndex, index_path

    paths = paths or null
    if paths and options.json:
        raise UsageError("--paths and --json are both forms of the output", "Leave one of them out.")
    if rebuild and not update:
        raise UsageError("--rebuild and --no-update contradict each other", "Leave one of them out.")
    check_folder(str(folder))
    wanted = None
    if query is not None or like is not None:
        wanted = Query(query or "", None if like is None else load_file(like))
    if wanted is None and not update:
        raise UsageError("nothing to search for, and --no-update", 'Say what: "red bicycle at the beach".')
    file = index or index_path(folder)
    with VectorIndex(file, folder, create=update) as opened:
        typed = options
        if options.model is None and options.server is None and not rebuild and opened.opened_as is not None:
            typed = replace(options, model=opened.opened_as)  # the one whose vectors it has
        session = Session(typed, model_kind="embedding")
        found = _Search(session, opened, folder)
        try:
            tally = found.update(hidden=hidden, rebuild=rebuild) if update else None
            hits = [] if wanted is None else found.find(wanted, min(number, MAX_RESULTS))
        finally:
            found.close()
        if options.json:
            model = opened.model
            session.printer.data(
                {
                    "folder": str(folder),
                    "index": str(file),
                    "model": None if model is None else model.name,
                    "query": query,
                    "like": like,
                    "results": [_facts(hit, folder) for hit in hits],
                    "update": None if tally is None else asdict(tally),
                }
            )
        elif paths:
            _print_paths(hits, folder, end="\0" if null else "\n")
        else:
            for hit in hits:
                session.printer.line(f"{hit.score:.3f}  {_full(hit.path, folder)}{hit.key[len(hit.path) :]}")
        if wanted is not None and not hits:
            session.printer.note(f"  no picture of {folder} is in the index")


class _Search:
    """A search of one command. The model is opened when a vector is needed, and kept until ``close``."""

    def __init__(self, session: "Session", index: "VectorIndex", folder: Path) -> None:
        self._session = session
        self._index = index
        self._folder = folder
        self._backend: Backend | None = None
        self._embedder: BackendEmbedder | None = None
        self._rebuilds = False

    def update(self, *, hidden: bool, rebuild: bool) -> "UpdateTally":
        from vlfit.tasks.search.indexing import UpdateOptions, installed_kinds, update_index

        self._rebuilds = rebuild
        printer = self._session.printer
        options = UpdateOptions(installed_kinds(), hidden)
        tally = update_index(
            self._index, self._folder, self._open, options, rebuild=rebuild, report=_reporter(printer)
        )
        for note in tally.notes:
            printer.note(f"  {note}")
        if tally.kept:
            printer.warn(f"{self._folder} has no picture now: is it mounted? The index is kept as it was")
        if tally.added or tally.changed or tally.removed:
            printer.note(
                f"  index: {counted(tally.added, 'file')} added, {tally.changed:,} changed, "
                f"{tally.removed:,} gone; {counted(self._index.count()[0], 'picture')} in all"
            )
        for path, reason in list(tally.errors.items())[:_SHOWN_ERRORS]:
            printer.note(f"  left out: {path}: {reason}")
        if len(tally.errors) > _SHOWN_ERRORS:
            printer.note(f"  left out: {len(tally.errors) - _SHOWN_ERRORS:,} more; --json lists all")
        return tally

    def find(self, query: Any, n: int) -> "list[Hit]":
        from vlfit.tasks.search.searching import find, known_vector

        if self._index.model is None:
            return []
        known = known_vector(self._index, query)
        return (
            self._index.nearest(known, n) if known is not None else find(self._index, self._open(), query, n)
        )

    def close(self) -> None:
        """Free the model's memory."""
        if self._backend is not None:
            self._backend.close()

    def _open(self) -> "BackendEmbedder":
        from vlfit.backends.opening import open_backend
        from vlfit.tasks.search.searching import BackendEmbedder
        from vlfit.tasks.search.vector_index import IndexModel

        if self._embedder is not None:
            return self._embedder
        names: list[str] = []

        def open_named(spec: "BackendSpec", progress: "LoadProgress") -> "Backend":
            if spec.kind != "remote" and spec.model is not None:
                names.append(str(spec.model))
            return open_backend(spec, progress)

        self._backend = self._session.open(open_named)
        self._embedder = BackendEmbedder(self._backend)
        if self._backend.pooling is not None and self._backend.pooling.kind == "chat":
            self._session.printer.note(
                f"  {self._backend.model} was trained to chat, not for vectors: expect worse results"
            )
        model = IndexModel(self._embedder.model, self._embedder.dimensions)
        if self._rebuilds or self._index.model in (None, model):  # that of another model keeps its own
            for name in names:
                self._index.opened_as = name
        return self._embedder


def _reporter(printer: "Printer") -> "Callable[[UpdateTally, int], None]":
    began = last = time.monotonic()

    def report(tally: "UpdateTally", total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _REPORT_SECONDS:
            last = now
            printer.note(
                f"  {tally.done:,} of {counted(total, 'file')}, "
                f"{tally.pictures / (now - began):.1f} pictures a second"
            )

    return report


def _full(path: str, folder: Path) -> str:
    """The file of the key ``path``, below ``folder`` as it was typed."""
    from vlfit.tasks.batch.items import file_name_of_key

    return str(folder / file_name_of_key(path))


def _facts(hit: "Hit", folder: Path) -> dict[str, Any]:
    return {"path": str(folder / hit.path), "key": hit.key, "score": hit.score}


def _print_paths(hits: "list[Hit]", folder: Path, end: str) -> None:
    """Print the files of ``hits``, each once, byte for byte: names need not be UTF-8."""

    for name in dict.fromkeys(_full(hit.path, folder) for hit in hits):
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(name) + end.encode())
    sys.stdout.buffer.flush()

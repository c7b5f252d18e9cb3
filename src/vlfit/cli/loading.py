"""Loading progress on stderr: a bar on a terminal, else one line."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from vlfit.api.progress import LoadProgress
from vlfit.backends.startup import Phases
from vlfit.checkpoint.source import locate
from vlfit.cli.printing import Printer
from vlfit.loading.preload import read_ahead

if TYPE_CHECKING:
    from vlfit.checkpoint.hub import FileSelection


@contextmanager
def loading(
    name: str, printer: Printer, phases: Phases, files: "FileSelection | None" = None
) -> Iterator[LoadProgress]:
    """Show that ``name`` is loading; yields a function that takes the phase and the share done.

    Downloads a model of the hub first, as two progress bars would overwrite each other. ``files``: of the
    hub, if not those of the native engine. Raises what ``locate`` raises, before anything is printed.
    """
    _, folder = locate(name, None, files)
    read_ahead(folder)
    with _bar(name) if printer.lively else _line(name, printer) as show:

        def progress(what: str, share: float) -> None:
            phases.begin(what)
            show(what, share)

        yield progress


def files_for(backend: str | None, *, code: bool) -> "FileSelection | None":
    """Files that ``backend`` needs from the hub, ``code`` included; None: those of the native engine."""
    if backend != "transformers":
        return None
    from vlfit.backends.transformers.backend import wanted_files

    return wanted_files(code=code)


def import_in_thread(*modules: str) -> Thread:
    """Import ``modules`` in a thread, which the caller joins before using them."""

    def run() -> None:
        with suppress(Exception):  # imported again where it is used, with the error
            for module in modules:
                import_module(module)

    thread = Thread(target=run, name="import", daemon=True)
    thread.start()
    return thread


@contextmanager
def _bar(name: str) -> Iterator[LoadProgress]:
    """A bar that disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {name}", total=1.0)
        yield lambda what, share: bar.update(task, description=f"{name}: {what}", completed=share)


@contextmanager
def _line(name: str, printer: Printer) -> Iterator[LoadProgress]:
    """One line, for logs."""
    printer.note(f"loading {name}")
    yield lambda what, share: None

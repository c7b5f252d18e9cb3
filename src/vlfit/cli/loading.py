"""What a person sees while a model loads: a bar on a terminal, one line in a log file. Always on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from vlfit.backends.base import Phases
from vlfit.checkpoint.source import locate
from vlfit.cli.printing import Printer
from vlfit.loading.preload import read_ahead

if TYPE_CHECKING:
    from vlfit.checkpoint.hub import Files


Progress = Callable[[str, float], None]


@contextmanager
def loading(name: str, printer: Printer, phases: Phases, files: "Files | None" = None) -> Iterator[Progress]:
    """Shows that ``name`` is being loaded, within a ``with`` block, and tells ``phases`` what is being done.

    Gives a function to call with what is being done and the share of the whole that is done. A model of the
    hub that is not here yet is fetched first, with a line of its own: the two would write over each other.
    A name that is no model's raises at once, before anything is said to be loading. ``files`` of the hub, if
    others than the native engine reads.
    """
    _, folder = locate(name, None, files)
    read_ahead(folder)
    with _bar(name) if printer.lively else _line(name, printer) as show:

        def progress(what: str, share: float) -> None:
            phases.begin(what)
            show(what, share)

        yield progress


def files_for(backend: str | None, *, code: bool) -> "Files | None":
    """What ``backend`` reads of a model on the hub, ``code`` included; None: what the native engine does."""
    if backend != "transformers":
        return None
    from vlfit.backends.transformers.backend import wanted_files

    return wanted_files(code=code)


def import_beside(*modules: str) -> Thread:
    """Imports ``modules`` in a thread of its own, for somebody to ``join`` who will need them."""

    def run() -> None:
        with suppress(Exception):  # whoever needs it imports it again, and hears why it cannot be
            for module in modules:
                import_module(module)

    thread = Thread(target=run, name="import", daemon=True)
    thread.start()
    return thread


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    """A bar that is gone afterwards."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {name}", total=1.0)
        yield lambda what, share: bar.update(task, description=f"{name}: {what}", completed=share)


@contextmanager
def _line(name: str, printer: Printer) -> Iterator[Progress]:
    """One line, because a moving bar would be noise where nobody watches."""
    printer.note(f"loading {name}")
    yield lambda what, share: None

"""What a person sees while a model loads: a bar on a terminal, one line in a log file. Always on stderr."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from threading import Thread

from vlfit.checkpoint.source import locate
from vlfit.cli.printing import Printer

Progress = Callable[[str, float], None]


def loading(name: str, printer: Printer) -> AbstractContextManager[Progress]:
    """Shows that ``name`` is being loaded, within a ``with`` block.

    Gives a function to call with what is being done and the share of the whole that is done. A model of the
    hub that is not here yet is fetched first, with a line of its own: the two would write over each other.
    A name that is no model's raises at once, before anything is said to be loading.
    """
    locate(name)
    return _bar(name) if printer.lively else _line(name, printer)


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Imports ``module`` beside what is done within the block, so that nobody waits for it afterwards."""

    def run() -> None:
        with suppress(Exception):  # whoever needs it imports it again, and hears why it cannot be
            import_module(module)

    thread = Thread(target=run, name=f"import {module}", daemon=True)
    thread.start()
    yield
    thread.join()


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

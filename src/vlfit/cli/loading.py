"""Loading progress on stderr: a bar on a terminal, else one line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from vlfit.api.progress import LoadProgress
from vlfit.backends.startup import Phases
from vlfit.checkpoint.source import locate
from vlfit.cli.printing import Printer
from vlfit.errors import UsageError, VlfitError
from vlfit.loading.preload import read_ahead

if TYPE_CHECKING:
    from vlfit.checkpoint.hub import FileSelection
    from vlfit.plan.model_lookup import AutoChoice


@contextmanager
def show_loading(
    name: str, printer: Printer, phases: Phases, files: "FileSelection | None" = None
) -> Iterator[LoadProgress]:
    """Show that ``name`` is loading; yields a function that takes the phase and the share done.

    Downloads a model of the hub first, as two progress bars would overwrite each other. ``files``: which
    files of the hub; None: those that the native engine reads. Raises what ``locate`` raises, before anything
    is printed.
    """
    _, folder = locate(name, None, files)
    read_ahead(folder)
    with _bar(name) if printer.on_terminal else _line(name, printer) as show:

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


def refuse_mini(choice: "AutoChoice") -> None:
    """Raise ``UsageError`` if ``auto`` means mini: long work, and a server, are for a real model."""
    from vlfit.checkpoint.source import MINI
    from vlfit.plan.model_lookup import SUGGESTION

    if choice.model == MINI:
        why = choice.reason.partition("; ")[2]
        raise UsageError(
            "no model is named, and there is none here but mini, which is for trying vlfit out"
            if SUGGESTION in why
            else f"no model is named, and none fits but mini, which is for trying vlfit out: {why}",
            f"Fetch a model (vlfit pull {SUGGESTION}; vlfit plan shows what fits), name one with -m, or type"
            " -m mini.",
        )


def offer_model(choice: "AutoChoice", printer: Printer, *, yes: bool) -> str:
    """The model to open for ``auto``; on a terminal a person may fetch a real one instead of mini.

    With no, without a terminal or without the hub it is mini.
    """
    from vlfit.checkpoint.source import MINI
    from vlfit.cli.models import model_here
    from vlfit.plan.model_lookup import SUGGESTION

    if choice.model != MINI:
        printer.detail(choice.reason)
        return choice.model
    if SUGGESTION in choice.reason and sys.stdin.isatty() and printer.on_terminal:
        printer.note(
            "no real model is on this computer: mini, which ships with vlfit, knows little of photos"
        )
        try:
            return model_here(SUGGESTION, printer, yes=yes)
        except VlfitError as error:
            printer.note(f"{error.message}: using mini (-m mini does not ask)")
            return MINI
    printer.note(choice.reason)
    return MINI


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

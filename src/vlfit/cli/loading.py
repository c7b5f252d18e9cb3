"""Loading progress on stderr: a bar on a terminal, else one line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from vlfit.api.progress import LoadProgress
from vlfit.backends.startup import StartupTimer
from vlfit.checkpoint.gguf.gguf_checkpoint import gguf_notes
from vlfit.checkpoint.source import locate_or_download
from vlfit.cli.printing import Printer
from vlfit.errors import UsageError, VlfitError
from vlfit.loading.preload import read_ahead

if TYPE_CHECKING:
    from vlfit.checkpoint.hub import FileSelection
    from vlfit.plan.model_choice import AutoChoice


@contextmanager
def show_loading(
    name: str, printer: Printer, phases: StartupTimer, files: "FileSelection | None" = None
) -> Iterator[LoadProgress]:
    """Show on stderr how far the model ``name`` is loaded; yields the callback to report progress to.

    The callback's arguments: name of the phase, and the share of it that is done, 0 to 1. Downloads a hub
    model first, as two progress bars would overwrite each other. ``files``: what to download; None: what the
    native engine reads. Raises what ``locate_or_download`` raises, before anything is printed.
    """
    _, folder = locate_or_download(name, None, files)
    for note in gguf_notes(folder):
        printer.note(note)
    read_ahead(folder)
    with _bar(name) if printer.on_terminal else _line(name, printer) as show:

        def progress(what: str, share: float) -> None:
            phases.begin(what)
            show(what, share)

        yield progress


def file_selection_for(backend: str | None, *, code: bool) -> "FileSelection | None":
    """Which files of a hub model to download for ``backend``; None: those that the native engine reads.

    ``code``: also the checkpoint's Python files, for ``--trust-remote-code`` with ``transformers``.
    """
    if backend != "transformers":
        return None
    from vlfit.backends.transformers.backend import files_to_download

    return files_to_download(trust_remote_code=code)


def refuse_mini(choice: "AutoChoice") -> None:
    """Raise ``UsageError`` if ``auto`` means mini: a batch or a server needs a real model."""
    from vlfit.checkpoint.source import MINI

    if choice.model == MINI:
        download, obstacle = choice.download, choice.obstacle
        fetch = f"Fetch a model: {download.command} ({download.verdict}). " if download else ""
        raise UsageError(
            "no model is named, and none that fits is here but mini, which is for trying vlfit out"
            f"{f': {obstacle}' if obstacle else ''}",
            f"{fetch}Or name one with -m (vlfit plan shows what fits), or type -m mini.",
        )


def refuse_without_embedding_model(choice: "AutoChoice") -> None:
    """Raise ``UsageError`` if ``choice`` is mini because no embedding model that fits is on this computer."""
    from vlfit.checkpoint.source import MINI

    if choice.model == MINI:
        raise UsageError(
            "no model is named, and no embedding model that fits is on this computer"
            f"{f': {choice.obstacle}' if choice.obstacle else ''}",
            "Fetch one: vlfit pull Qwen3-VL-Embedding-2B. Or name any model with -m; those that chat give"
            " vectors too, but worse ones.",
        )


def offer_model(choice: "AutoChoice", printer: Printer, *, yes: bool) -> str:
    """Return the model to open for ``auto``. If that is mini, offer on a terminal to download a real one.

    Returns the real model's name if the answer is yes; this function downloads nothing itself. Returns mini
    if the answer is no, if there is no terminal to ask at, and if nothing can be downloaded: offline, or with
    too little disk. ``yes``: take the answer as given.
    """
    from vlfit.checkpoint.source import MINI
    from vlfit.cli.models import ask_to_download

    if choice.model != MINI:
        printer.note(choice.reason)
        return choice.model
    download = choice.download
    if download is None or not (sys.stdin.isatty() and printer.on_terminal):
        printer.note(choice.reason)
        return MINI
    printer.note(
        "no real model that fits is on this computer: mini, which ships with vlfit, knows little of photos"
    )
    try:
        ask_to_download(download.name, download.weight_bytes, download.verdict, yes=yes)
    except VlfitError as error:
        printer.note(f"{error.message}: using mini (-m mini does not ask)")
        return MINI
    return download.name


def import_in_thread(*modules: str) -> Thread:
    """Import ``modules`` in a thread; join it before using them. Errors are ignored here."""

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

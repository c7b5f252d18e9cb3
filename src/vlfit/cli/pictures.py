"""Pictures as they are named on a command line: globs, URLs, ``-``; one failing among many.

Knows which failures concern one picture and which concern them all.
"""

from collections.abc import Callable

import typer

from vlfit.cli.printing import print_error
from vlfit.errors import DoesNotFit, PictureError, RemoteError, UnreadableAnswer, UsageError, VlfitError

# The next picture may well work after one of these; after any other error it would fail alike.
_OF_ONE_PICTURE = (PictureError, DoesNotFit, UnreadableAnswer, RemoteError)


def named_pictures(patterns: list[str]) -> list[str]:
    """The pictures that ``patterns`` mean, in order. Raises ``UsageError`` when ``-`` stands there twice."""
    from vlfit.tasks.pictures import expand_pictures

    names = expand_pictures(patterns)
    if names.count("-") > 1:
        raise UsageError(
            f"- is given {names.count('-')} times", "standard input holds one picture: give - once"
        )
    return names


def for_each_picture(names: list[str], work: Callable[[str], None]) -> None:
    """Do ``work`` for every picture. With several, one that fails is reported and the others go on.

    Raises the error itself for a lone picture, and ends with exit code 1 if any of several failed.
    """
    from vlfit.tasks.pictures import name_of

    failed = 0
    for name in names:
        try:
            work(name)
        except _OF_ONE_PICTURE as error:
            if len(names) == 1:
                raise
            print_error(error, about=name_of(name))
            failed += 1
    if failed:
        print_error(VlfitError(f"{failed} of {len(names)} pictures failed"))
        raise typer.Exit(1)

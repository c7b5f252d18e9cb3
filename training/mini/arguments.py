"""Types for argparse: numbers, files and folders, checked before any work begins.

Each raises ``ArgumentTypeError``, which ends the program with status 2.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def whole_number(least: int) -> Callable[[str], int]:
    """Type of a whole number from ``least`` on."""

    def take(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from {least} on")
        return int(text)

    return take


def positive_number(text: str) -> float:
    """A number above 0, and not infinity."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return number


def folder_to_write(text: str) -> Path:
    """A folder that is there and may be written to, or that can be made."""
    nearest = Path(text).absolute()
    while not os.path.exists(nearest):  # Path.exists raises where it may not look
        nearest = nearest.parent
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"{nearest} is a file: give a folder to write to")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{nearest} may not be written to: give another folder")
    try:
        # Where nothing can be made although all may write (/proc), only trying tells.
        os.rmdir(tempfile.mkdtemp(dir=nearest))
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"nothing can be written in {nearest} ({error.strerror}): give another folder"
        ) from error
    return Path(text)


def folder_outside(kept: Path) -> Callable[[str], Path]:
    """Type of a folder to write to that is not ``kept``, nor in it."""

    def take(text: str) -> Path:
        if Path(os.path.realpath(text)).is_relative_to(os.path.realpath(kept)):
            raise argparse.ArgumentTypeError(
                f"{text} is the mini that ships: choose another folder, and copy the model when it is scored"
            )
        return folder_to_write(text)

    return take


def file_to_write(text: str) -> Path:
    """A file in a folder that is there and may be written to."""
    path = Path(text)
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path} is a folder: give a file to write")
    if not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent} to write it in")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} may not be written to: give another place")
    return path


def folder_with(*patterns: str) -> Callable[[str], Path]:
    """Type of a folder that holds a file for each of ``patterns``."""

    def take(text: str) -> Path:
        path = Path(text)
        if not os.path.isdir(path):
            raise argparse.ArgumentTypeError(f"{path} is no folder")
        missing = [pattern for pattern in patterns if not any(path.glob(pattern))]
        if missing:
            raise argparse.ArgumentTypeError(f"{path} holds no {' and no '.join(missing)}")
        return path

    return take

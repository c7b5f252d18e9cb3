"""Exceptions of a model's own code as vlfit errors, with their tracebacks in a log file."""

import logging
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlfit.engine.memory.budget import is_out_of_memory
from vlfit.errors import ModelFailed, OutOfMemory, VlfitError

logger = logging.getLogger(__name__)


def log_path() -> Path:
    """Path of this process's log file, to which ``model_error`` appends tracebacks."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return base / "vlfit" / f"transformers-{os.getpid()}.log"


@contextmanager
def translate_model_errors(doing: str, hint: str = "") -> Iterator[None]:
    """Raise ``model_error(error, doing, hint)`` in place of any ``error`` of the block but a vlfit error."""
    try:
        yield
    except VlfitError:
        raise
    except Exception as error:
        raise model_error(error, doing, hint) from None


def model_error(error: Exception, doing: str, hint: str = "") -> VlfitError:
    """``error`` as ``OutOfMemory`` or ``ModelFailed``; a vlfit error is returned as it is.

    Appends the traceback to ``log_path()``. ``doing``: what failed, for the message: ``loading the model``.
    ``hint``: the hint of a ``ModelFailed``; "": the path of the log.
    """
    if isinstance(error, VlfitError):
        return error
    place = _write_log(error, doing)
    words = f"{type(error).__name__}: {_first_line(error)}"
    if is_out_of_memory(error):
        return OutOfMemory(
            f"out of memory while {doing}: {words}", "Send smaller or fewer pictures, or less text."
        )
    return ModelFailed(f"transformers failed while {doing}: {words}", hint or f"The traceback is in {place}.")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"


def _write_log(error: Exception, doing: str) -> str:
    """Write the traceback to the log file; return the file's name for a message."""
    path = log_path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} while {doing}\n")
            file.writelines(traceback.format_exception(error))
        return str(path)
    logger.info("while %s", doing, exc_info=error)
    return "the log"

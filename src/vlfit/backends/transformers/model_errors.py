"""What goes wrong inside of a model's own code, as one error of ours and a file with all of it.

Knows: that such code raises anything whatever. Does not know what the model was doing.
"""

import logging
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlfit.engine.memory.budget import is_shortage
from vlfit.errors import ModelFailed, OutOfMemory, VlfitError

logger = logging.getLogger(__name__)


def log_file() -> Path:
    """Where this process writes what models' code raised, beside the logs of servers."""
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return base / "vlfit" / f"transformers-{os.getpid()}.log"


@contextmanager
def in_words(doing: str, hint: str = "") -> Iterator[None]:
    """Whatever the block raises that is no error of ours becomes one: ``in_one`` says which."""
    try:
        yield
    except VlfitError:
        raise
    except Exception as error:
        raise in_one(error, doing, hint) from None


def in_one(error: Exception, doing: str, hint: str = "") -> VlfitError:
    """``error``, raised while ``doing``, as ``OutOfMemory`` or ``ModelFailed``. The log has its traceback."""
    if isinstance(error, VlfitError):
        return error
    place = _keep(error, doing)
    words = f"{type(error).__name__}: {_first_line(error)}"
    if is_shortage(error):
        return OutOfMemory(
            f"there was no memory while {doing}: {words}", "send smaller or fewer pictures, or less text"
        )
    return ModelFailed(f"transformers failed while {doing}: {words}", hint or f"{place} has all that it said")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"


def _keep(error: Exception, doing: str) -> str:
    """Write the traceback down; where, in words."""
    path = log_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} while {doing}\n")
            file.writelines(traceback.format_exception(error))
        return str(path)
    logger.info("while %s", doing, exc_info=error)
    return "the log"

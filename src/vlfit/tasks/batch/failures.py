"""What a failure means for a batch: try again, put this picture on the list, or stop because all would fail.

Knows the errors. Does not know how anything is tried again or listed.
"""

from enum import Enum

from vlfit.errors import (
    DoesNotFit,
    ModelFailed,
    OutOfMemory,
    PictureError,
    PictureNotFound,
    QueueFull,
    RemoteError,
    ServerStopping,
    ServerUnreachable,
    UnreadableAnswer,
    VlfitError,
)

# Failures of one picture. Most of them may have another reason (a context that is too small, a disk that is
# not mounted): when many fail so in a row, it is hardly the pictures.
_OF_ONE = (PictureError, UnreadableAnswer, DoesNotFit, ModelFailed, OutOfMemory, RemoteError)
_MAY_PASS = (QueueFull, ServerUnreachable, ServerStopping, OutOfMemory)

FIRST_WAIT = 1.0  # seconds before the second try; each further one waits twice as long
LONGEST_WAIT = 30.0
TRIES = 6  # with those waits half a minute: as long as a server takes that is started again

# So many in a row that are not the pictures' own fault, before anything succeeded and after it.
_IN_A_ROW_AT_FIRST = 16
_IN_A_ROW = 100


class Verdict(Enum):
    """``AGAIN``: later, the same picture. ``ONE``: this picture failed. ``ALL``: the run must stop."""

    AGAIN = "again"
    ONE = "one"
    ALL = "all"


def verdict_on(error: Exception, tries: int, most_tries: int = TRIES) -> Verdict:
    """What ``error`` means for a picture that was tried ``tries`` times."""
    if may_pass(error) and tries < most_tries:
        return Verdict.AGAIN
    # What is no VlfitError is a fault of ours or of a library; one strange file must not stop ten thousand.
    one = isinstance(error, _OF_ONE) or not isinstance(error, VlfitError)
    return Verdict.ONE if one else Verdict.ALL


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed in a while."""
    if isinstance(error, RemoteError):
        return error.status is None or error.status in (408, 429) or error.status >= 500
    return isinstance(error, _MAY_PASS)


def wait_before(error: Exception, tries: int) -> float:
    """Seconds until the next try after ``tries`` of them: as long as the server says, else ever longer."""
    asked = getattr(error, "retry_after", 0)
    return max(float(asked), min(FIRST_WAIT * 2.0 ** (tries - 1), LONGEST_WAIT))


class Streak:
    """Counts failures that need not be the pictures' own until something succeeds."""

    def __init__(self) -> None:
        self._failed = 0
        self._any = False

    def success(self) -> None:
        self._any = True
        self._failed = 0

    def stop_for(self, error: Exception) -> VlfitError | None:
        """Count ``error``, which is not a picture's own. What to stop with, if that were too many."""
        self._failed += 1
        if self._failed < (_IN_A_ROW if self._any else _IN_A_ROW_AT_FIRST):
            return None
        message = getattr(error, "message", f"{type(error).__name__}: {error}")
        hint = "--keep-going lists such pictures and goes on"
        return VlfitError(
            f"{self._failed} pictures in a row failed, which is hardly their fault; the last one: {message}",
            f"{error.hint}; {hint}" if isinstance(error, VlfitError) and error.hint else hint,
        )


def is_own_fault(error: Exception) -> bool:
    """Whether the bytes of the picture, or the answer, are what is wrong: then many more may be."""
    return isinstance(error, PictureError | UnreadableAnswer) and not isinstance(error, PictureNotFound)


def facts_of(error: Exception, tries: int) -> dict[str, object]:
    """``error`` as a line of the list of failures has it."""
    if isinstance(error, VlfitError):
        facts: dict[str, object] = {"code": error.code, "reason": error.message, "hint": error.hint}
        if isinstance(error, UnreadableAnswer):
            facts["text"] = error.answer
    else:
        facts = {"code": VlfitError.code, "reason": f"{type(error).__name__}: {error}", "hint": ""}
    return {**facts, "tries": tries}

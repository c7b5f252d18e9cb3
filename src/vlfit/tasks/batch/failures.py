"""Classify failures of a batch: retry, list this picture as failed, or stop because all would fail."""

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

# Failures of one picture. Most can also have a common cause (a context that is too small, a disk that is not
# mounted), so a long run of them stops the batch.
_ITEM_ERRORS = (PictureError, UnreadableAnswer, DoesNotFit, ModelFailed, OutOfMemory, RemoteError)
_TRANSIENT_ERRORS = (QueueFull, ServerUnreachable, ServerStopping, OutOfMemory)

FIRST_DELAY_S = 1.0  # before the second try; doubled for each further one
MAX_DELAY_S = 30.0
DEFAULT_TRIES = 6  # half a minute in all: long enough for a server to restart

# Failures in a row that stop the batch: before anything has succeeded, and after.
_MAX_IN_A_ROW_AT_START = 16
_MAX_IN_A_ROW = 100


class FailureAction(Enum):
    """What to do after a failure.

    ``RETRY`` the picture later, list it as failed (``FAIL_ITEM``), or ``ABORT`` the run.
    """

    RETRY = "again"
    FAIL_ITEM = "one"
    ABORT = "all"


def classify(error: Exception, tries: int, max_tries: int = DEFAULT_TRIES) -> FailureAction:
    """Decide what to do about ``error``, raised by attempt ``tries`` (the first is 1) at a picture.

    Exceptions other than ``VlfitError`` fail the picture. ``max_tries``: attempts after which transient
    errors are not retried: then ``OutOfMemory`` and ``RemoteError`` fail the picture, and others, such as
    ``ServerUnreachable``, abort the run.
    """
    if is_transient(error) and tries < max_tries:
        return FailureAction.RETRY
    # Anything but a VlfitError is a bug, ours or a library's: one odd file must not stop ten thousand.
    one = isinstance(error, _ITEM_ERRORS) or not isinstance(error, VlfitError)
    return FailureAction.FAIL_ITEM if one else FailureAction.ABORT


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later: the server is busy, restarting, or short of memory."""
    if isinstance(error, RemoteError):
        return error.status is None or error.status in (408, 429) or error.status >= 500
    return isinstance(error, _TRANSIENT_ERRORS)


def retry_delay(error: Exception, tries: int) -> float:
    """Seconds to wait after attempt ``tries`` (from 1): 1, 2, 4 ... 30, but at least the server's
    Retry-After.
    """
    retry_after = getattr(error, "retry_after", 0)
    return max(float(retry_after), min(FIRST_DELAY_S * 2.0 ** (tries - 1), MAX_DELAY_S))


class FailureStreak:
    """Counts failures in a row that may not be the pictures' fault, to stop the batch if there are too many.

    The limit is 16 before the first success, 100 after.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._any_success = False

    def count_success(self) -> None:
        """End the streak."""
        self._any_success = True
        self._in_a_row = 0

    def count_failure(self, error: Exception) -> VlfitError | None:
        """Count a failure. At the limit, returns the error to stop the batch with, which quotes ``error``;
        else None.
        """
        self._in_a_row += 1
        if self._in_a_row < (_MAX_IN_A_ROW if self._any_success else _MAX_IN_A_ROW_AT_START):
            return None
        message = getattr(error, "message", f"{type(error).__name__}: {error}")
        hint = "With --keep-going such pictures are listed as failed, and the batch continues."
        return VlfitError(
            f"{self._in_a_row} pictures in a row failed, so the cause is probably not the pictures; "
            f"the last error: {message}",
            f"{error.hint} {hint}" if isinstance(error, VlfitError) and error.hint else hint,
        )


def is_picture_fault(error: Exception) -> bool:
    """Whether ``error`` is about this picture's bytes, or the answer to it, and says nothing of other
    pictures.

    False for a missing picture, as the whole disk may be gone.
    """
    return isinstance(error, PictureError | UnreadableAnswer) and not isinstance(error, PictureNotFound)


def failure_fields(error: Exception, tries: int) -> dict[str, object]:
    """``error`` as JSON fields of a line in ``FILE.failed.jsonl``: ``code``, ``reason``, ``hint``, ``tries``.

    For ``UnreadableAnswer`` also ``text``, the answer.
    """
    if isinstance(error, VlfitError):
        fields: dict[str, object] = {"code": error.code, "reason": error.message, "hint": error.hint}
        if isinstance(error, UnreadableAnswer):
            fields["text"] = error.answer
    else:
        fields = {"code": VlfitError.code, "reason": f"{type(error).__name__}: {error}", "hint": ""}
    return {**fields, "tries": tries}

"""How the thread of an engine begins: it builds the engine that it will run, if anybody still wants it.

Knows: who waits for it. Does not know which engine it is, or what the thread does then (``loop.py``,
``any_model/loop.py``).
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from vlfit.engine.threads import keep_to_own_cores
from vlfit.errors import EngineStopped

Progress = Callable[[str, float], None]
E = TypeVar("E")


def build_here(
    build: Callable[[Progress], E], progress: Progress | None, unwanted: Callable[[], bool], built: Future[E]
) -> E | None:
    """What ``build`` builds, which ``built`` has then, too; None where it fails, and ``built`` has why.

    ``progress``, if there is one, is told what ``build`` reports. The next report after the engine has become
    ``unwanted`` ends it with ``EngineStopped``.
    """

    def report(what: str, share: float) -> None:
        if unwanted():
            raise stopped()
        if progress is not None:
            progress(what, share)

    keep_to_own_cores()
    try:
        engine = build(report)
    except BaseException as error:
        built.set_exception(error)
        return None
    built.set_result(engine)
    return engine


def stopped() -> EngineStopped:
    """What requests are told that end because the engine does, or come after it."""
    return EngineStopped("the engine has stopped", "start it again")

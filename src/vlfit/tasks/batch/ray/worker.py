"""An actor of the cluster: a backend of its own, and a crew that keeps it busy with handfuls of items.

Knows what a handful is and how its items become records. Does not know who lists, who writes, or how many
other workers there are. What goes wrong for good comes back in words: an exception that ends an actor would
reach nobody but Ray.
"""

import os
import platform
import socket
import sys
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from vlfit._version import __version__
from vlfit.backends.opening import Wanted
from vlfit.errors import EngineLost, VlfitError
from vlfit.tasks.batch.crew import Crew, Outcome
from vlfit.tasks.batch.item import Item
from vlfit.tasks.batch.ray.handful import Done, Duty, Handful, packed, unpacked
from vlfit.tasks.batch.ray.sight import missing_model, other_version

if TYPE_CHECKING:
    from vlfit.backends.base import LocalBackend


class Worker:
    """What Ray makes one of for each actor. Called with handfuls, by two threads at a time: so the engine has
    the next one's pictures before the last answer of this one has come.
    """

    def __init__(self, duty: Duty) -> None:
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._problem: VlfitError | None = None
        self._backend: LocalBackend | None = None
        self._crew: Crew | None = None
        self._said: deque[str] = deque()
        go_to(duty.folder)
        try:
            self._open(duty)
        except VlfitError as error:
            self._problem = located(error)

    def _open(self, duty: Duty) -> None:
        from vlfit.tasks.batch.opening import open_for_batch

        if duty.version != __version__:
            raise other_version(platform.node(), __version__, duty.version)
        lacking = missing_model(duty.wanted)
        if lacking is not None:
            raise lacking
        self._backend, pace = open_for_batch(
            self._heard(duty.wanted),
            duty.at_once,
            readers=duty.readers,
            tries=duty.tries,
            alike=bool(duty.work.wish.system),
        )
        self._crew = Crew(duty.work, self._backend, replace(pace, keep_going=duty.keep_going))

    def _heard(self, wanted: Wanted) -> Wanted:
        """``wanted``, and what vLLM's start says is kept for whoever started the batch."""
        if wanted.kind != "vllm":
            return wanted
        from vlfit.backends.vllm.options import VllmOptions

        return replace(wanted, vllm=replace(wanted.vllm or VllmOptions(), tell=self._said.append))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        """A batch of Ray's in and out: a column of packed handfuls, a column of what became of each."""
        return {"done": [packed(self.do(unpacked(cell))) for cell in batch["handful"]]}

    def do(self, handful: Handful) -> Done:
        """Settle every item of ``handful``."""
        if handful.problem is not None or self._problem is not None:
            return Done(self._name, problem=handful.problem or self._problem, told=self._to_tell())
        assert self._crew is not None
        assert self._backend is not None
        originals = {item.key: item for item in handful.items}
        try:
            outcomes = tuple(_light(outcome, originals) for outcome in self._crew.outcomes(handful.to_read()))
        except EngineLost as error:
            end_of_process(error)
        except VlfitError as error:
            return Done(self._name, problem=located(error), told=self._to_tell())
        return Done(self._name, self._backend.model, outcomes, handful.end, told=self._to_tell())

    def _to_tell(self) -> tuple[str, ...]:
        """What was said since somebody asked; another thread may ask too."""
        told: list[str] = []
        with suppress(IndexError):
            while True:
                told.append(self._said.popleft())
        return tuple(told)

    def __del__(self) -> None:
        # Ray drops a worker when there is no more to do, and its process ends soon after.
        backend = getattr(self, "_backend", None)
        if backend is not None:
            with suppress(Exception):
                backend.close()


def _light(outcome: Outcome, originals: dict[str, Item]) -> Outcome:
    """``outcome`` as it travels back: without the picture's bytes, and with an error that pickles."""
    error = outcome.error
    if error is not None and not isinstance(error, VlfitError):
        error = VlfitError(f"{type(error).__name__}: {error}")
    return replace(outcome, item=originals[outcome.item.key], error=error)


def go_to(folder: str) -> None:
    """Stand where the batch was started, if there is such a folder: relative names mean the same then."""
    with suppress(OSError):
        os.chdir(folder)


def end_of_process(error: EngineLost) -> NoReturn:
    """The model is gone, and this process has no other: it ends as if it had been killed, so that Ray starts
    another in its place and gives that the handful. Its log says why.
    """
    sys.stderr.write(f"{error.message}\n{error.hint}\n")
    sys.stderr.flush()
    os._exit(1)


def located(error: VlfitError) -> VlfitError:
    """``error`` with the machine that it happened on."""
    error.message = f"on {platform.node()}: {error.message}"
    return error

"""What every backend offers the floors above: a conversation in, a stream of chunks out.

``native`` (our engine), ``vllm``, ``transformers`` and ``remote`` (any OpenAI endpoint) fill this in. Tasks,
the Python API and the command line speak to ``Backend`` alone; server and batches to ``LocalBackend``, which
splits the work so that nothing blocks an event loop. ``opening.py`` opens any of them.
"""

import os
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, runtime_checkable

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import Park
from vlfit.api.outputs import Answer, Chunk, ImageSeen, TokenLogprob
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import EngineAccount, Rest
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.checkpoint.any_model import AnyCheckpoint
    from vlfit.plan.actual import Expectation, Row


Listener = Callable[[Chunk | Exception], None]
P = TypeVar("P")


class Stream(Protocol):
    """One running completion: iterate for chunks; closing it early frees what it holds.

    ``images`` is known once the first chunk has come. ``answer()`` reads on to the end and gives the whole.
    """

    @property
    def images(self) -> tuple[ImageSeen, ...]: ...
    def __iter__(self) -> Iterator[Chunk]: ...
    def answer(self) -> Answer: ...
    def close(self) -> None: ...


class Backend(Protocol):
    """Raises the errors of ``vlfit.errors``, most of them before anything runs."""

    @property
    def model(self) -> str:
        """The name by which answers and ``/v1/models`` call the checkpoint."""
        ...

    def stream(self, conversation: Conversation, sampling: SamplingParams) -> Stream: ...
    def default_sampling(self) -> SamplingParams:
        """The checkpoint's own generation settings (``generation_config.json``)."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Prepared(Protocol):
    """A priced request: tokens counted and pictures looked at, nothing on the device yet.

    A backend that cannot count before the model has answered (``remote``, where the server does not tell) has
    no ``images`` and 0 tokens here (None of pictures, if there are any); the last chunk's usage tells them
    then.
    """

    @property
    def images(self) -> tuple[ImageSeen, ...]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def image_tokens(self) -> int | None: ...
    @property
    def most_tokens(self) -> int:
        """How many tokens a completion may have; 0: nobody knows."""
        ...


class Ticket(Protocol):
    """A request inside the engine. ``cancel`` may be called from any thread, at any time, more than once."""

    def cancel(self) -> None: ...


@runtime_checkable
class TakenLater(Protocol):
    """A ticket of a request that another server may yet refuse."""

    @property
    def taken(self) -> "Future[bool]":
        """Whether it was taken; if not, its listener is told why."""
        ...


@runtime_checkable
class Accountable(Protocol):
    """A backend that tells what it does and holds. Asking never waits for the engine, nor wakes it."""

    @property
    def kind(self) -> str:
        """Which backend this is, as a plan names it: ``native``."""
        ...

    @property
    def checkpoint(self) -> "Checkpoint | AnyCheckpoint": ...
    def account(self) -> EngineAccount: ...


@runtime_checkable
class Planned(Protocol):
    """A backend that has the plan of its model itself, as none can be made from the checkpoint alone."""

    @property
    def expectation(self) -> "Expectation": ...


@runtime_checkable
class Itemized(Protocol):
    """A backend that tells planned and held memory line by line itself, as far as its program told it."""

    def rows(self) -> "tuple[Row, ...]": ...


@runtime_checkable
class Sleeper(Protocol):
    """A backend that can give its memory back for a while. A request wakes it; looking does not."""

    @property
    def asleep(self) -> bool: ...
    def sleep(self, park: Park = "auto") -> "Future[Rest]":
        """Sleep as soon as nothing runs or waits. A future that is cancelled in time withdraws the wish."""
        ...

    def wake(self) -> "Future[Rest]":
        """Wake without a request. The future has a ``CannotWake`` where others have the memory."""
        ...


@runtime_checkable
class Perishable(Protocol):
    """A backend whose model runs in a process of its own, which can die, and takes its time to end."""

    @property
    def closing_seconds(self) -> float:
        """How long ``close`` may take."""
        ...

    def when_lost(self, tell: Callable[[Exception], None]) -> None:
        """``tell`` is called with the reason, in a thread, once the process has died by itself."""
        ...


class LocalBackend(Backend, Protocol):
    """A backend whose requests are prepared first and run beside each other."""

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Prepared:
        """Decode pictures, render the template, count tokens, check against the plan (CPU work, blocking).
        ``tools`` are functions that the model may ask for.

        Raises ``PictureError``, ``InvalidRequest`` or ``DoesNotFit``.
        """
        ...

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Prepared:
        """The same for text, or token ids, that the model goes on with as they are."""
        ...

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        """Queue the request. ``listener`` is called from the engine's thread with each chunk in order.

        The last call brings a chunk with a ``finish_reason``, or the exception that ended the request.
        One prepared request may be started several times (``n`` choices).
        """
        ...


@runtime_checkable
class OpenBackend(LocalBackend, Protocol):
    """A backend that was opened by its name, with what a person is told of it."""

    @property
    def kind(self) -> str:
        """Which it is: ``native``, ``vllm``, ``transformers`` or ``remote``."""
        ...

    @property
    def context(self) -> int | None:
        """Most tokens of one request, prompt and completion; None: nobody told."""
        ...

    @property
    def device(self) -> str:
        """Where the model runs, in a word: ``cpu``, ``cuda:0``, or the server's URL."""
        ...


class Closing:
    """What is closed at the end of a ``with`` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def own(prepared: Prepared, kind: type[P]) -> P:
    """``prepared``, which is to be of ``kind``. Raises ``UsageError`` for what another backend prepared."""
    if not isinstance(prepared, kind):
        raise UsageError("the request was prepared by another backend", "prepare and start on the same one")
    return prepared


# One running completion as its reader sees it, over any backend that starts requests and calls a listener.
#
# Knows: the queue between the thread that computes and the one that reads. Does not know what runs.


class QueuedStream:
    """Started when it is built; read by one thread."""

    def __init__(self, backend: LocalBackend, prepared: Prepared, sampling: SamplingParams) -> None:
        self._images = prepared.images
        self._model = backend.model
        self._arrivals: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        self._done = False
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: Chunk | None = None
        self.ticket = backend.start(prepared, sampling, self._arrivals.put)

    @property
    def images(self) -> tuple[ImageSeen, ...]:
        """What the model saw of each picture, as far as anybody told."""
        return self._images

    def __iter__(self) -> Iterator[Chunk]:
        while not self._done:
            arrival = self._arrivals.get()
            if isinstance(arrival, Exception):
                self._done = True
                raise arrival
            self._images = arrival.images or self._images
            self._text.append(arrival.text)
            self._logprobs.extend(arrival.logprobs)
            if arrival.finish_reason is not None:
                self._done = True
                self._last = arrival
            yield arrival

    def answer(self) -> Answer:
        """Read on to the end and give the whole completion, with what was read before."""
        for _ in self:
            pass
        last = self._last
        if last is None or last.finish_reason is None or last.usage is None:
            raise UsageError("the stream was closed before its end", "read it to the end to get an answer")
        return Answer(
            "".join(self._text),
            last.finish_reason,
            last.usage,
            self._model,
            self._images,
            last.timings,
            tuple(self._logprobs),
        )

    def close(self) -> None:
        """End the request now, if it is not over."""
        if not self._done:
            self._done = True
            self.ticket.cancel()


# Where the seconds of a start went: phases, one after the other, from when the process began.
#
# Knows clocks. Does not know what a phase does: whoever loads names each as it begins. No torch.


PROGRAM = "program"  # Python itself, the command line, and what they import


class Phases:
    """Begins with the process, in ``PROGRAM``."""

    def __init__(self) -> None:
        self._begun = [(PROGRAM, time.perf_counter() - process_age())]
        self._ended: float | None = None

    def begin(self, name: str) -> None:
        """``name`` begins, and what went on before ends. The same name again changes nothing."""
        if self._ended is None and self._begun[-1][0] != name:
            self._begun.append((name, time.perf_counter()))

    def end(self) -> None:
        """All is done, once."""
        if self._ended is None:
            self._ended = time.perf_counter()

    @property
    def loaded(self) -> bool:
        """Whether anything has begun but the program."""
        return len(self._begun) > 1

    @property
    def total(self) -> float:
        """Seconds from the beginning of the process to ``end``, or until now."""
        return self._end() - self._begun[0][1]

    @property
    def seconds(self) -> dict[str, float]:
        """Of each phase, in the order in which they began; one that came twice has both."""
        ends = [*(begun for _, begun in self._begun[1:]), self._end()]
        found: dict[str, float] = {}
        for (name, begun), end in zip(self._begun, ends, strict=True):
            found[name] = found.get(name, 0.0) + end - begun
        return found

    def in_words(self) -> str:
        """``4.2 s: program 0.31, importing torch 1.62, ...``."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"{self.total:.1f} s: {parts}"

    def _end(self) -> float:
        return time.perf_counter() if self._ended is None else self._ended


def process_age(proc: Path = Path("/proc")) -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        words = (proc / "self" / "stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
        began = int(words[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in seconds since boot
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0

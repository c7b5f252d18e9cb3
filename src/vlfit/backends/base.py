"""What every backend offers the floors above: a conversation in, a stream of chunks out.

``native`` (our engine), ``vllm``, ``transformers`` and ``remote`` (any OpenAI endpoint) fill this in. Tasks,
the Python API and the command line speak to ``Backend`` alone; server and batches to ``LocalBackend``, which
splits the work so that nothing blocks an event loop. ``opening.py`` opens any of them.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, runtime_checkable

from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.account import EngineAccount, Rest
from vlfit.engine.answer import Answer, Chunk, ImageSeen
from vlfit.engine.conversation import Conversation, Tool
from vlfit.engine.options import Park
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.checkpoint.any_model import AnyCheckpoint
    from vlfit.plan.actual import Row
    from vlfit.plan.expect import Expectation

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

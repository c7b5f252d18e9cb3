"""The models that this server answers for, and the names that mean them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from vlfit.api.engine_options import SleepLevel
from vlfit.api.pooling import ModelKind
from vlfit.api.stats import SleepResult
from vlfit.backends.base import Backend
from vlfit.checkpoint.gguf.places import name_in_program
from vlfit.errors import UnknownModel, VlfitError
from vlfit.plan.actual import Expectation
from vlfit.server.models.model_line import Hold, State
from vlfit.units import format_bytes

_LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
_PATH_CHARACTERS = ("\\", "~", "..", ":/")
_MAX_NAME = 200  # characters; no longer name is looked up


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests may name.

    ``aliases``: other names for it, such as the one typed on the command line. ``context``: most tokens of
    one request, prompt and output; None: unknown. ``created``: Unix time, in ``/v1/models``.
    """

    backend: Backend
    aliases: tuple[str, ...] = ()
    context: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.backend.model

    @property
    def kind(self) -> ModelKind:
        """What it is made for; ``chat`` if that is not known."""
        return "chat" if self.backend.pooling is None else self.backend.pooling.kind

    def is_called(self, name: str) -> bool:
        """Whether ``name`` means this model: its name, an alias, or another name that the CLI takes for it.

        ``qwen3-vl:4b`` means any weights format of Qwen3-VL-4B-Instruct. ``:latest`` changes nothing.
        """
        known = (self.name, *self.aliases, name_in_program(self.name))
        if name in known:
            return True
        plain = name.removesuffix(_LATEST)
        if plain.lower() in (each.removesuffix(_LATEST).lower() for each in known):
            return True
        return is_plain_name(plain) and _last_word(self.name) in _names_meant(plain)


@dataclass
class Pull:
    """A download: bytes ``done`` of ``total`` (0: not known yet), and its ``error`` once it has failed.

    ``ended`` is set when it has succeeded or failed, at ``ended_at`` (``time.monotonic``; 0.0 before).
    """

    name: str
    done: int = 0
    total: int = 0
    error: VlfitError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ended_at: float = 0.0

    def in_words(self) -> str:
        """How far it is, such as "1.2 of 4.5 GiB"."""
        if not self.total:
            return "just begun"
        return f"{format_bytes(self.done)} of {format_bytes(self.total)}"


class ServedModels:
    """All models of a server, each in memory or asleep by itself; the first is the default.

    Requests prepare after ``load`` and generate within ``acquire``. Belongs to one event loop.
    """

    def __init__(self, *models: ServedModel) -> None:
        self.all = models
        self._last_used = time.monotonic()  # when a request for a completion ended

    def find(self, name: str | None, kind: ModelKind = "chat") -> ServedModel:
        """The model that ``name`` means; for None and empty the first that is made for ``kind``, else the
        first.

        Raises ``UnknownModel``. Call it on the event loop: it may begin a download.
        """
        model = self.get(name, kind)
        if model is None:
            raise self._unknown(name or "")
        return model

    def get(self, name: str | None, kind: ModelKind = "chat") -> ServedModel | None:
        """The model that ``name`` means, as ``find``; None if it is not served."""
        if not name:
            return next((model for model in self.all if model.kind == kind), self.all[0])
        exact = (model for model in self.all if name in (model.name, *model.aliases))
        meant = (model for model in self.all if model.is_called(name))
        return next(exact, None) or next(meant, None)

    def _unknown(self, name: str) -> VlfitError:
        """The error of a request for a model that is not served."""
        served = ", ".join(repr(model.name) for model in self.all)
        return UnknownModel(
            f"the model {name[:_MAX_NAME]!r} is not served here",
            f"This server serves {served}.",
            param="model",
        )

    @property
    def downloads(self) -> bool:
        """Whether requests may download models of the catalog (``--pull``)."""
        return False

    def pull(self, name: str) -> Pull | None:
        """The download of the model ``name``, begun now or before; None if it is served already.

        Raises ``UnknownModel`` if this server downloads nothing, or no model of that name.
        """
        self.find(name)
        return None

    async def load(self, model: ServedModel) -> None:
        """Wait until requests for ``model`` can be prepared. It may sleep. Raises what loading raises."""

    @asynccontextmanager
    async def acquire(self, model: ServedModel, completions: int) -> AsyncIterator[Hold]:
        """Wait until ``model`` is in memory, and keep it there for the length of the block.

        It may go earlier, once ``Hold.release_one`` was called for each of the ``completions``. Raises
        ``CannotWake`` and what else waking raises.
        """
        if model.backend.asleep:
            # The request itself would wake it too, but here a failure becomes a status of its own (503).
            await asyncio.wrap_future(model.backend.wake())
        yield Hold(_nothing, completions)

    async def sleep(self, model: ServedModel, level: SleepLevel = "auto") -> SleepResult:
        """Put ``model`` to sleep once its requests are answered. Cancelling withdraws that."""
        return await asyncio.wrap_future(model.backend.sleep(level))

    async def wake(self, model: ServedModel) -> SleepResult:
        """Bring ``model`` into memory without a request. Raises as ``acquire``."""
        return await asyncio.wrap_future(model.backend.wake())

    def state(self, model: ServedModel) -> State:
        """``ready``, ``sleeping``, or, of several models, ``unloaded`` or ``loading``."""
        return "sleeping" if model.backend.asleep else "ready"

    def request_ended(self) -> None:
        """Note that a request for a completion is over, however it ended."""
        self._last_used = time.monotonic()

    def idle_seconds(self, model: ServedModel) -> float:
        """Seconds since a request for ``model`` ended."""
        return time.monotonic() - self._last_used

    def in_use(self, model: ServedModel, admitted: int) -> bool:
        """Whether requests for ``model`` run or wait. ``admitted``: completions of all models that do."""
        return admitted > 0

    def expectation(self, model: ServedModel) -> Expectation | None:
        """The plan of one of several models; None for the only one, whose plan is in the settings."""
        return None

    def idle_sleep(self, model: ServedModel) -> float | None:
        """Seconds without a request after which ``model`` sleeps (``--idle-sleep``); None: never."""
        options = getattr(getattr(model.backend, "engine", None), "options", None)
        seconds: float | None = getattr(options, "idle_sleep", None)
        return seconds

    def facts(self) -> dict[str, Any]:
        """What the status says of several models; empty for one, of which all the status speaks."""
        return {}


def _nothing() -> None:
    """A model that is always there needs no release."""


def _last_word(name: str) -> str:
    """``name`` without its owner and revision, in lower case."""
    return name.rpartition("/")[2].partition("@")[0].lower()


def is_plain_name(name: str) -> bool:
    """Whether ``name`` cannot be a file path, so that looking it up tells clients nothing about the disk.

    ``org/name`` is plain; empty, unprintable and very long names are not.
    """
    return (
        0 < len(name) <= _MAX_NAME
        and name.isprintable()
        and name.count("/") <= 1
        and not name.startswith((".", "/"))
        and not any(each in name for each in _PATH_CHARACTERS)
    )


@lru_cache(maxsize=256)
def _names_meant(name: str) -> frozenset[str]:
    """Last words of the checkpoints that ``name`` means, by the catalog and what is on this computer."""
    from vlfit.checkpoint.source import resolve_name

    try:
        return frozenset(_last_word(each.name) for each in resolve_name(name))
    except VlfitError:
        return frozenset()

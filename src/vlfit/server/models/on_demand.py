"""A backend whose model is loaded at the first request for it, and comes and goes as the line says."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions, SleepLevel
from vlfit.api.outputs import Listener
from vlfit.api.pooling import PoolingParams
from vlfit.api.progress import LoadProgress
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import EngineAccount, EngineSettings, KVPool, MemoryUsage, SleepResult, SleepState
from vlfit.backends.base import Backend, Capabilities, Prepared, Ticket
from vlfit.checkpoint.pooling_files import read_pooling
from vlfit.checkpoint.processor_files import GenerationDefaults
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import EngineStopped
from vlfit.models.registry import tool_call_syntax
from vlfit.plan.actual import Expectation
from vlfit.plan.ledger import DEFAULT_CONTEXT
from vlfit.server.http.threads import DaemonThreadPool
from vlfit.server.models.model_line import State

_NEVER_LOADED = SleepState("files", 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class OnDemandModel:
    """What is needed to load a model later, and what is known of it before.

    ``planned_bytes``: that it will take of the device, by its plan, without what all models share (the CUDA
    context). ``expectation``: makes the plan of the loaded model, from its backend.
    """

    checkpoint: Checkpoint
    options: EngineOptions
    planned_bytes: int
    open: Callable[[LoadProgress], Backend]
    expectation: Callable[[Backend], Expectation] = lambda _: Expectation()


class OnDemandBackend(Backend):
    """The backend of an ``OnDemandModel``: what its checkpoint says at once, all else once it is loaded.

    Until then it looks like one that sleeps, with its weights in files. ``prepare`` and ``start`` need a
    loaded model, ``start`` one that is awake: ``ModelLine`` sees to that. ``loading``: what is being done,
    and the share of it that is done; None while nothing is.
    """

    kind = "native"

    def __init__(self, model: OnDemandModel, device: str) -> None:
        text = model.checkpoint.config.text
        self._model = model
        self._loaded: Backend | None = None
        self._expectation = Expectation()
        self._thread = DaemonThreadPool(1)
        self._sampling: SamplingParams | None = None
        self._closed = False
        self._built_at = time.perf_counter()
        self.model = model.checkpoint.name
        self.checkpoint = model.checkpoint
        self.device = device
        self.context = model.options.max_model_len or min(DEFAULT_CONTEXT, text.default_context)
        self.tool_calls = tool_call_syntax(model.checkpoint.model_type)
        checkpoint = model.checkpoint
        self.pooling = read_pooling(checkpoint.folder, checkpoint.name, checkpoint.config)
        self.capabilities = Capabilities(
            account=True,
            sleep=True,
            plan=True,
            generates=self.pooling.kind == "chat",
            embeds=self.pooling.kind != "reranker",
            scores=self.pooling.kind == "reranker",
        )
        self.loading: tuple[str, float] | None = None

    # --- as the line sees it ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The model's name, as in ``/v1/models``."""
        return self.model

    @property
    def state(self) -> State:
        """``ready``, ``sleeping`` or, if it was never loaded, ``unloaded``."""
        if self._loaded is None:
            return "unloaded"
        return "sleeping" if self._loaded.asleep else "ready"

    async def bring_up(self) -> None:
        """Load the model, or wake it. Raises what that raises, and ``EngineStopped`` after ``close``."""
        if self._loaded is None:
            try:
                await self._thread.run(self._load)
            finally:
                self.loading = None
        elif self._loaded.asleep:
            self.loading = ("waking", 0.0)
            try:
                await asyncio.wrap_future(self._loaded.wake())
            finally:
                self.loading = None

    async def put_down(self, level: SleepLevel) -> SleepResult:
        """Put the model to sleep; one that was never loaded stays as it is."""
        if self._loaded is None:
            return SleepResult(_NEVER_LOADED, False, 0.0)
        return await asyncio.wrap_future(self._loaded.sleep(level))

    @property
    def needed_bytes(self) -> int:
        """Bytes of the device that it takes when it is in memory: as before its sleep, or as planned."""
        asleep = self._loaded.account().asleep if self._loaded is not None else None
        return asleep.freed_bytes if asleep is not None else self._model.planned_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of RAM that its weights take while it sleeps there: those that are on the device now."""
        return sum(self.account().memory.weights.values())

    def _load(self) -> None:
        def report(what: str, share: float) -> None:
            if self._closed:
                raise _stopped_error()
            self.loading = (what, share)

        report("opening", 0.0)
        loaded = self._model.open(report)
        if self._closed:
            loaded.close()
            raise _stopped_error()
        self.adopt(loaded)

    def adopt(self, loaded: Backend) -> None:
        """Take ``loaded``, an awake backend of the same checkpoint, as the loaded model."""
        self._expectation = self._model.expectation(loaded)
        self.context, self.device = loaded.context, loaded.device
        self.tool_calls, self.pooling = loaded.tool_calls, loaded.pooling
        self.capabilities = replace(loaded.capabilities, plan=True)
        self._loaded = loaded

    # --- as a backend ----------------------------------------------------------------------------------

    def _ready(self) -> Backend:
        if self._loaded is None:  # the line brings models up before their requests come here
            raise EngineStopped(f"{self.model} is not loaded", "Try again.")
        return self._loaded

    def default_sampling(self) -> SamplingParams:
        """The checkpoint's own generation settings."""
        if self._sampling is None:
            self._sampling = SamplingParams.from_defaults(GenerationDefaults.read(self.checkpoint.folder))
        return self._sampling

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Prepared:
        """As ``Backend.prepare``; the model may sleep. Raises ``EngineStopped`` if it was never loaded."""
        return self._ready().prepare(conversation, sampling, tools)

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Prepared:
        """As ``Backend.prepare_text``; the model may sleep. ``EngineStopped`` if it was never loaded."""
        return self._ready().prepare_text(prompt, sampling)

    def prepare_pooled(self, prompt: Conversation | tuple[int, ...], pooling: PoolingParams) -> Prepared:
        """As ``Backend.prepare_pooled``; the model may sleep. ``EngineStopped`` if it was never loaded."""
        return self._ready().prepare_pooled(prompt, pooling)

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        """As ``Backend.start``; the caller holds the model in the line."""
        return self._ready().start(prepared, sampling, listener)

    def account(self) -> EngineAccount:
        """Counters, settings and memory; of a model that was never loaded those of one that sleeps."""
        return self._loaded.account() if self._loaded is not None else self._account_before()

    @property
    def expectation(self) -> Expectation:
        """The plan of the loaded model; without lines before that."""
        return self._expectation

    @property
    def asleep(self) -> bool:
        """Whether it is not in memory: asleep, or never loaded."""
        return self.state != "ready"

    def sleep(self, level: SleepLevel = "auto") -> "Future[SleepResult]":
        """Put the model to sleep without regard to the line, whose ``sleep`` is what requests use."""
        return self._ready().sleep(level)

    def wake(self) -> "Future[SleepResult]":
        """Wake the model without regard to the line, whose ``wake`` is what requests use."""
        return self._ready().wake()

    def close(self) -> None:
        """Close the loaded model; one that is being loaded is closed as soon as that ends."""
        self._closed = True
        if self._loaded is not None:
            self._loaded.close()

    def _account_before(self) -> EngineAccount:
        options = self._model.options
        settings = EngineSettings(
            device=self.device,
            gpu_uuid="",
            dtype=options.dtype,
            value_bytes=2,
            context=self.context or 0,
            image_tokens=options.image_tokens or 0,
            sequences=options.max_num_seqs,
            chunk=options.max_num_batched_tokens,
            kv_tokens=0,
            speculate=options.speculate is not False,
        )
        return EngineAccount(
            time.perf_counter() - self._built_at,
            settings,
            running=0,
            waiting=0,
            pool=KVPool(0, 0, options.block_size),
            memory=MemoryUsage({}, 0, 0, 0),
            asleep=_NEVER_LOADED,
        )


def _stopped_error() -> EngineStopped:
    return EngineStopped("the server is stopping", "Try again when it is back.")

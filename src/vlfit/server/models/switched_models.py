"""Several models by name, of which as many are in memory as fit."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from vlfit.api.engine_options import SleepLevel
from vlfit.api.stats import SleepResult
from vlfit.errors import VlfitError
from vlfit.machine.gpu import gpu_of_device, read_gpus
from vlfit.machine.host import read_host
from vlfit.plan.actual import Expectation
from vlfit.plan.calibration import RESERVE
from vlfit.plan.native.ram import RAM_RESERVE
from vlfit.server.models.model_line import IDLE_GRACE, MIN_STAY, Hold, ModelLine, State, Switchable
from vlfit.server.models.on_demand import OnDemandBackend
from vlfit.server.models.pulls import Pulls, downloading_error
from vlfit.server.models.served_models import Pull, ServedModel, ServedModels


def free_bytes(device: str, uuid: str = "") -> int | None:
    """Bytes of ``device`` that no process holds; of RAM for ``cpu``. None: NVML does not list the GPU.

    ``uuid``: of the GPU; "" if torch does not report it.
    """
    if device == "cpu":
        return read_host().ram_available
    gpu = gpu_of_device(read_gpus()[0], uuid, device)
    return None if gpu is None else gpu.free


log = logging.getLogger("vlfit.server")


class SwitchedModels(ServedModels):
    """Models that share a device, brought into memory by ``line`` when requests ask for them.

    All of ``models`` have an ``OnDemandBackend``, and names that differ. ``free``: returns the bytes of the
    device that are free now (``free_bytes``). ``min_stay``, ``idle_grace``, ``idle_sleep``: as in
    ``ModelLine``. ``pulls``: downloads of other models; None: none are made.
    """

    def __init__(
        self,
        models: Sequence[tuple[ServedModel, OnDemandBackend]],
        free: Callable[[], int | None],
        *,
        min_stay: float = MIN_STAY,
        idle_grace: float = IDLE_GRACE,
        idle_sleep: float | None = None,
    ) -> None:
        super().__init__(*(model for model, _ in models))
        self._backends = {backend.model: backend for _, backend in models}
        self._free = free
        self.pulls: Pulls | None = None
        self._idle_sleep = idle_sleep
        self.line = ModelLine(
            map(_Member, self._backends.values(), [self] * len(models)),
            self._fits,
            min_stay=min_stay,
            idle_grace=idle_grace,
            idle_sleep=idle_sleep,
        )

    def add(self, model: ServedModel, backend: OnDemandBackend) -> None:
        """Serve another model, the last of the list. Does nothing if it is served already."""
        if backend.model not in self._backends:
            self._backends[backend.model] = backend
            self.line.add(_Member(backend, self))
            self.all = (*self.all, model)

    def _unknown(self, name: str) -> VlfitError:
        """404; or, with ``pulls``, the error of a download that begins now."""
        pull = self.pulls.start(name) if self.pulls is not None else None
        return super()._unknown(name) if pull is None else downloading_error(pull)

    @property
    def downloads(self) -> bool:
        """Whether requests may download models of the catalog (``--pull``)."""
        return self.pulls is not None

    def pull(self, name: str) -> Pull | None:
        """The download of the model ``name``; None if it is served. Raises as ``ServedModels.pull``."""
        if self.get(name) is None and self.pulls is not None:
            pull = self.pulls.start(name)
            if pull is not None:
                return pull
        return super().pull(name)

    async def load(self, model: ServedModel) -> None:
        """Wait until ``model`` was loaded once, in its turn. It may sleep, or go again at once."""
        if self._backends[model.name].state == "unloaded":
            (await self.line.acquire(model.name)).close()

    @asynccontextmanager
    async def acquire(self, model: ServedModel, completions: int) -> AsyncIterator[Hold]:
        """Wait in line until ``model`` is in memory, as ``ServedModels.acquire``."""
        hold = await self.line.acquire(model.name, completions)
        try:
            yield hold
        finally:
            hold.close()

    async def sleep(self, model: ServedModel, level: SleepLevel = "auto") -> SleepResult:
        """Put ``model`` to sleep once its requests are answered; later ones bring it back in their turn."""
        return await self.line.sleep(model.name, level)

    async def wake(self, model: ServedModel) -> SleepResult:
        """Bring ``model`` into memory in its turn; others may have to sleep for that."""
        return await self.line.wake(model.name)

    def state(self, model: ServedModel) -> State:
        """``unloaded``, ``loading`` (also: waking), ``ready`` or ``sleeping``."""
        return self.line.state(model.name)

    def idle_seconds(self, model: ServedModel) -> float:
        """Seconds since a request for ``model`` ended; 0 while one runs."""
        return self.line.idle_seconds(model.name)

    def in_use(self, model: ServedModel, admitted: int) -> bool:
        """Whether requests for ``model`` run or wait in line."""
        return self.line.in_use(model.name) > 0

    def expectation(self, model: ServedModel) -> Expectation | None:
        """The plan of ``model``; without lines if it was never loaded."""
        return self._backends[model.name].expectation

    def idle_sleep(self, model: ServedModel) -> float | None:
        """Seconds without a request after which each model sleeps; None: only if its memory is needed."""
        return self._idle_sleep

    @property
    def backends(self) -> list[OnDemandBackend]:
        """The backends of all models, in their order."""
        return list(self._backends.values())

    @property
    def in_memory(self) -> list[OnDemandBackend]:
        """Those whose model is in memory now, the one used last first."""
        ready = [each for each in self._backends.values() if each.state == "ready"]
        return sorted(ready, key=lambda each: self.line.idle_seconds(each.model))

    def facts(self) -> dict[str, Any]:
        """``models`` (``rows``) and ``model_changes`` of the status; waits for nothing."""
        line = self.line
        changes = {"count": line.num_changes, "last_s": round(line.last_change_seconds, 3)}
        return {"models": self.rows(), "model_changes": changes}

    def rows(self) -> list[dict[str, Any]]:
        """One row a model: name, ``state``, requests, and bytes of the device and of RAM.

        ``planned``: bytes that it takes of the device when in memory. ``held``: bytes of weights and KV cache
        there now. ``ram``: bytes of its weights that wait in RAM. ``loading``: what is being done, and how
        much of it is done; null while nothing is.
        """
        return [self._row(model.name, self._backends[model.name]) for model in self.all]

    def _row(self, name: str, backend: OnDemandBackend) -> dict[str, Any]:
        account, line = backend.account(), self.line
        memory, loading = account.memory, backend.loading
        counters = account.counters
        return {
            "model": name,
            "state": line.state(name),
            "context": backend.context,
            "running": account.running,
            "waiting": account.waiting + line.waiting(name),
            "idle_s": round(line.idle_seconds(name), 3),
            "requests": counters.finished,
            "tokens": counters.tokens,
            "planned": backend.needed_bytes,
            "held": 0
            if account.asleep
            else sum(memory.weights.values()) + memory.kv_cache + memory.state_cache,
            "ram": account.asleep.ram_bytes if account.asleep else 0,
            "loading": None if loading is None else {"what": loading[0], "share": round(loading[1], 3)},
        }

    async def _fits(self, model: Switchable, others: Sequence[Switchable]) -> bool:
        """Whether ``model`` fits beside those in memory, by its plan and what is free now.

        On a card whose free memory is not known, one model is in memory at a time.
        """
        backend = self._backends[model.name]
        free = await asyncio.to_thread(self._free)
        reserve = RAM_RESERVE if backend.device == "cpu" else RESERVE.bytes
        return free is not None and backend.needed_bytes + reserve <= free

    async def make_ram_room(self, backend: OnDemandBackend) -> None:
        """Free RAM for the weights of ``backend``, about to sleep: what slept longest moves to files."""
        if backend.device == "cpu":
            return
        asleep = [
            each
            for each in self._backends.values()
            if each is not backend and each.state == "sleeping" and self._ram_of(each)
        ]
        for each in sorted(asleep, key=lambda other: self.line.idle_seconds(other.model), reverse=True):
            if backend.weight_bytes + RAM_RESERVE <= (await asyncio.to_thread(read_host)).ram_available:
                return
            await each.put_down("files")

    @staticmethod
    def _ram_of(backend: OnDemandBackend) -> int:
        asleep = backend.account().asleep
        return asleep.ram_bytes if asleep else 0


class _Member:
    """A backend as the line sees it: before it sleeps, there is room for it in RAM."""

    def __init__(self, backend: OnDemandBackend, models: SwitchedModels) -> None:
        self._backend = backend
        self._models = models

    @property
    def name(self) -> str:
        return self._backend.model

    @property
    def state(self) -> State:
        return self._backend.state

    async def bring_up(self) -> None:
        await self._backend.bring_up()

    async def put_down(self, level: SleepLevel) -> SleepResult:
        if level == "auto" and self._backend.state == "ready":
            await self._models.make_ram_room(self._backend)
        result = await self._backend.put_down(level)
        if result.changed:
            log.info("%s sleeps", self._backend.model)
        return result

"""All models of a server as one backend: for its status, metrics, ledger and sleep."""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import fields, replace

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import SleepLevel
from vlfit.api.outputs import Listener
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import Counters, EngineAccount, KVPool, SleepResult, SleepState
from vlfit.backends.base import Backend, Capabilities, Prepared, Ticket
from vlfit.plan.actual import Expectation
from vlfit.plan.native.model_set import merge_expectations
from vlfit.server.models.on_demand import OnDemandBackend
from vlfit.server.models.switched_models import SwitchedModels


class AllModels(Backend):
    """``models`` as one backend. Counters are sums over all models, settings those of the one used last.

    Requests go to the models' own backends: ``prepare`` and ``start`` raise ``NotImplementedError``.
    """

    kind = "native"
    capabilities = Capabilities(account=True, sleep=True, plan=True)

    def __init__(self, models: SwitchedModels) -> None:
        self.models = models
        default = models.all[0].backend
        self.model, self.context, self.device = default.model, default.context, default.device
        self.checkpoint = default.checkpoint

    def default_sampling(self) -> SamplingParams:
        """Those of the default model."""
        return self.models.all[0].backend.default_sampling()

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Prepared:
        """Not implemented: requests are prepared by the backend of their model."""
        raise NotImplementedError

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Prepared:
        """Not implemented, as ``prepare``."""
        raise NotImplementedError

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        """Not implemented, as ``prepare``."""
        raise NotImplementedError

    def account(self) -> EngineAccount:
        """The accounts of all models in one; asleep if none is in memory."""
        accounts = {each.model: each.account() for each in self.models.backends}
        last = self._last_used()
        return merge_accounts(accounts[last.model], accounts.values())

    @property
    def expectation(self) -> Expectation:
        """The plans of all models in memory in one; of the one used last, if none is."""
        present = self.models.in_memory or [self._last_used()]
        return merge_expectations([each.expectation for each in present])

    @property
    def asleep(self) -> bool:
        """Whether no model is in memory."""
        return not self.models.in_memory

    def sleep(self, level: SleepLevel = "auto") -> "Future[SleepResult]":
        """Not implemented: ``SwitchedModels.sleep`` takes one model at a time."""
        raise NotImplementedError

    def close(self) -> None:
        """Fail the requests in line, and close all models."""
        self.models.line.close()
        for each in self.models.backends:
            each.close()

    def _last_used(self) -> OnDemandBackend:
        line = self.models.line
        loaded = [each for each in self.models.backends if each.state != "unloaded"]
        present = self.models.in_memory
        if present:
            return present[0]
        return min(loaded or self.models.backends[:1], key=lambda each: line.idle_seconds(each.model))


def merge_accounts(shown: EngineAccount, accounts: Iterable[EngineAccount]) -> EngineAccount:
    """``accounts`` of one process in one: sums, with the settings and the age of ``shown``.

    What the process has in all (resident RAM, torch's pool) is that of ``shown``; the RAM before weights were
    loaded is the least of all.
    """
    every = list(accounts)
    awake = [each for each in every if each.asleep is None]
    counters = Counters(
        **{name.name: sum(getattr(each.counters, name.name) for each in every) for name in fields(Counters)}
    )
    sizes = {name.name: sum(getattr(each.pool, name.name) for each in every) for name in fields(KVPool)}
    weights: dict[str, int] = dict.fromkeys(shown.memory.weights, 0)
    for each in every:
        for line, size in each.memory.weights.items():
            weights[line] = weights.get(line, 0) + size
    before = [each.memory.resident_before for each in every if each.memory.resident_before is not None]
    memory = replace(
        shown.memory,
        weights=weights,
        resident_before=min(before, default=None),
        **{name: sum(getattr(each.memory, name) for each in every) for name in _SUMMED},
    )
    return replace(
        shown,
        seconds=max(each.seconds for each in every),
        running=sum(each.running for each in every),
        waiting=sum(each.waiting for each in every),
        pool=replace(KVPool(**sizes), block_size=shown.pool.block_size),
        memory=memory,
        counters=counters,
        num_preemptions=sum(each.num_preemptions for each in every),
        asleep=None if awake else _merge_sleeps(every),
    )


_SUMMED = (
    *("kv_cache", "state_cache", "state_snapshots", "state_snapshots_limit", "device_snapshots"),
    *("image_cache", "image_cache_limit", "cuda_graphs"),
)


def _merge_sleeps(accounts: list[EngineAccount]) -> SleepState:
    asleep = [each.asleep for each in accounts if each.asleep is not None]
    in_ram = any(each.level == "ram" for each in asleep)
    return SleepState(
        "ram" if in_ram else "files",
        sum(each.ram_bytes for each in asleep),
        sum(each.freed_bytes for each in asleep),
        sum(each.seconds for each in asleep),
    )

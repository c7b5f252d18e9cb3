"""vLLM as a backend: planned, started below this process, and spoken to as to any OpenAI server.

Knows: the order in which a vLLM is found, planned for, started and left, and what to say when it dies while
it serves. Does not know how requests are written (``backends/remote.py``), what is planned (``planning.py``)
or what a failure means (``attempts.py``).
"""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Listener, Prepared, QueuedStream, Ticket
from vlfit.backends.remote import AT_ONCE, RemoteBackend
from vlfit.backends.vllm import attempts
from vlfit.backends.vllm.attempts import Attempts, Serving
from vlfit.backends.vllm.installed import find
from vlfit.backends.vllm.planning import Planned, plan_start
from vlfit.backends.vllm.serve_command import Diagnosis, VllmOptions, follows_grammars, loopback
from vlfit.backends.vllm.starting import Told, free_port
from vlfit.checkpoint.processor_files import GenerationDefaults
from vlfit.checkpoint.source import Checkpoint, locate
from vlfit.errors import EngineLost, RemoteError, ServerUnreachable, UsageError
from vlfit.machine.model import Gpu, Machine
from vlfit.machine.survey import survey
from vlfit.plan.actual import Expectation, Row
from vlfit.plan.ledger import Line
from vlfit.plan.search import Plan
from vlfit.plan.vllm import cost as costs
from vlfit.plan.vllm import starts
from vlfit.plan.vllm.starts import Began
from vlfit.plan.vllm.step_down import Failure
from vlfit.units import GIB

# What was planned beside what vLLM says it holds, and the same kept for the next plan.
#
# Knows: which of vLLM's numbers stands for which lines of the ledger, as it tells fewer than the ledger
# has. Does not know how they were read (``backends/vllm/starting.py``) or are shown.


_MOST_CONTEXT = 8 * GIB  # more than that others took in the meantime
_TWO_DIGITS = 0.01 * GIB
_TOGETHER = {
    "weights": ("weights.text", "weights.vision", "weights.embedding"),
    "workspace": ("vision_workspace", "text_workspace"),
}


def rows_of(plan: Plan, told: Told, process: int | None) -> tuple[Row, ...]:
    """Lines planned and held, in the order of the ledger; weights are one line, and so are workspaces.

    ``process``: bytes that the card lost from before the start until it served, None if that is not known.
    """
    planned = {line.line: line for line in plan.ledger}
    # vLLM counts with the weights what it makes beside them when it loads: positions, rows for pictures.
    made = 0 if told.weights is None else costs.made_with_weights(plan.model, plan.settings)
    moved = {"weights": made, "workspace": -made}
    held = {
        "weights": told.weights,
        "kv_cache": _cache(plan, told),
        "workspace": told.peak,
        "graphs": told.graph_pool,
        "context": _context(plan.gpu, told, with_libraries=True),
    }
    found = []
    for name in _order(plan.ledger):
        parts = [planned[part] for part in _TOGETHER.get(name, (name,)) if part in planned]
        if name == "reserve":
            continue
        how = parts[0].how
        remark = _REMARKS.get(name, "") if held.get(name) is not None else ""
        if name == "growth" and process is not None:
            remark = "not yet: it comes with the first requests"
        found.append(
            Row(
                name,
                sum(part.bytes for part in parts) + moved.get(name, 0),
                held.get(name),
                how,
                "; ".join(_notes(parts)),
                remark,
            )
        )
    return tuple(found)


_REMARKS = {
    "kv_cache": "given in bytes; vLLM prints two digits of GiB",
    "weights": "vLLM's own account of text model, tower, table of tokens and table of positions together",
    "workspace": "the peak of vLLM's trial run",
    "context": "from free memory before the start and at vLLM's first look, and its libraries",
}


def keep(plan: Plan, told: Told, process: int | None) -> Path | None:
    """Keep what this start held, for the next plan; the file, None if nothing was told, or none can be
    written. build for processors tells too little to be worth it.
    """
    settings = plan.settings
    if settings.vllm.in_ram or (told.weights is None and told.graph_pool is None):
        return None
    began = Began(
        date=time.strftime("%Y-%m-%dT%H:%M:%S"),
        context=settings.context,
        image_tokens=settings.image_tokens,
        sequences=settings.sequences,
        chunk=settings.chunk,
        graphs=settings.graphs,
        kv_dtype=settings.kv_dtype,
        weights=told.weights,
        peak=told.peak,
        beside=told.apart,
        graph_pool=told.graph_pool,
        kv_cache=told.kv_cache,
        own_context=_context(plan.gpu, told, with_libraries=False),
        process=process,
    )
    with contextlib.suppress(UsageError):
        place = starts.place_of(plan.model, settings)
        return starts.keep(plan.gpu.name, settings.vllm.version, place, began)
    return None


def lost_since(plan: Plan, now: Machine) -> int | None:
    """Bytes of the plan's card that were free when it was made and are not any more; None without a card."""
    if plan.settings.vllm.in_ram:
        return None
    same = (gpu for gpu in now.gpus if (gpu.index, gpu.uuid) == (plan.gpu.index, plan.gpu.uuid))
    gpu = next(same, None)
    return None if gpu is None else max(plan.gpu.free - gpu.free, 0)


def _context(gpu: Gpu, told: Told, *, with_libraries: bool) -> int | None:
    """What the card lost before vLLM's first look; a number that others have spoilt is none."""
    if told.free is None:
        return None
    own = gpu.free - told.free
    if not 0 < own < _MOST_CONTEXT:
        return None
    return own + (told.apart or 0) if with_libraries else own


def _cache(plan: Plan, told: Told) -> int | None:
    """The bytes that were given, where vLLM says as many: it prints two digits of GiB."""
    given = next(line.bytes for line in plan.ledger if line.line == "kv_cache")
    if told.kv_cache is None or abs(told.kv_cache - given) > _TWO_DIGITS:
        return told.kv_cache
    return given


def _order(ledger: tuple[Line, ...]) -> list[str]:
    names = {part: name for name, parts in _TOGETHER.items() for part in parts}
    return list(dict.fromkeys(names.get(line.line, line.line) for line in ledger))


def _notes(parts: list[Line]) -> list[str]:
    return [part.note for part in parts] if len(parts) == 1 else []


Progress = Callable[[str, float], None]
_LATE_SECONDS = 3.0  # for a process to be seen to have died, once its connection has broken off
_LAST_WORDS_SECONDS = 0.3  # for what is on its way from an engine that has died
_TOLD = "what is held is what vLLM said at its start: it runs in a process of its own"

logger = logging.getLogger("vlfit")


class VllmBackend:
    """Build with ``load``. Close it (or use it in a ``with`` block) to end vLLM and all that it started."""

    kind = "vllm"
    closing_seconds = 15.0  # what stopping may take: vLLM ends in order in four, and is killed in fourteen

    def __init__(
        self,
        serving: Serving,
        name: str,
        folder: Path,
        vllm: VllmOptions,
        max_tokens: int | None = None,
    ) -> None:
        self._serving, self._vllm, self._folder = serving, vllm, folder
        self.model = name
        self._why: EngineLost | None = None
        self._dead = False
        self._listeners: list[Callable[[Exception], None]] = []
        self._closed = False
        self._lock = threading.Lock()
        self.lost_memory = lost_since(serving.plan, survey())
        keep(serving.plan, serving.started.told, self.lost_memory)
        front = serving.front
        try:
            self._remote = RemoteBackend(
                f"http://{front.host}:{front.port}",
                front.key,
                name,
                context=self.context,
                max_tokens=max_tokens,
                at_once=max(AT_ONCE, 2 * self.sequences),
                serves=True,
                grammars=follows_grammars(serving.started.command.words),
            )
        except BaseException:
            serving.started.guarded.stop()
            raise
        atexit.register(self.close)
        started = serving.started
        for ends in (started.guarded.wait, started.engine_died.wait):
            threading.Thread(target=self._watch, args=(ends,), name="vllm-watch", daemon=True).start()

    @classmethod
    def load(
        cls,
        model: str | Path | Checkpoint,
        options: EngineOptions | None = None,
        vllm: VllmOptions | None = None,
        progress: Progress | None = None,
    ) -> "VllmBackend":
        """Find vLLM, plan for it, start it, and go on with cheaper plans until one serves.

        Raises ``UsageError`` where there is no vLLM, ``DoesNotFit`` where no plan fits, ``VllmFailed`` with
        the cause, and what opening a checkpoint raises. If it is interrupted nothing is left behind.
        """
        vllm = vllm or VllmOptions()
        options = options or EngineOptions()
        planned = plan_start(model, options, vllm, find(vllm.python), survey())
        for words in planned.said:
            (vllm.tell or logger.warning)(words)
        return cls.launch(planned, vllm, progress, max_tokens=options.max_tokens)

    @classmethod
    def launch(
        cls,
        planned: Planned,
        vllm: VllmOptions,
        progress: Progress | None = None,
        *,
        max_tokens: int | None = None,
    ) -> "VllmBackend":
        """The same for what was planned and told before. ``max_tokens``: of an answer whose request names no
        limit.
        """
        name, folder = locate(planned.plan.model.place or planned.plan.model.name)
        tries = Attempts(
            planned,
            lambda: loopback(name, free_port()),
            str(folder),
            vllm.retry,
            vllm.read_failure,
            vllm.tell or logger.warning,
            progress or (lambda what, share: None),
        )
        return cls(tries.run(), name, folder, vllm, max_tokens)

    @property
    def plan(self) -> Plan:
        """The plan that serves, which need not be the first that was tried."""
        return self._serving.plan

    @property
    def serving(self) -> Serving:
        return self._serving

    @property
    def context(self) -> int:
        """Most tokens of one request, prompt and completion."""
        return self.plan.settings.context

    @property
    def sequences(self) -> int:
        """Requests that run at once; more wait in vLLM."""
        return self.plan.settings.sequences * self.plan.settings.vllm.data

    @property
    def device(self) -> str:
        return "cpu" if self.plan.settings.vllm.in_ram else f"cuda:{self.plan.gpu.index}"

    @property
    def log(self) -> Path:
        """All that vLLM says."""
        return self._serving.started.log.path

    @property
    def expectation(self) -> Expectation:
        """The plan's lines. How long a step takes nobody tells: vLLM's are its own."""
        return Expectation(self.plan.ledger, why_not=_TOLD)

    def rows(self) -> tuple[Row, ...]:
        """The plan's ledger beside what vLLM said it holds."""
        return rows_of(self.plan, self._serving.started.told, self.lost_memory)

    def default_sampling(self) -> SamplingParams:
        """The checkpoint's own settings, as its files have them."""
        return SamplingParams.usual(GenerationDefaults.read(self._folder))

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Prepared:
        self._check()
        return self._remote.prepare(conversation, sampling, tools)

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Prepared:
        self._check()
        return self._remote.prepare_text(prompt, sampling)

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        """As ``RemoteBackend``. A request that ends as vLLM dies gets ``EngineLost``, with the cause."""
        self._check()

        def hear(arrival: Chunk | Exception) -> None:
            if _may_be_death(arrival):
                # The thread of connections has others to serve while this one is looked into.
                threading.Thread(target=self._explain, args=(arrival, listener), daemon=True).start()
            else:
                listener(arrival)

        return self._remote.start(prepared, sampling, hear)

    def stream(self, conversation: Conversation, sampling: SamplingParams) -> QueuedStream:
        return QueuedStream(self, self.prepare(conversation, sampling), sampling)

    def when_lost(self, tell: Callable[[Exception], None]) -> None:
        """Call ``tell``, in a thread, once vLLM has ended without having been told to."""
        with self._lock:
            why = self._why
            if why is None:
                self._listeners.append(tell)
        if why is not None:
            tell(why)

    def close(self) -> None:
        """End vLLM and all that it started; come back when nothing of it is left."""
        atexit.unregister(self.close)
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._remember()
            with contextlib.suppress(Exception):  # what is to be ended must not fail for a connection
                self._remote.close()
        self._serving.started.guarded.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        """Raises ``EngineLost`` once vLLM is gone."""
        if self._why is not None:
            raise self._why

    def _watch(self, ends: Callable[[None], object]) -> None:
        """Until vLLM has ended, or its engine has: its server then ends some seconds later."""
        ends(None)
        self._serving.started.guarded.wait(_LAST_WORDS_SECONDS)
        with self._lock:
            if self._closed or self._dead:
                return
            self._dead = True
        failure, diagnosis = attempts.read(self._serving.started, self._vllm.read_failure)
        if self._vllm.died is not None:
            self._vllm.died(self.plan, failure)
        why = self._loss(failure, diagnosis)
        with self._lock:
            self._why, listeners = why, self._listeners
        for tell in listeners:
            tell(why)

    def _loss(self, failure: Failure, diagnosis: Diagnosis | None) -> EngineLost:
        """The cause, if its log has one: lines that only report an end (no ``failure``) are none. vLLM does
        not tell which signal ended a process of its own.
        """
        if diagnosis is None or failure.id:
            words = attempts.in_words(self._serving.started, diagnosis)
            remedy = f"{diagnosis.remedy} Its" if diagnosis else "its"
            return EngineLost(f"vLLM ended while it served: {words}", f"{remedy} log is {self.log}")
        return EngineLost(
            "vLLM's engine ended while it served, and its log shows no cause (ended by a signal, or by the "
            f"system for want of RAM?): {self.log}",
            "look at what the kernel wrote: sudo dmesg -T | tail -50 | vlfit doctor --log -",
        )

    def _explain(self, arrival: Chunk | Exception, listener: Listener) -> None:
        """What a broken connection means: that vLLM has died, or no more than it says."""
        end = time.monotonic() + _LATE_SECONDS
        while self._why is None and time.monotonic() < end:
            time.sleep(0.01)  # another thread waits for its end, and reads its log
        listener(arrival if self._why is None else self._why)

    def _remember(self) -> None:
        """What the card holds now, requests included, is what the next plan should count with."""
        lost = lost_since(self.plan, survey())
        if lost is not None and not self._serving.started.ended:
            keep(self.plan, self._serving.started.told, max(lost, self.lost_memory or 0))


def _may_be_death(arrival: Chunk | Exception) -> bool:
    """A connection that broke off, or a server that says that it has failed."""
    if isinstance(arrival, RemoteError):
        return arrival.status is None or arrival.status >= 500
    return isinstance(arrival, ServerUnreachable)

"""vLLM as a backend: planned, started as a child process, and used through its OpenAI API."""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vlfit.api.conversation import Conversation, Tool
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk, Listener
from vlfit.api.progress import LoadProgress
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Capabilities, Prepared, Ticket
from vlfit.backends.remote import MAX_CONCURRENT, RemoteBackend, closed_error
from vlfit.backends.vllm import attempts
from vlfit.backends.vllm.attempts import ServingVllm, StartAttempts
from vlfit.backends.vllm.installed import find_vllm
from vlfit.backends.vllm.planning import PlannedStart, plan_start
from vlfit.backends.vllm.serve_command import (
    StartDiagnosis,
    VllmOptions,
    loopback_address,
    supports_llguidance,
)
from vlfit.backends.vllm.starting import ReportedMemory, free_port
from vlfit.checkpoint.processor_files import GenerationDefaults, read_chat_template
from vlfit.checkpoint.source import Checkpoint, locate_or_download
from vlfit.errors import CheckpointError, EngineLost, RemoteError, ServerUnreachable, UsageError
from vlfit.machine.model import Gpu, Machine
from vlfit.machine.survey import survey
from vlfit.plan.actual import Expectation, Row
from vlfit.plan.ledger import Line
from vlfit.plan.plans import Plan
from vlfit.plan.vllm import cost as costs
from vlfit.plan.vllm import starts
from vlfit.plan.vllm.args import as_vllm_settings, vllm_args_of
from vlfit.plan.vllm.starts import StartRecord
from vlfit.plan.vllm.step_down import Failure
from vlfit.prompt.reasoning import NO_THINKING, reads_switch
from vlfit.units import GIB

_MAX_CONTEXT_BYTES = 8 * GIB  # a larger difference means that another program took memory meanwhile
_LOG_PRECISION = 0.01 * GIB
# Ledger lines for which vLLM reports one number.
_COMBINED_LINES = {
    "weights": ("weights.text", "weights.vision", "weights.embedding"),
    "workspace": ("vision_workspace", "text_workspace"),
}


def compare_ledger(plan: Plan, reported: ReportedMemory, process_bytes: int | None) -> tuple[Row, ...]:
    """Planned bytes of each ledger line beside those that vLLM reported, in ledger order.

    The reserve is left out. Weights are one row, and so are workspaces, as vLLM reports one number for each.
    ``process_bytes``: GPU memory that vLLM takes while it serves; None: unknown. It only adds a remark.
    """
    planned = {line.line: line for line in plan.ledger}
    # vLLM's number for weights includes position tables and image rows that it creates while loading.
    made = (
        0
        if reported.weights is None
        else costs.bytes_loaded_with_weights(plan.model, as_vllm_settings(plan.settings))
    )
    moved = {"weights": made, "workspace": -made}
    held = {
        "weights": reported.weights,
        "kv_cache": _kv_cache_bytes(plan, reported),
        "workspace": reported.peak,
        "graphs": reported.graph_pool,
        "context": _context_bytes(plan.gpu, reported, with_libraries=True),
    }
    found = []
    for name in _row_order(plan.ledger):
        parts = [planned[part] for part in _COMBINED_LINES.get(name, (name,)) if part in planned]
        if name == "reserve":
            continue
        how = parts[0].how
        remark = _REMARKS.get(name, "") if held.get(name) is not None else ""
        if name == "growth" and process_bytes is not None:
            remark = "grows with the first requests"
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
    "kv_cache": "set in bytes; vLLM logs GiB with two digits",
    "weights": "text model, vision encoder, embedding and position table in one number of vLLM's",
    "workspace": "the peak of vLLM's profiling run",
    "context": "free memory before the start less that at vLLM's first look, plus its libraries",
}


def record_start(plan: Plan, reported: ReportedMemory, process_bytes: int | None) -> Path | None:
    """Write the memory of a start of vLLM to a file, for the next plan of the same model on the same card.

    Returns the file; None if it cannot be written or there is nothing to record, as with vLLM on a CPU.
    ``process_bytes``: GPU memory that vLLM takes while it serves; None: unknown.
    """
    settings = as_vllm_settings(plan.settings)
    if settings.vllm.on_cpu or (reported.weights is None and reported.graph_pool is None):
        return None
    record = StartRecord(
        date=time.strftime("%Y-%m-%dT%H:%M:%S"),
        context=settings.context,
        image_tokens=settings.image_tokens,
        sequences=settings.sequences,
        chunk=settings.chunk,
        graphs=settings.graphs,
        kv_dtype=settings.kv_dtype,
        weights=reported.weights,
        peak=reported.peak,
        beside=reported.non_torch_bytes,
        graph_pool=reported.graph_pool,
        kv_cache=reported.kv_cache,
        own_context=_context_bytes(plan.gpu, reported, with_libraries=False),
        process=process_bytes,
    )
    with contextlib.suppress(UsageError):
        place = starts.model_key(plan.model, settings)
        return starts.save_start(plan.gpu.name, settings.vllm.version, place, record)
    return None


def bytes_taken_since(plan: Plan, now: Machine) -> int | None:
    """Bytes by which free memory of the plan's card has shrunk since the plan was made; at least 0.

    ``now``: the machine surveyed again. Returns None if the plan is for a CPU, or ``now`` lacks the card.
    """
    if vllm_args_of(plan.settings).on_cpu:
        return None
    same = (gpu for gpu in now.gpus if (gpu.index, gpu.uuid) == (plan.gpu.index, plan.gpu.uuid))
    gpu = next(same, None)
    return None if gpu is None else max(plan.gpu.free - gpu.free, 0)


def _context_bytes(gpu: Gpu, reported: ReportedMemory, *, with_libraries: bool) -> int | None:
    """What the card lost before vLLM's first look; None if other programs changed it too."""
    if reported.free is None:
        return None
    own = gpu.free - reported.free
    if not 0 < own < _MAX_CONTEXT_BYTES:
        return None
    return own + (reported.non_torch_bytes or 0) if with_libraries else own


def _kv_cache_bytes(plan: Plan, reported: ReportedMemory) -> int | None:
    """Bytes of the KV cache: the planned ones if vLLM's two digits of GiB agree with them."""
    given = next(line.bytes for line in plan.ledger if line.line == "kv_cache")
    if reported.kv_cache is None or abs(reported.kv_cache - given) > _LOG_PRECISION:
        return reported.kv_cache
    return given


def _row_order(ledger: tuple[Line, ...]) -> list[str]:
    names = {part: name for name, parts in _COMBINED_LINES.items() for part in parts}
    return list(dict.fromkeys(names.get(line.line, line.line) for line in ledger))


def _notes(parts: list[Line]) -> list[str]:
    return [part.note for part in parts] if len(parts) == 1 else []


_DEATH_SECONDS = 3.0  # after a broken connection, until the death of the process is known
_LAST_LOG_SECONDS = 0.3  # for the last log lines of an engine that has died
_WHY_NO_ACCOUNT = "held memory is what vLLM logged at its start: it runs in a process of its own"

logger = logging.getLogger("vlfit")


class VllmBackend(Backend):
    """A ``vllm serve`` in a child process. Build with ``load`` or ``launch``.

    ``close`` ends vLLM and all processes that it started. ``process_bytes``: by how many bytes free GPU
    memory shrank from planning until vLLM served; None: unknown.
    """

    kind = "vllm"
    capabilities = Capabilities(counts_tokens=False, plan=True, ledger=True, own_process=True)
    context: int
    closing_seconds = 15.0  # vLLM shuts down in four seconds, and is killed after fourteen

    def __init__(
        self,
        serving: ServingVllm,
        name: str,
        folder: Path,
        vllm: VllmOptions,
        max_tokens: int | None = None,
    ) -> None:
        self._serving, self._vllm, self._folder = serving, vllm, folder
        plan = serving.plan
        self.model = name
        self.context = plan.settings.context
        self.device = "cpu" if vllm_args_of(plan.settings).on_cpu else f"cuda:{plan.gpu.index}"
        self._loss: EngineLost | None = None
        self._dead = False
        self._listeners: list[Callable[[Exception], None]] = []
        self._closed = False
        self._lock = threading.Lock()
        self.process_bytes = bytes_taken_since(serving.plan, survey())
        record_start(serving.plan, serving.started.memory, self.process_bytes)
        address = serving.address
        try:
            self._remote = RemoteBackend(
                f"http://{address.host}:{address.port}",
                address.api_key,
                name,
                context=self.context,
                max_tokens=max_tokens,
                max_concurrent=max(MAX_CONCURRENT, 2 * self.sequences),
                behind_server=True,
                llguidance=supports_llguidance(serving.started.command.words),
            )
        except BaseException:
            serving.started.process.stop()
            raise
        atexit.register(self.close)
        started = serving.started
        for ends in (started.process.wait, started.engine_died.wait):
            threading.Thread(target=self._watch, args=(ends,), name="vllm-watch", daemon=True).start()

    @classmethod
    def load(
        cls,
        model: str | Path | Checkpoint,
        options: EngineOptions | None = None,
        vllm: VllmOptions | None = None,
        progress: LoadProgress | None = None,
    ) -> "VllmBackend":
        """Find vLLM, plan, and start it; after a failed start try the next cheaper plan, until one serves.

        Blocks for a minute or more; downloads what is missing. ``options``, ``vllm``: None: the defaults.
        Raises ``UsageError`` without vLLM and for options that only the native engine has, ``DoesNotFit`` if
        no plan fits, ``VllmFailed`` with the cause of the last failure, and what opening a checkpoint raises.
        An interrupt (Ctrl-C) leaves no process behind.
        """
        vllm = vllm or VllmOptions()
        options = options or EngineOptions()
        planned = plan_start(model, options, vllm, find_vllm(vllm.python), survey())
        for words in planned.notes:
            (vllm.on_status or logger.warning)(words)
        return cls.launch(planned, vllm, progress, max_tokens=options.max_tokens)

    @classmethod
    def launch(
        cls,
        planned: PlannedStart,
        vllm: VllmOptions,
        progress: LoadProgress | None = None,
        *,
        max_tokens: int | None = None,
    ) -> "VllmBackend":
        """``load``, beginning with a plan that ``plan_start`` made. Raises ``DoesNotFit`` and
        ``VllmFailed`` alike.

        Of ``vllm``, ``retry`` and the callbacks are used; the rest is in ``planned``. ``max_tokens``:
        default of requests without a limit; None: vLLM's.
        """
        name, folder = locate_or_download(planned.plan.model.source or planned.plan.model.name)
        tries = StartAttempts(
            planned,
            lambda: loopback_address(name, free_port()),
            str(folder),
            vllm.retry,
            vllm.diagnose_log,
            vllm.on_status or logger.warning,
            progress or (lambda what, share: None),
        )
        return cls(tries.run(), name, folder, vllm, max_tokens)

    @property
    def plan(self) -> Plan:
        """The plan that vLLM serves with: the first one, or a cheaper one after failed starts."""
        return self._serving.plan

    @property
    def serving(self) -> ServingVllm:
        """The vLLM that was started: its process, log, command and plans."""
        return self._serving

    @property
    def sequences(self) -> int:
        """Most requests that run at once, over all data-parallel replicas; others wait inside vLLM."""
        return self.plan.settings.sequences * vllm_args_of(self.plan.settings).data

    @property
    def log_path(self) -> Path:
        """The file with vLLM's output."""
        return self._serving.started.log.path

    @property
    def expectation(self) -> Expectation:
        """The plan's ledger lines; the time of a decode step is unknown."""
        return Expectation(self.plan.ledger, no_lines_reason=_WHY_NO_ACCOUNT)

    def ledger_rows(self) -> tuple[Row, ...]:
        """The plan's ledger beside the memory that vLLM logged at its start."""
        return compare_ledger(self.plan, self._serving.started.memory, self.process_bytes)

    def default_sampling(self) -> SamplingParams:
        """The checkpoint's own generation settings; vLLM itself runs without them."""
        return SamplingParams.from_defaults(GenerationDefaults.read(self._folder))

    def without_thinking(self, sampling: SamplingParams) -> SamplingParams:
        """``sampling`` with reasoning turned off, if the checkpoint's template has the switch for it."""
        with contextlib.suppress(CheckpointError):
            if sampling.template_variables is None and reads_switch(read_chat_template(self._folder)):
                return replace(sampling, template_variables=NO_THINKING)
        return sampling

    def prepare(
        self, conversation: Conversation, sampling: SamplingParams, tools: tuple[Tool, ...] = ()
    ) -> Prepared:
        """Check pictures and parameters, and encode the request; no tokens are counted.

        Raises ``PictureError`` or ``InvalidRequest``, and ``EngineLost`` after vLLM's death.
        """
        self._raise_if_lost()
        return self._remote.prepare(conversation, sampling, tools)

    def prepare_text(self, prompt: str | tuple[int, ...], sampling: SamplingParams) -> Prepared:
        """``prepare`` for plain text or token ids, without a chat template."""
        self._raise_if_lost()
        return self._remote.prepare_text(prompt, sampling)

    def start(self, prepared: Prepared, sampling: SamplingParams, listener: Listener) -> Ticket:
        """Send the request to vLLM and return. If vLLM dies, ``listener`` gets ``EngineLost`` with the cause.

        Raises ``EngineLost`` if vLLM has died before.
        """
        self._raise_if_lost()

        def listen(item: Chunk | Exception) -> None:
            if _may_be_death(item):
                # In a thread of its own: the connections' thread serves other requests.
                threading.Thread(target=self._report_loss, args=(item, listener), daemon=True).start()
            else:
                listener(item)

        return self._remote.start(prepared, sampling, listen)

    def when_lost(self, callback: Callable[[Exception], None]) -> None:
        """Call ``callback`` with an ``EngineLost`` when vLLM ends unexpectedly; at once if it already has.

        Otherwise it is called from another thread, and never after ``close``.
        """
        with self._lock:
            why = self._loss
            if why is None:
                self._listeners.append(callback)
        if why is not None:
            callback(why)

    def close(self) -> None:
        """Stop vLLM and return when none of its processes is left. May be called more than once.

        Before that records the memory that it holds, for the next plan (``record_start``).
        """
        atexit.unregister(self.close)
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._record_memory()
            with contextlib.suppress(Exception):  # stopping must not fail for a connection
                self._remote.close()
        self._serving.started.process.stop()

    def _raise_if_lost(self) -> None:
        """Raise ``EngineLost`` once vLLM is gone."""
        if self._loss is not None:
            raise self._loss

    def _watch(self, ends: Callable[[None], object]) -> None:
        """Wait until vLLM or its engine has ended; in the latter case its server ends some seconds later."""
        ends(None)
        self._serving.started.process.wait(_LAST_LOG_SECONDS)
        with self._lock:
            if self._closed or self._dead:
                return
            self._dead = True
        failure, diagnosis = attempts.diagnose_failure(self._serving.started, self._vllm.diagnose_log)
        if self._vllm.on_death is not None:
            self._vllm.on_death(self.plan, failure)
        why = self._describe_loss(failure, diagnosis)
        with self._lock:
            self._loss, listeners = why, self._listeners
        for listener in listeners:
            listener(why)

    def _describe_loss(self, failure: Failure, diagnosis: StartDiagnosis | None) -> EngineLost:
        """The error with the cause from the log, if there is one.

        Lines that only report an end (no ``failure``) are none: vLLM does not log which signal ended one of
        its processes.
        """
        if diagnosis is None or failure.id:
            words = attempts.describe_failure(self._serving.started, diagnosis)
            remedy = f"{diagnosis.remedy} " if diagnosis else ""
            return EngineLost(f"vLLM ended while serving: {words}", f"{remedy}Its log is {self.log_path}.")
        return EngineLost(
            "vLLM's engine ended while serving, and its log shows no cause (a signal, or the kernel's OOM "
            f"killer?): {self.log_path}",
            "Run sudo dmesg -T | tail -50 | vlfit doctor --log - to look into the kernel's log.",
        )

    def _report_loss(self, item: Chunk | Exception, listener: Listener) -> None:
        """Give the listener the reason of vLLM's death, or ``item`` itself if it lives.

        If the backend is closed meanwhile, the request ends as stopped.
        """
        end = time.monotonic() + _DEATH_SECONDS
        while self._loss is None and not self._closed and time.monotonic() < end:
            time.sleep(0.01)  # another thread waits for its end and reads its log
        if self._loss is not None:
            item = self._loss
        elif self._closed:
            item = closed_error()
        listener(item)

    def _record_memory(self) -> None:
        """Record what the card holds now, with requests, for the next plan."""
        lost = bytes_taken_since(self.plan, survey())
        if lost is not None and not self._serving.started.ended:
            record_start(self.plan, self._serving.started.memory, max(lost, self.process_bytes or 0))


def _may_be_death(item: Chunk | Exception) -> bool:
    """Whether ``item`` is a broken connection or a server failure."""
    if isinstance(item, RemoteError):
        return item.status is None or item.status >= 500
    return isinstance(item, ServerUnreachable)

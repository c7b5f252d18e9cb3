"""One start of vLLM: run the command, follow its log, wait until it answers or ends.

The log patterns are those of vLLM 0.11 to 0.33.
"""

import http.client
import math
import re
import socket
import threading
import time
from dataclasses import dataclass, field

from vlfit.api.progress import LoadProgress, StatusCallback
from vlfit.backends.vllm.process import GuardedProcess, ProcessLog, oom_kill_count
from vlfit.backends.vllm.serve_command import LOOPBACK, VllmServeCommand
from vlfit.units import GIB

# Phases in order, each with the share of the start that is done when it begins. The shares are those of a
# first start on a GPU as users report it; a start without CUDA graphs skips two phases.
IMPORTING = "importing vLLM"
READING = "reading the model's settings"
ENGINE = "starting the engine"
WEIGHTS = "loading weights"
PROFILING = "profiling memory"
COMPILING = "compiling"
GRAPHS = "capturing graphs"
SERVER = "starting the server"
_SHARES = {
    IMPORTING: 0.0,
    READING: 0.15,
    ENGINE: 0.2,
    WEIGHTS: 0.3,
    PROFILING: 0.6,
    COMPILING: 0.65,
    GRAPHS: 0.85,
    SERVER: 0.95,
}
_ORDER = list(_SHARES)
_BEGINS = (
    # From 0.32 on the version is in a banner; the arguments are the first plain line.
    (READING, re.compile(r"vLLM API server version|non-default args: ")),
    (ENGINE, re.compile(r"Initializing a V\d LLM engine|Multi-modal warmup completed")),
    # The second alternative is that of the newer model runner.
    (
        WEIGHTS,
        re.compile(
            r"Starting to load model|Loading model from scratch|Loading (?:safetensors|pt) checkpoint shards:"
        ),
    ),
    (PROFILING, re.compile(r"Model loading took|Loading weights took|Encoder cache will be initialized")),
    (
        COMPILING,
        re.compile(
            r"Using cache directory: .*torch.compile|Dynamo bytecode transform time|Compiling a graph for|"
            r"Directly load the compiled graph"
        ),
    ),
    (PROFILING, re.compile(r"torch\.compile (?:takes|took) [\d.]+ s in total|Profiling CUDA graph memory")),
    (GRAPHS, re.compile(r"Capturing CUDA graphs|Available KV cache memory|GPU KV cache size")),
    (
        SERVER,
        re.compile(r"init engine \(profile|Graph capturing finished|Starting vLLM|Started server process"),
    ),
)
_PHASE_WORDS = (
    *("version", "args", "engine", "warmup", "load", "shards", "took", "takes", "Encoder", "cache", "Dynamo"),
    *("Compiling", "CUDA", "KV", "Starting", "Started", "capturing", "scratch"),
)
_PERCENT = re.compile(r"(?:checkpoint shards|Capturing CUDA graphs)[^%]{0,60}?(\d{1,3})%")


@dataclass(slots=True)
class StartupProgress:
    """Progress of a start, read from vLLM's log: the current ``phase``, and the ``share`` done (0 to 1)."""

    phase: str = IMPORTING
    share: float = 0.0

    def update(self, line: str) -> bool:
        """Take over the phase that a log line shows; return whether it is new. ``share`` never decreases."""
        if not any(word in line for word in _PHASE_WORDS):
            return False
        before = self.phase, self.share
        for phase, pattern in _BEGINS:
            later = _ORDER.index(phase) > _ORDER.index(self.phase)
            # The model is compiled during profiling: profiling goes on afterwards.
            again = phase == PROFILING and self.phase == COMPILING
            if (later or again) and pattern.search(line):
                self.phase = phase
                self.share = max(self.share, _SHARES[phase])
        percent = _PERCENT.search(line)
        if percent is not None and self.phase in (WEIGHTS, GRAPHS):
            begins, ends = _SHARES[self.phase], _end_of(self.phase)
            self.share = max(self.share, begins + (ends - begins) * min(int(percent[1]), 100) / 100)
        return (self.phase, self.share) != before


def _end_of(phase: str) -> float:
    following = _ORDER.index(phase) + 1
    return _SHARES[_ORDER[following]] if following < len(_ORDER) else 1.0


# Memory lines of v1/worker/gpu_worker.py, gpu_model_runner.py, cpu_worker.py and v1/core/kv_cache_utils.py.
_N = r"(-?\d+(?:\.\d+)?)"
_ACTUAL = re.compile(rf"{_N} GiB for ([A-Za-z][A-Za-z ()+-]*[A-Za-z)])")
# A failure also begins with "Free memory on device", but goes on with "is less than desired".
_FREE = re.compile(rf"Free memory on device ?(?:cuda:\d+ ?)?\({_N}/{_N} GiB\) on startup\. Desired")
_GIVEN = re.compile(rf"Initial free memory {_N} GiB, reserved {_N} GiB memory for KV Cache")
_BYTES = {
    "weights": re.compile(rf"(?:Model loading took|model weights took) {_N} Gi?B"),
    "kv_cache": re.compile(rf"Available KV cache memory: {_N} GiB"),
    "graph_pool": re.compile(rf"Graph capturing finished in {_N} secs?, took {_N} GiB"),
    "graph_estimate": re.compile(rf"Estimated CUDA graph memory: {_N} GiB"),
    "cpu_kv_cache": re.compile(rf"\({_N}/{_N}\) GiB for KV cache on node"),
}
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_MEMORY_WORDS = ("GiB", "tokens")
_PARTS = {
    "weight": "weights",
    "consumed memory (weights + non-torch)": "consumed",
    "peak activation": "peak",
    "non-torch memory": "non_torch",
    "CUDAGraph memory": "graph_pool",
}


@dataclass(slots=True)
class ReportedMemory:
    """Memory as vLLM's log reports it, in bytes; None: not reported. Of several workers, the largest number.

    - ``kv_cache``: bytes of the KV cache; ``kv_tokens``: its size in tokens.
    - ``peak``: activations in the profiling run.
    - ``non_torch``: memory outside torch, within vLLM's budget.
    - ``consumed``: ``weights`` and ``non_torch`` in one number.
    - ``graph_pool``: CUDA graphs; ``graph_estimate``: vLLM's estimate of them before the capture.
    - ``free``, ``total``: GPU memory when vLLM starts, after its CUDA context.
    """

    weights: int | None = None
    kv_cache: int | None = None
    kv_tokens: int | None = None
    peak: int | None = None
    non_torch: int | None = None
    consumed: int | None = None
    graph_pool: int | None = None
    graph_estimate: int | None = None
    free: int | None = None
    total: int | None = None

    def update(self, line: str) -> None:
        """Take over the numbers that a log line has. Most lines have none, and change nothing."""
        if not any(word in line for word in _MEMORY_WORDS):
            return
        for name, pattern in _BYTES.items():
            if found := pattern.search(line):
                # The size is the last group, except in the CPU's line.
                number = found[1] if name == "cpu_kv_cache" else found[found.re.groups]
                self._record("kv_cache" if name == "cpu_kv_cache" else name, number)
        if found := _GIVEN.search(line):
            self._record("free", found[1])
            self._record("kv_cache", found[2])
        if found := _FREE.search(line):
            self._record("free", found[1])
            self._record("total", found[2])
            for number, what in _ACTUAL.findall(line):
                if what in _PARTS:
                    self._record(_PARTS[what], number)
        if found := _TOKENS.search(line):
            self.kv_tokens = int(found[1].replace(",", ""))

    @property
    def non_torch_bytes(self) -> int | None:
        """``non_torch``, else ``consumed`` less ``weights``; None if neither is reported."""
        if self.non_torch is None and self.consumed is not None and self.weights is not None:
            return max(self.consumed - self.weights, 0)
        return self.non_torch

    def _record(self, name: str, gibibytes: str) -> None:
        count = round(float(gibibytes) * GIB)
        setattr(self, name, max(getattr(self, name) or count, count))


SILENCE_SECONDS = 60.0  # importing vLLM from a cold disk takes half of it
# Cards that cannot reach each other wait for ever, and vLLM with them (its PR 50039). torch's own timeout is
# as long.
HANG_SECONDS = 600.0
HANG_LINE = "No available shared memory broadcast block found"  # logged each minute of such a wait
_DEAD = "EngineDeadError"
_POLL_SECONDS, _SLOW_POLL_SECONDS = 0.2, 2.0
_HEALTH_TIMEOUT = 2.0


@dataclass
class StartedVllm:
    """A vLLM that was started, and may have ended since.

    ``memory``: what the log reports, updated as vLLM runs. ``seconds``: from the start until vLLM answered or
    ended. ``oom_kills_before``: ``oom_kill_count()`` at the start. ``hung``: vLLM was stopped because its log
    went silent. ``engine_died``: set when vLLM's API server logs that the engine is gone; the server itself
    ends some seconds later.
    """

    process: GuardedProcess
    log: ProcessLog
    command: VllmServeCommand
    memory: ReportedMemory = field(default_factory=ReportedMemory)
    seconds: float = 0.0
    oom_kills_before: int | None = field(default_factory=oom_kill_count)
    hung: bool = False
    engine_died: threading.Event = field(default_factory=threading.Event)

    @property
    def ended(self) -> bool:
        """Whether the program has ended and all its output was read."""
        return self.process.ended

    @property
    def ran_out_of_ram(self) -> bool:
        """Whether the kernel has OOM-killed any program since the start; if vLLM has ended, probably vLLM.

        False if the kernel does not count OOM kills.
        """
        now = oom_kill_count()
        return now is not None and self.oom_kills_before is not None and now > self.oom_kills_before


def free_port() -> int:
    """A TCP port of the loopback address that is free now; another program may take it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
    return port


def start_vllm(
    command: VllmServeCommand,
    address: tuple[str, int],
    progress: LoadProgress,
    on_status: StatusCallback,
    *,
    may_hang: bool = False,
) -> StartedVllm:
    """Run ``command`` and wait until vLLM answers at ``address`` (host, port) or has ended.

    ``StartedVllm.ended`` tells which. Writes a new log file. ``progress`` gets the phases; ``on_status`` a
    sentence if the log is silent for long or cannot be written. ``may_hang``: stop vLLM after
    ``HANG_SECONDS`` of silence, for starts on several cards; else there is no time limit. If anything is
    raised meanwhile (Ctrl-C), no process is left behind.
    """
    log = ProcessLog(command.shell_line)
    watcher = _LogWatcher(progress)
    began = time.monotonic()
    progress(watcher.start.phase, 0.0)
    guarded = GuardedProcess(command.words, command.environment(), log, watcher.read)
    started = StartedVllm(guarded, log, command, watcher.memory, engine_died=watcher.engine_died)
    try:
        _wait(started, watcher, address, on_status, HANG_SECONDS if may_hang else math.inf)
    except BaseException:
        guarded.stop(gently=False)
        raise
    started.seconds = time.monotonic() - began
    return started


class _LogWatcher:
    """Reader of the log's lines: ``read`` is called with each, from a thread."""

    def __init__(self, progress: LoadProgress) -> None:
        self.start, self.memory = StartupProgress(), ReportedMemory()
        self.last_line_at = time.monotonic()
        self.ready = False
        self.engine_died = threading.Event()
        self._progress = progress

    def read(self, line: str) -> None:
        if HANG_LINE not in line:  # logged by waiting processes too
            self.last_line_at = time.monotonic()
        if _DEAD in line:
            self.engine_died.set()
        self.memory.update(line)
        if not self.ready and self.start.update(line):
            self._progress(self.start.phase, self.start.share)


def _wait(
    started: StartedVllm,
    watcher: _LogWatcher,
    address: tuple[str, int],
    on_status: StatusCallback,
    hang_seconds: float,
) -> None:
    silence, polled_at, log_failed = SILENCE_SECONDS, 0.0, False
    while not started.process.wait(_POLL_SECONDS):
        now = time.monotonic()
        # Versions whose last phase is not recognized are polled too, less often.
        if watcher.start.phase == SERVER or now - polled_at > _SLOW_POLL_SECONDS:
            polled_at = now
            if _is_answering(address):
                watcher.ready = True
                return
        if started.log.write_error and not log_failed:
            log_failed = True
            on_status(f"the log {started.log.path} ends early: {started.log.write_error}")
        if now - watcher.last_line_at > hang_seconds:
            started.hung = True
            started.process.stop(gently=False)
            return
        if now - watcher.last_line_at > silence:
            silence *= 2
            on_status(
                f"vLLM has logged nothing for {now - watcher.last_line_at:.0f} s, last while "
                f"{watcher.start.phase}. Its log is {started.log.path}"
            )


def _is_answering(address: tuple[str, int]) -> bool:
    connection = http.client.HTTPConnection(*address, timeout=_HEALTH_TIMEOUT)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()

"""One start of vLLM, from the first word of its command until it answers, or has ended instead.

Knows: which signs say that it is ready, and how long a silence is worth a word. Does not know what to do
about a failure (``attempts.py``).
"""

import http.client
import math
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vlfit.backends.vllm.process import Guarded, Log, killed_for_ram
from vlfit.backends.vllm.serve_command import LOOPBACK, Command
from vlfit.units import GIB

# Where the start of a vLLM stands, read off what it says.
#
# Knows: which line begins which phase, in vLLM 0.11 to 0.33. Does not know how it is shown.


# In the order in which they come, each with the share of the start that is done when it begins. The shares
# are those of a first start on a GPU as its users report it; a start without graphs skips two of them.
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
    # 0.32 on writes its version as a banner, of which the arguments are the first line to be had.
    (READING, re.compile(r"vLLM API server version|non-default args: ")),
    (ENGINE, re.compile(r"Initializing a V\d LLM engine|Multi-modal warmup completed")),
    # The second is the newer runner's word.
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
class Start:
    """The phase that was reached, and the share of the whole that is done. ``read`` each line in turn."""

    phase: str = IMPORTING
    share: float = 0.0

    def read(self, line: str) -> bool:
        """Take in what ``line`` says; whether anything is new. A phase never comes again."""
        if not any(word in line for word in _PHASE_WORDS):
            return False
        before = self.phase, self.share
        for phase, pattern in _BEGINS:
            later = _ORDER.index(phase) > _ORDER.index(self.phase)
            # While profiling, a model is compiled and then profiled on: that is one step back.
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


# What vLLM says of its memory while it starts, as numbers.
#
# Knows: the lines of vLLM 0.11 to 0.33 (``v1/worker/gpu_worker.py``, ``gpu_model_runner.py``,
# ``cpu_worker.py``, ``v1/core/kv_cache_utils.py``). Does not know what was planned (``actual.py``). Of
# several workers that each say a number the largest counts.


_N = r"(-?\d+(?:\.\d+)?)"
_ACTUAL = re.compile(rf"{_N} GiB for ([A-Za-z][A-Za-z ()+-]*[A-Za-z)])")
# "Free memory on device" begins a failure, too: there it goes on with "is less than desired".
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
    "non-torch memory": "beside",
    "CUDAGraph memory": "graph_pool",
}


@dataclass(slots=True)
class Told:
    """Bytes and tokens, each None where vLLM did not say. ``read`` each line in turn.

    ``weights``: of the model. ``kv_cache``: what is there for it. ``kv_tokens``: how many that holds.
    ``peak``: of activations in the trial run. ``beside``: of CUDA's libraries, within vLLM's budget.
    ``consumed``: weights and those together, where it says no more. ``graph_pool``: of CUDA graphs, and
    ``graph_estimate`` before they were captured. ``free``, ``total``: of the card, when vLLM took its first
    look, its own context taken off.
    """

    weights: int | None = None
    kv_cache: int | None = None
    kv_tokens: int | None = None
    peak: int | None = None
    beside: int | None = None
    consumed: int | None = None
    graph_pool: int | None = None
    graph_estimate: int | None = None
    free: int | None = None
    total: int | None = None

    def read(self, line: str) -> None:
        """Take in what ``line`` says."""
        if not any(word in line for word in _MEMORY_WORDS):
            return
        for name, pattern in _BYTES.items():
            if found := pattern.search(line):
                # The last group of a line about graphs is the size, of one about a CPU's cache the first.
                number = found[1] if name == "cpu_kv_cache" else found[found.re.groups]
                self._take("kv_cache" if name == "cpu_kv_cache" else name, number)
        if found := _GIVEN.search(line):
            self._take("free", found[1])
            self._take("kv_cache", found[2])
        if found := _FREE.search(line):
            self._take("free", found[1])
            self._take("total", found[2])
            for number, what in _ACTUAL.findall(line):
                if what in _PARTS:
                    self._take(_PARTS[what], number)
        if found := _TOKENS.search(line):
            self.kv_tokens = int(found[1].replace(",", ""))

    @property
    def apart(self) -> int | None:
        """CUDA's libraries, also where vLLM says them together with the weights."""
        if self.beside is None and self.consumed is not None and self.weights is not None:
            return max(self.consumed - self.weights, 0)
        return self.beside

    def _take(self, name: str, gibibytes: str) -> None:
        count = round(float(gibibytes) * GIB)
        setattr(self, name, max(getattr(self, name) or count, count))


Progress = Callable[[str, float], None]

SILENCE_SECONDS = 60.0  # importing vLLM from a cold disk takes half of it
# Cards that cannot reach each other wait for good, and vLLM with them (its PR 50039); torch gives up after
# as long.
HANG_SECONDS = 600.0
WAITS = "No available shared memory broadcast block found"  # vLLM's word for that, each minute
_DEAD = "EngineDeadError"
_LOOK_SECONDS, _SELDOM_SECONDS = 0.2, 2.0
_ASK_SECONDS = 2.0  # for an answer to /health


@dataclass
class Started:
    """A vLLM that was started. ``told``: what it said of its memory so far. ``seconds``: of its start.
    ``killed_before``: programs that the kernel had ended for want of RAM by then. ``hung``: it was ended as
    it said nothing any more. ``engine_died``: set once its server says that its engine is gone, which it
    outlives for some seconds.
    """

    guarded: Guarded
    log: Log
    command: Command
    told: Told = field(default_factory=Told)
    seconds: float = 0.0
    killed_before: int | None = field(default_factory=killed_for_ram)
    hung: bool = False
    engine_died: threading.Event = field(default_factory=threading.Event)

    @property
    def ended(self) -> bool:
        return self.guarded.ended

    @property
    def ran_out_of_ram(self) -> bool:
        """Whether the kernel has ended a program for want of RAM since: of one that ended, most likely it."""
        now = killed_for_ram()
        return now is not None and self.killed_before is not None and now > self.killed_before


def free_port() -> int:
    """A port of this computer that nobody listens on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
    return port


def start(
    command: Command,
    address: tuple[str, int],
    progress: Progress,
    tell: Callable[[str], None],
    *,
    may_hang: bool = False,
) -> Started:
    """Run ``command`` and wait until it answers at ``address``, or has ended (``Started.ended``).

    ``progress`` is told the phase and the share of the start that is done; ``tell`` that it has been silent
    for long. ``may_hang``: several cards that may wait for each other for good, which then is ended. If
    anything is raised meanwhile (Ctrl-C), nothing of it is left when this returns.
    """
    log = Log(command.shell)
    watching = _Watching(progress)
    begun = time.monotonic()
    progress(watching.start.phase, 0.0)
    guarded = Guarded(command.words, command.environment(), log, watching.hear)
    started = Started(guarded, log, command, watching.told, engine_died=watching.engine_died)
    try:
        _wait(started, watching, address, tell, HANG_SECONDS if may_hang else math.inf)
    except BaseException:
        guarded.stop(gently=False)
        raise
    started.seconds = time.monotonic() - begun
    return started


class _Watching:
    """Hears each line, in a thread."""

    def __init__(self, progress: Progress) -> None:
        self.start, self.told = Start(), Told()
        self.spoke = time.monotonic()
        self.ready = False
        self.engine_died = threading.Event()
        self._progress = progress

    def hear(self, line: str) -> None:
        if WAITS not in line:  # which is said by who waits, too
            self.spoke = time.monotonic()
        if _DEAD in line:
            self.engine_died.set()
        self.told.read(line)
        if not self.ready and self.start.read(line):
            self._progress(self.start.phase, self.start.share)


def _wait(
    started: Started,
    watching: _Watching,
    address: tuple[str, int],
    tell: Callable[[str], None],
    patience: float,
) -> None:
    silence, asked, full = SILENCE_SECONDS, 0.0, False
    while not started.guarded.wait(_LOOK_SECONDS):
        now = time.monotonic()
        # A version that calls its last phase otherwise is asked all the same, only less often.
        if watching.start.phase == SERVER or now - asked > _SELDOM_SECONDS:
            asked = now
            if _answers(address):
                watching.ready = True
                return
        if started.log.failure and not full:
            full = True
            tell(f"the log {started.log.path} ends early: {started.log.failure}")
        if now - watching.spoke > patience:
            started.hung = True
            started.guarded.stop(gently=False)
            return
        if now - watching.spoke > silence:
            silence *= 2
            tell(
                f"vLLM has said nothing for {now - watching.spoke:.0f} s; last it was "
                f"{watching.start.phase}. What it said is in {started.log.path}"
            )


def _answers(address: tuple[str, int]) -> bool:
    connection = http.client.HTTPConnection(*address, timeout=_ASK_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()

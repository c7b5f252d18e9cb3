"""One start of vLLM, from the first word of its command until it answers, or has ended instead.

Knows: which signs say that it is ready, and how long a silence is worth a word. Does not know what to do
about a failure (``attempts.py``).
"""

import http.client
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vlfit.backends.vllm.command import LOOPBACK, Command
from vlfit.backends.vllm.log import Log
from vlfit.backends.vllm.memory_lines import Told
from vlfit.backends.vllm.phases import SERVER, Start
from vlfit.backends.vllm.process import Guarded, killed_for_ram

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

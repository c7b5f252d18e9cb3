"""Keeps a server running: its engine in a process of its own, which is started again when it dies.

Three processes, forked from one that has imported next to nothing and has one thread, so that they are there
at once and share their memory: this one, which starts the others and waits; one that holds the connections of
clients (``relay.py``); and one with HTTP, the engine and the model, as a server has it that nobody keeps.
What goes wrong there (a fault of a decoder or a driver, a kill by the system) is seen by its end, explained,
and costs the requests that were under way. Knows: processes, signals. Does not know what is served.
"""

import asyncio
import logging
import mmap
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from vlfit.server.http.listen import cannot_listen
from vlfit.server.relay import DEAD, LAST_CALL, LEFT, LOST, SERVING, STARTING, relay

log = logging.getLogger("vlfit.server")

BACKLOG = 2048
# Not for another try: all is said, usage is wrong, it does not fit.
FINAL = (0, 2, 3)
MOST_IN_A_ROW = 5
SOUND_SECONDS = 60.0  # who has run so long did not die of its start
LONGEST_PAUSE = 30.0

_WHY = {
    signal.SIGKILL: "killed, perhaps by the system for want of memory (`dmesg` tells)",
    signal.SIGSEGV: "it touched memory that is not its own: a fault of a library or a driver",
    signal.SIGBUS: "a file that it had mapped is gone, or memory is broken",
    signal.SIGABRT: "a library gave up",
}


@dataclass(frozen=True, slots=True)
class Kept:
    """What the process that serves is given. ``listener``: for connections handed on. ``keeper``: the process
    to signal. ``restarts``: how often it was started again. ``tell_ready`` lets clients in; ``tell_lost``
    says that no more are taken, and that what follows is cleaning up before another try. ``word``: a file by
    which one that serves may tell the next, and which goes with the keeper; nobody else can read it.
    """

    listener: socket.socket
    keeper: int
    restarts: int
    tell_ready: Callable[[], None]
    tell_lost: Callable[[], None]
    word: Path


def keep(listener: socket.socket) -> Kept:
    """Returns only in processes that are to serve, again in each that takes over from one that has died.

    In this process it ends with ``SystemExit`` when a server has ended as it was told, cannot start, or has
    died too often in a row. ``listener`` is where clients come.
    """
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise cannot_listen(host, port, error) from error
    folder = tempfile.mkdtemp(prefix="vlfit-")  # nobody else may look into it
    inside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    inside.bind(f"{folder}/server")
    inside.listen(BACKLOG)
    state = mmap.mmap(-1, 1)  # shared by all that are forked from here
    life = os.pipe()  # whose writing end is open for as long as this process is there
    keeper = _Keeper(listener, inside, folder, state, life)
    try:
        return keeper.run()
    except BaseException:  # SystemExit, unless the system has no process to give
        if os.getpid() == keeper.pid:
            shutil.rmtree(folder, ignore_errors=True)
        raise


class _Keeper:
    def __init__(
        self,
        listener: socket.socket,
        inside: socket.socket,
        folder: str,
        state: mmap.mmap,
        life: tuple[int, int],
    ) -> None:
        self.pid = os.getpid()
        self._listener = listener
        self._inside = inside
        self._path = f"{folder}/server"
        self._word = Path(folder, "word")
        self._state = state
        self._life = life
        self._server = 0
        self._relaying = 0
        self._stopping = False

    def run(self) -> Kept:
        # A server may die before the relay listens to this signal, which would end it otherwise.
        before = signal.signal(LEFT, signal.SIG_IGN)
        self._relaying = relaying = os.fork()
        if relaying == 0:
            self._relay()
        signal.signal(LEFT, before)
        signal.signal(signal.SIGINT, self._pass_on)
        signal.signal(signal.SIGTERM, self._pass_on)
        restarts = in_a_row = 0
        while True:
            self._state[0] = DEAD if restarts else STARTING
            self._server = os.fork()
            if self._server == 0:
                return self._serve(restarts)
            if self._stopping:  # between the signal and the fork
                os.kill(self._server, signal.SIGTERM)
            began = time.monotonic()
            ended, status = os.waitpid(-1, 0)
            if ended == relaying:
                log.error("the process that holds the connections died; the server stops")
                with suppress(ProcessLookupError):
                    os.kill(self._server, signal.SIGKILL)
                sys.exit(1)
            self._server = 0
            was_up, self._state[0] = self._state[0] in (SERVING, LOST), DEAD
            code = os.waitstatus_to_exitcode(status)
            # Whoever could not even start at first has said why.
            if self._stopping or code in FINAL or (not was_up and not restarts):
                self._end_relay(relaying)
                sys.exit(code if code >= 0 else 128 - code)
            in_a_row = 1 if was_up and time.monotonic() - began > SOUND_SECONDS else in_a_row + 1
            if in_a_row > MOST_IN_A_ROW:
                log.error("the server died %d times in a row; it is not started again", in_a_row)
                self._end_relay(relaying)
                sys.exit(1)
            self._tell_left()
            restarts += 1
            log.error("the server's process died: %s; it is started again", why(code))
            self._pause(min(2.0 ** (in_a_row - 1) - 1, LONGEST_PAUSE))
            if self._stopping:
                self._end_relay(relaying)
                sys.exit(0)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        if self._server:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self._server, number)

    @staticmethod
    def _end_relay(pid: int) -> None:
        """When clients have what they were sent last."""
        os.kill(pid, LAST_CALL)
        os.waitpid(pid, 0)

    def _serve(self, restarts: int) -> Kept:
        os.setsid()  # Ctrl-C is for the keeper, which passes it on
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._listener.close()
        self._watch_keeper()

        def tell_ready() -> None:
            self._state[0] = SERVING

        def tell_lost() -> None:
            self._state[0] = LOST
            self._tell_left()

        return Kept(self._inside, self.pid, restarts, tell_ready, tell_lost, self._word)

    def _tell_left(self) -> None:
        """The queue of connections is the keeper's as well, and outlives who served: nobody in it is told."""
        with suppress(ProcessLookupError):
            os.kill(self._relaying, LEFT)

    def _relay(self) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._inside.close()
        self._watch_keeper()
        try:
            asyncio.run(relay(self._listener, self._path, lambda: self._state[0]))
        finally:
            os._exit(1)

    def _watch_keeper(self) -> None:
        """End with the process that started this one, however that ended."""
        read, write = self._life
        os.close(write)

        def wait() -> None:
            os.read(read, 1)
            shutil.rmtree(os.path.dirname(self._path), ignore_errors=True)  # if it was killed it could not
            os._exit(1)

        threading.Thread(target=wait, name="vlfit-keeper-watch", daemon=True).start()


def why(code: int) -> str:
    """How a process ended, in words. ``code`` below 0: minus the signal that ended it."""
    if code >= 0:
        return f"it ended by itself with {code}"
    try:
        name = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    return f"{name.name}, {_WHY[name]}" if name in _WHY else name.name

"""The supervisor of a server: restarts its worker process when it crashes, while clients stay connected.

Three processes: the supervisor; the relay, which holds the clients' connections (``relay.py``); and the
worker, with HTTP, the engine and the model. The supervisor forks both while it has one thread and before
anything large is imported, so that they start at once and share memory. A crash (a fault in a
decoder or driver, the OOM killer) costs only the requests in progress.
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

from vlfit.errors import CannotListen
from vlfit.server.http.listen import listen_error
from vlfit.server.relay import DEAD, FINISH_SIGNAL, LOST, SERVER_LEFT_SIGNAL, SERVING, STARTING, relay

log = logging.getLogger("vlfit.server")

BACKLOG = 2048
FINAL_EXIT_CODES = (0, 2, 3)  # no restart: success, usage error, does not fit
MAX_CRASHES_IN_A_ROW = 5
HEALTHY_SECONDS = 60.0  # a crash after this long is not counted as one in a row
MAX_PAUSE_SECONDS = 30.0

_SIGNAL_CAUSES = {
    signal.SIGKILL: "killed, perhaps by the system's OOM killer (see `dmesg`)",
    signal.SIGSEGV: "an invalid memory access in a library or driver",
    signal.SIGBUS: "a memory-mapped file was removed or truncated, or RAM is faulty",
    signal.SIGABRT: "a library aborted",
}


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker process gets from its supervisor.

    ``listener``: Unix socket for connections from the relay. ``supervisor_pid``: the process to signal.
    ``restarts``: number of restarts before this worker. ``mark_ready``: let clients in. ``mark_lost``: accept
    no more connections; what follows is cleanup before a restart. ``handover_file``: a private file through
    which a worker can leave data for the next; removed with the supervisor.
    """

    listener: socket.socket
    supervisor_pid: int
    restarts: int
    mark_ready: Callable[[], None]
    mark_lost: Callable[[], None]
    handover_file: Path


def supervise(*listeners: socket.socket) -> WorkerContext:
    """Fork the relay and the worker, and restart crashed workers; returns only in worker processes.

    The supervisor itself leaves with ``SystemExit`` when the worker has stopped on request, cannot start, or
    has crashed too often in a row. ``listeners``: the sockets that clients connect to, bound but not
    listening. Raises ``CannotListen``.
    """
    for listener in listeners:
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            host, port = listener.getsockname()[:2]
            raise listen_error(host, port, error) from error
    try:
        folder = tempfile.mkdtemp(prefix="vlfit-")  # readable by this user only
        worker_listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        worker_listener.bind(f"{folder}/server")
        worker_listener.listen(BACKLOG)
    except OSError as error:  # a full disk, a path that is too long for a socket
        raise CannotListen(
            f"cannot make a socket in the folder for temporary files: {error.strerror or error}",
            "Free some disk space, or set TMPDIR to another folder with a short path.",
        ) from error
    state = mmap.mmap(-1, 1)  # shared with the forked processes
    life_pipe = os.pipe()  # its write end stays open for as long as this process lives
    supervisor = _Supervisor(listeners, worker_listener, folder, state, life_pipe)
    try:
        return supervisor.run()
    except BaseException:  # SystemExit, unless fork fails
        if os.getpid() == supervisor.pid:
            shutil.rmtree(folder, ignore_errors=True)
        raise


class _Supervisor:
    def __init__(
        self,
        listeners: tuple[socket.socket, ...],
        worker_listener: socket.socket,
        folder: str,
        state: mmap.mmap,
        life_pipe: tuple[int, int],
    ) -> None:
        self.pid = os.getpid()
        self._listeners = listeners
        self._worker_listener = worker_listener
        self._path = f"{folder}/server"
        self._handover_file = Path(folder, "handover")
        self._state = state
        self._life_pipe = life_pipe
        self._worker_pid = 0
        self._relay_pid = 0
        self._stopping = False

    def run(self) -> WorkerContext:
        # Inherited by the relay: a worker may die before the relay has installed its handler.
        before = signal.signal(SERVER_LEFT_SIGNAL, signal.SIG_IGN)
        self._relay_pid = relay_pid = os.fork()
        if relay_pid == 0:
            self._become_relay()
        signal.signal(SERVER_LEFT_SIGNAL, before)
        signal.signal(signal.SIGINT, self._forward_signal)
        signal.signal(signal.SIGTERM, self._forward_signal)
        restarts = in_a_row = 0
        while True:
            self._state[0] = DEAD if restarts else STARTING
            self._worker_pid = os.fork()
            if self._worker_pid == 0:
                return self._become_worker(restarts)
            if self._stopping:  # the signal came before the fork
                os.kill(self._worker_pid, signal.SIGTERM)
            began = time.monotonic()
            ended, status = os.waitpid(-1, 0)
            if ended == relay_pid:
                log.error("the relay process, which holds the connections, died; stopping the server")
                with suppress(ProcessLookupError):
                    os.kill(self._worker_pid, signal.SIGKILL)
                sys.exit(1)
            self._worker_pid = 0
            was_up, self._state[0] = self._state[0] in (SERVING, LOST), DEAD
            code = os.waitstatus_to_exitcode(status)
            # A first worker that cannot start has reported why.
            if self._stopping or code in FINAL_EXIT_CODES or (not was_up and not restarts):
                self._end_relay(relay_pid)
                sys.exit(code if code >= 0 else 128 - code)
            in_a_row = 1 if was_up and time.monotonic() - began > HEALTHY_SECONDS else in_a_row + 1
            if in_a_row > MAX_CRASHES_IN_A_ROW:
                log.error("the server crashed %d times in a row; giving up", in_a_row)
                self._end_relay(relay_pid)
                sys.exit(1)
            self._signal_server_left()
            restarts += 1
            log.error("the server's worker process died: %s; restarting it", describe_exit(code))
            self._pause(min(2.0 ** (in_a_row - 1) - 1, MAX_PAUSE_SECONDS))
            if self._stopping:
                self._end_relay(relay_pid)
                sys.exit(0)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        if self._worker_pid:
            with suppress(ProcessLookupError):  # it has just exited
                os.kill(self._worker_pid, number)

    @staticmethod
    def _end_relay(pid: int) -> None:
        """End the relay once clients have received what was sent last."""
        os.kill(pid, FINISH_SIGNAL)
        os.waitpid(pid, 0)

    def _become_worker(self, restarts: int) -> WorkerContext:
        os.setsid()  # Ctrl-C goes to the supervisor, which forwards it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for listener in self._listeners:
            listener.close()
        self._exit_with_supervisor()

        def mark_ready() -> None:
            self._state[0] = SERVING

        def mark_lost() -> None:
            self._state[0] = LOST
            self._signal_server_left()

        return WorkerContext(
            self._worker_listener, self.pid, restarts, mark_ready, mark_lost, self._handover_file
        )

    def _signal_server_left(self) -> None:
        """Tell the relay that the worker accepts no connections: its socket's queue belongs to the supervisor
        too and outlives the worker, so connections in it would get no error.
        """
        with suppress(ProcessLookupError):
            os.kill(self._relay_pid, SERVER_LEFT_SIGNAL)

    def _become_relay(self) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._worker_listener.close()
        self._exit_with_supervisor()
        try:
            asyncio.run(relay(self._listeners, self._path, lambda: self._state[0]))
        finally:
            os._exit(1)

    def _exit_with_supervisor(self) -> None:
        """Exit when the supervisor does, however it ended."""
        read, write = self._life_pipe
        os.close(write)

        def wait() -> None:
            os.read(read, 1)
            shutil.rmtree(
                os.path.dirname(self._path), ignore_errors=True
            )  # in case the supervisor was killed
            os._exit(1)

        threading.Thread(target=wait, name="vlfit-supervisor-watch", daemon=True).start()


def describe_exit(code: int) -> str:
    """How a process ended; a negative ``code`` is minus the signal that killed it."""
    if code >= 0:
        return f"it exited with code {code}"
    try:
        name = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    return f"{name.name}, {_SIGNAL_CAUSES[name]}" if name in _SIGNAL_CAUSES else name.name

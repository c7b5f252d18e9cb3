"""The processes of decode workers, seen from the server: the fork server, and a connection to each worker."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from vlfit.errors import DecodersUnavailable
from vlfit.images.decode_wire import (
    COMMAND,
    END,
    FORK,
    READY,
    REPLY,
    BrokenProtocol,
    Connection,
    ConnectionEnded,
)
from vlfit.units import MIB

# What a program needs to start at all; keys and tokens stay here.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")
# One thread per worker in every library: threads take address space, and pictures are decoded side by side.
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_START_SECONDS = 60  # on a slow disk, with nothing cached
_SETTLE_SECONDS = 2.0
# A worker that keeps more than this of its last picture is replaced: it counts towards its limit. More than
# ``sandbox.MALLOC_KEEPS_BYTES``, as malloc fragments.
MAX_KEPT_BYTES = 24 * MIB


class Worker:
    """One worker process: its ``pid`` and the ``connection`` to it. ``owes_end``: a job's last message."""

    def __init__(self, pid: int, connection: Connection, server: "ForkServer") -> None:
        self.pid = pid
        self.connection = connection
        self._server = server
        self.owes_end = False

    def settle(self) -> bool:
        """Read the end of its last job. Returns whether the worker is fit for the next one."""
        if not self.owes_end:
            return not self.connection.has_ended()
        deadline = time.monotonic() + _SETTLE_SECONDS

        def check_deadline() -> None:
            if time.monotonic() > deadline:
                raise ConnectionEnded("it does not finish")

        self.connection.on_tick = check_deadline
        try:
            kept = self.connection.receive().get("kept")
        except (ConnectionEnded, BrokenProtocol):
            return False
        self.owes_end = False
        if not isinstance(kept, int) or kept > MAX_KEPT_BYTES:
            return False
        return not self.connection.has_ended()

    def end(self) -> int | None:
        """Kill the process, unless it has ended. Returns the status it ended with; None: its server is gone,
        and it with that.
        """
        self.connection.close()
        with suppress(DecodersUnavailable):
            return self._server.end(self.pid)
        return None


class ForkServer:
    """Forks workers, ends them, and ends with all of them when closed, or when this process ends.

    Raises ``DecodersUnavailable`` if it does not start, or has ended.
    """

    def __init__(self) -> None:
        ours, theirs = _socketpair()
        ours.settimeout(_START_SECONDS)
        self._control = ours
        self._lock = threading.Lock()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # -P: not from the current folder. -S: the paths of this process, as they are.
                    [sys.executable, "-P", "-S", "-m", "vlfit.images.decode_worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(),
                )
            except OSError as error:
                raise _unavailable(str(error)) from None
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self) -> Worker:
        """A new worker, ready at once but for the first, which waits for the imports."""
        ours, theirs = _socketpair()
        with theirs:
            try:
                pid = self._ask(FORK, 0, theirs.fileno())
            except DecodersUnavailable:
                ours.close()
                raise
        return Worker(pid, Connection(ours, ticks=True), self)

    def end(self, pid: int) -> int:
        """Kill a worker, unless it has ended. Returns the status that it ended with (``os.waitpid``)."""
        return self._ask(END, pid)

    def close(self) -> None:
        if not self._ready:
            self._process.kill()  # it would import to the end first
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        self._control.close()
        self._process.wait()

    def forget(self) -> None:
        """Close the socket alone, which a fork of this process has inherited."""
        self._control.close()
        self._process.returncode = 0  # not a child of the fork

    def _ask(self, command: bytes, number: int, *fds: int) -> int:
        with self._lock:
            try:
                if not self._ready:
                    self._ready = self._reply() == READY
                if fds:
                    socket.send_fds(self._control, [COMMAND.pack(command, number)], fds)
                else:
                    self._control.sendall(COMMAND.pack(command, number))
                return self._reply()
            except (OSError, ConnectionEnded) as error:
                raise _unavailable(str(error)) from None

    def _reply(self) -> int:
        data = self._control.recv(REPLY.size)
        if len(data) < REPLY.size:
            raise ConnectionEnded(f"it ended with exit code {self._process.wait()}")
        reply: int = REPLY.unpack(data)[0]
        return reply


def _socketpair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:  # no file descriptor is left
        raise _unavailable(str(error)) from None


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    return {
        **kept,
        **dict.fromkeys(_THREADS, "1"),
        "PYTHONPATH": os.pathsep.join(paths),
        "MALLOC_ARENA_MAX": "1",
    }


def _unavailable(why: str) -> DecodersUnavailable:
    return DecodersUnavailable(
        f"the processes that decode pictures do not run: {why}",
        "See whether python -c 'import vlfit.images.decode' works where vlfit is installed.",
    )

"""Start and end decode workers: a fork server, and a connection to each worker."""

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vlfit.errors import DecodersUnavailable
from vlfit.images.decode_wire import (
    BEGIN_SECONDS,
    COMMAND,
    END,
    FORK,
    READY,
    REPLY,
    Connection,
    ConnectionEnded,
)
from vlfit.units import MIB

# What a program needs to start at all, and the time zone; keys and tokens stay here.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "TZ")
# One thread per worker in every library: threads take address space, and pictures are decoded side by side.
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
START_SECONDS = 60  # on a slow disk, with nothing cached
_REPLY_SECONDS = 5.0  # to fork or end a worker, which takes milliseconds
_MAX_NICE = 19
# After each job a worker says how many bytes it keeps. One that keeps more than this of its last picture is
# replaced: it counts towards its limit. More than ``sandbox.MALLOC_KEEPS_BYTES``, as malloc fragments.
MAX_KEPT_BYTES = 24 * MIB


class Worker:
    """A worker process and the connection to it; ``ForkServer.fork`` makes it.

    Send jobs over ``connection``. ``end_pending``: the number that ended the last one (``MAX_KEPT_BYTES``) is
    still to be read.
    """

    def __init__(self, pid: int, connection: Connection, server: "ForkServer") -> None:
        self.pid = pid
        self.connection = connection
        self._server = server
        self.end_pending = False

    def lower_priority(self, steps: int) -> None:
        """Add ``steps`` to the niceness of the process, up to 19. It cannot be taken back."""
        with suppress(OSError):  # it has ended
            nice = os.getpriority(os.PRIO_PROCESS, self.pid)
            os.setpriority(os.PRIO_PROCESS, self.pid, min(nice + steps, _MAX_NICE))

    def end(self) -> int | None:
        """Close the connection, and kill the process if it runs. Returns its status, as from ``os.waitpid``.

        0 if it was ended here before; None if the fork server has ended, and all workers with it.
        """
        self.connection.close()
        with suppress(DecodersUnavailable):
            return self._server.end(self.pid)
        return None


class NotBegun(Exception):
    """A worker did not begin its job in time: it was stopped, or is stuck."""

    @property
    def unavailable(self) -> DecodersUnavailable:
        """The error for a client if no other worker begins either."""
        return DecodersUnavailable(
            f"a process that decodes pictures did not begin within {BEGIN_SECONDS:g} s",
            "Try again. See whether it was stopped, or this computer does too much at once.",
        )


def check_has_begun(connection: Connection, seconds: float) -> None:
    """Raise ``NotBegun`` if a worker has sent nothing ``BEGIN_SECONDS`` after its job was sent.

    ``seconds``: since the job was sent. Call it while waiting for the worker's first message.
    """
    if seconds > BEGIN_SECONDS and not connection.has_received():
        raise NotBegun


def resident_bytes(server_pid: int, worker_pids: Iterable[int]) -> int:
    """RAM in use by a fork server and its workers, in bytes; shared pages count once.

    0 for processes that have ended, and on a system without ``/proc``.
    """
    shared = _resident_bytes(server_pid)
    return shared + sum(max(_resident_bytes(pid) - shared, 0) for pid in worker_pids)


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


class ForkServer:
    """A process that imports the decoders and forks workers. All end on ``close``, or with this process.

    ``module``: run by ``python -m`` with a socket; calls ``decode_worker.run_fork_server``. The constructor,
    ``fork`` and ``end`` raise ``DecodersUnavailable`` if the fork server did not start, has ended, or does
    not answer in 5 s (60 s while it imports). It is then killed with its workers, and ``has_failed`` is true.
    """

    def __init__(self, module: str = "vlfit.images.decode_worker") -> None:
        ours, theirs = _socketpair()
        ours.settimeout(START_SECONDS)
        self._control = ours
        self._lock = threading.Lock()
        self._failure = ""
        with theirs:
            try:
                self._process = start_python(module, theirs.fileno())
            except OSError as error:
                ours.close()
                raise _no_process(error) from None
        self._ready = False

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    @property
    def has_failed(self) -> bool:
        """Whether the fork server has ended or was killed for not answering; it cannot be used any more."""
        return bool(self._failure)

    def fork(self) -> Worker:
        """Fork a worker that waits for jobs. The caller must ``end`` it.

        The first call waits for the imports, up to a minute. Raises ``DecodersUnavailable`` (see the
        class).
        """
        ours, theirs = _socketpair()
        with theirs:
            try:
                pid = self._ask(FORK, 0, theirs.fileno())
            except DecodersUnavailable:
                ours.close()
                raise
        return Worker(pid, Connection(ours, ticks=True), self)

    def end(self, pid: int) -> int:
        """Kill the worker ``pid`` if it runs. Returns its status, as from ``os.waitpid``; 0 if unknown."""
        return self._ask(END, pid)

    def close(self) -> None:
        """End the fork server and all its workers. A ``fork`` that waits raises."""
        if not self._ready:
            self._process.kill()  # it would import to the end first
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        self._control.close()
        self._wait()

    def close_inherited(self) -> None:
        """In a fork of this process, close the inherited socket; the parent's fork server goes on."""
        self._control.close()
        self._process.returncode = 0  # not a child of the fork

    def _ask(self, command: bytes, number: int, *fds: int) -> int:
        with self._lock:
            if self._failure:
                raise _unavailable(self._failure)
            try:
                if not self._ready:
                    self._ready = self._reply() == READY
                    self._control.settimeout(_REPLY_SECONDS)
                if fds:
                    socket.send_fds(self._control, [COMMAND.pack(command, number)], fds)
                else:
                    self._control.sendall(COMMAND.pack(command, number))
                return self._reply()
            except (OSError, ConnectionEnded) as error:
                self._failure = "no answer in time" if isinstance(error, TimeoutError) else str(error)
                self._process.kill()  # a late answer would be taken for that to the next command
                raise _unavailable(self._failure) from None

    def _reply(self) -> int:
        data = self._control.recv(REPLY.size)
        if len(data) < REPLY.size:
            raise ConnectionEnded(f"it ended with exit code {self._wait()}")
        reply: int = REPLY.unpack(data)[0]
        return reply

    def _wait(self) -> int:
        """Wait for its end; kill it if that does not come."""
        try:
            return self._process.wait(_REPLY_SECONDS)
        except subprocess.TimeoutExpired:  # it was stopped, perhaps
            self._process.kill()
            return self._process.wait()


def start_python(module: str, fd: int, *arguments: str) -> subprocess.Popen[bytes]:
    """Start ``python -m module FD ARGUMENTS`` with a clean environment, the open file ``fd`` and no other.

    It finds the modules that this process finds. Raises ``OSError``.
    """
    return subprocess.Popen(
        # -P: not from the current folder. -S: the paths of this process, as they are.
        [sys.executable, "-P", "-S", "-m", module, str(fd), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(fd,),
        env=_environment(),
    )


def _socketpair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise _no_process(error) from None


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    return {
        **kept,
        **dict.fromkeys(_THREADS, "1"),
        "PYTHONPATH": os.pathsep.join(paths),
        "MALLOC_ARENA_MAX": "1",
    }


_IMPORT_HINT = "See whether python -c 'import vlfit.images.decode' works where vlfit is installed."
_LATER_HINT = "Try again in a moment."
# No file descriptor, memory or process number is left.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


def _no_process(error: OSError) -> DecodersUnavailable:
    return _unavailable(str(error), _LATER_HINT if error.errno in _SHORTAGES else _IMPORT_HINT)


def _unavailable(why: str, hint: str = _IMPORT_HINT) -> DecodersUnavailable:
    return DecodersUnavailable(f"the processes that decode pictures do not run: {why}", hint)

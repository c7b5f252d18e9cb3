"""A small process of its own for chat templates: the parent's side.

A template is code by whoever made the checkpoint. ``template_worker.py`` runs it in Jinja's sandbox within
limits of the kernel: memory, CPU time, no files written. This side bounds how long it waits and how much it
receives. On macOS the kernel does not limit memory: there CPU time and time alone end a template.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vlfit.errors import CheckpointError, InvalidRequest, TemplatesUnavailable
from vlfit.images.decode_process import START_SECONDS, start_python
from vlfit.images.decode_wire import (
    EXIT_NO_MEMORY,
    TICK_SECONDS,
    BrokenProtocol,
    Connection,
    ConnectionEnded,
)
from vlfit.units import MIB

WORKER = "vlfit.prompt.template_worker"
_GROWTH = 8  # times as long as the request a result may be
_END_SECONDS = 5.0  # for a process that was killed
_HINT = "No model's needs that, but for megabytes of text: fetch it from where the model's makers offer it."
_AGAIN = "Try again. See whether this computer lacks memory, or something kills or stops the process."

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one request may take: parsing and compiling a template, or rendering it.

    ``memory``: bytes of address space beyond what the process has after its start. ``cpu_seconds``: of CPU
    time; the kernel may let it be one more. ``wall_seconds``: until this side kills the process.
    ``result_bytes``: of the result, beyond ``_GROWTH`` times what was sent.
    """

    memory: int = 512 * MIB
    cpu_seconds: int = 10
    wall_seconds: float = 60.0
    result_bytes: int = 16 * MIB


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """``literals``: all literal text of a template, joined by NUL. ``variables``: names that it reads."""

    literals: str
    variables: frozenset[str]


class TemplateRefusal(Exception):
    """The template called ``raise_exception``, with this message."""


class TemplateFailure(Exception):
    """The template failed as code does; the message is Python's."""


class TemplateProcess:
    """Parses and renders chat templates in a process that starts when it is first needed. Thread-safe.

    ``module``: run by ``python -m``; calls ``template_worker.run_worker``. Requests are answered one after
    another. A process that was killed or stopped is replaced, and the request sent once more; one that a
    template ended is replaced at the next request. A fork of this process gets a process of its own.

    ``read`` and ``render`` raise ``CheckpointError`` if the template exceeds ``limits``, and
    ``TemplatesUnavailable`` if the process does not start, or was killed or stopped twice.
    """

    def __init__(self, module: str = WORKER, limits: TemplateLimits | None = None) -> None:
        self._module = module
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._closed = False
        _instances.add(self)

    @property
    def pid(self) -> int | None:
        """Process id of the process; None if none was started."""
        worker = self._worker
        return None if worker is None else worker.process.pid

    def start(self) -> None:
        """Start the process, if there is none, without waiting for it. Failures are raised by later calls."""
        if self._lock.acquire(blocking=False):
            try:
                if self._worker is None and not self._closed:
                    with suppress(TemplatesUnavailable):
                        self._worker = self._spawn()
            finally:
                self._lock.release()

    def read(self, source: str) -> TemplateFacts:
        """Parse and compile the template ``source``. Raises ``CheckpointError`` also if that fails."""
        try:
            reply = self._ask({"source": source})
        except TemplateFailure as error:
            raise failed(str(error)) from None
        return TemplateFacts(reply["literals"], frozenset(reply["variables"]))

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Render the template ``source``. ``variables``: values that JSON has.

        Also raises ``TemplateRefusal``, ``TemplateFailure``, ``CheckpointError`` as ``read`` does, and
        ``InvalidRequest`` for values too deep within each other.
        """
        text: str = self._ask({"source": source, "variables": variables})["text"]
        return text

    def close(self) -> None:
        """End the process. Running and later requests raise ``TemplatesUnavailable``."""
        self._closed = True
        worker = self._worker
        if worker is not None:
            worker.process.kill()  # wakes a thread that waits for it
        with self._lock:
            self._discard()

    def forget(self) -> None:
        """In a fork of this process: leave the parent's process to it."""
        self._lock = threading.Lock()
        if self._worker is not None:
            self._worker.connection.close()
            self._worker.process.returncode = 0  # not a child of the fork
        self._worker = None

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            body = _encode(request).encode("utf-8", "surrogatepass")
        except RecursionError:
            raise InvalidRequest(
                "the messages have lists or objects too deep within each other",
                "Send flatter ones.",
                param="messages",
            ) from None
        with self._lock:
            try:
                reply = self._exchange(body)
            except _Lost:
                try:
                    reply = self._exchange(body)
                except _Lost as lost:
                    raise unavailable(str(lost), _AGAIN) from None
        kind = reply.get("error")
        if kind is None:
            return reply
        message = str(reply.get("message", ""))
        match kind:
            case "refused":
                raise TemplateRefusal(message)
            case "failed":
                raise TemplateFailure(message)
            case "syntax":
                raise CheckpointError(
                    f"the chat template has an error in line {reply.get('line')}: {message}",
                    "Fetch the checkpoint's chat_template.json (or .jinja) again.",
                )
            case "nested":
                raise CheckpointError(
                    "the chat template has more blocks within each other than can be read",
                    "No model's is so: fetch the checkpoint from where its makers offer it.",
                )
            case _:
                raise _exceeds(f"makes a prompt of more than {self._most(body) / MIB:.0f} MiB")

    def _most(self, body: bytes) -> int:
        return self._limits.result_bytes + _GROWTH * len(body)

    def _exchange(self, body: bytes) -> dict[str, Any]:
        """Send one request and receive its reply. Raises ``_Lost`` if the process was killed or stopped."""
        worker = self._ready_worker()
        connection, most = worker.connection, self._most(body)
        connection.on_tick = _Wait(worker.process.pid, self._limits.wall_seconds).check
        try:
            connection.send({"size": len(body), "most": most}, body)
            size = connection.receive()["size"]
            if size > most:
                raise BrokenProtocol(f"a reply of {size} bytes")
            reply: dict[str, Any] = _decode(str(connection.receive_bytes(size), "utf-8", "surrogatepass"))
            return reply
        except ConnectionEnded:
            raise self._ended() from None
        except _Waited:
            self._discard()
            raise _exceeds(f"did not end within {self._limits.wall_seconds:g} s") from None
        except (BrokenProtocol, KeyError, TypeError, ValueError):
            self._discard()
            raise _exceeds("made its process send what is no reply") from None
        except BaseException:
            self._discard()  # a late reply would be taken for that to the next request
            raise

    def _ready_worker(self) -> "_Worker":
        """The process, ready for a request."""
        if self._worker is not None and self._worker.ready and self._worker.connection.has_ended():
            self._discard()  # it was killed, or has exited to be replaced
        if self._closed:
            raise unavailable("it was closed", "The program is ending.")
        if self._worker is None:
            self._worker = self._spawn()
        worker = self._worker
        if worker.ready:
            return worker
        worker.connection.on_tick = _Wait(worker.process.pid, START_SECONDS).check
        try:
            worker.connection.receive()
        except (ConnectionEnded, BrokenProtocol):
            status = self._discard(kill=False)
            if status == -signal.SIGKILL:
                raise _Lost("it was killed") from None
            raise self._not_started(f"it ended with exit code {status}") from None
        except _Waited:
            self._discard()
            raise self._not_started(f"it did not start within {START_SECONDS} s") from None
        except BaseException:
            self._discard()
            raise
        worker.ready = True
        return worker

    def _not_started(self, why: str) -> TemplatesUnavailable:
        return unavailable(
            why, f"See whether python -c 'import {self._module}' works where vlfit is installed."
        )

    def _spawn(self) -> "_Worker":
        limits = self._limits
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise unavailable(str(error), "Try again in a moment.") from None
        with theirs:
            try:
                process = start_python(
                    self._module, theirs.fileno(), str(limits.memory), str(limits.cpu_seconds)
                )
            except OSError as error:
                ours.close()
                raise unavailable(str(error), "Try again in a moment.") from None
        return _Worker(process, Connection(ours, ticks=True))

    def _ended(self) -> Exception:
        """The error for a process that ended within a request."""
        status = self._discard(kill=False)
        if status in (0, -signal.SIGKILL):  # 0: it had just chosen to be replaced
            return _Lost("it was killed")
        if status == -signal.SIGXCPU:
            return _exceeds(f"takes more than {self._limits.cpu_seconds} s of CPU time")
        if status == EXIT_NO_MEMORY:
            return _exceeds(f"takes more than {self._limits.memory / MIB:.0f} MiB of memory")
        return _exceeds(f"ended the process that renders it, with exit code {status}")

    def _discard(self, *, kill: bool = True) -> int | None:
        """End the process and forget it. Returns its exit code, as ``Popen`` has it."""
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        process = worker.process
        worker.connection.close()
        if kill:
            process.kill()
        try:
            return process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def failed(message: str) -> CheckpointError:
    """The error for a template that fails as code does."""
    return CheckpointError(
        f"the chat template fails: {message}", "Fetch the checkpoint's chat_template.json (or .jinja) again."
    )


def _exceeds(what: str) -> CheckpointError:
    return CheckpointError(f"the chat template {what}", _HINT)


def unavailable(why: str, hint: str) -> TemplatesUnavailable:
    """The error for a process that does not run."""
    return TemplatesUnavailable(f"the process that renders chat templates does not run: {why}", hint)


@dataclass(slots=True)
class _Worker:
    """A process that was started, and the connection to it; ``ready`` once it has said so."""

    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False


class _Lost(Exception):
    """The process was killed or stopped, by nothing that a template does."""


class _Waited(Exception):
    """The process did not answer in time."""


class _Wait:
    """Ends a wait for the process ``pid`` after ``seconds``, or if it was stopped (SIGSTOP)."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid = pid
        self._left = seconds
        self._last = time.monotonic()

    def check(self) -> None:
        """Raise ``_Waited`` or ``_Lost``; called every ``TICK_SECONDS``."""
        now = time.monotonic()
        self._left -= min(now - self._last, 2 * TICK_SECONDS)  # while we are stopped no time passes
        self._last = now
        if self._left < 0:
            raise _Waited
        if _is_stopped(self._pid):
            raise _Lost("it was stopped")


def _is_stopped(pid: int) -> bool:
    """Whether the child ``pid`` was stopped; False where that cannot be asked (macOS before Python 3.13)."""
    if not hasattr(os, "waitid"):
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _close_all() -> None:
    for process in list(_instances):
        process.close()


def _forget_all() -> None:
    for process in list(_instances):
        process.forget()


_instances: "weakref.WeakSet[TemplateProcess]" = weakref.WeakSet()
atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)

# For the templates of all models of this process.
TEMPLATES = TemplateProcess()

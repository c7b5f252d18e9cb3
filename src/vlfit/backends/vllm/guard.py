"""Run a program and leave none of its processes behind: ``python guard.py GENTLE FIRM COMMAND ...``.

Started by its path, with the standard library alone, so that it runs within milliseconds. Standard input is a
pipe from the parent: if it closes, if the parent dies, or on the letter ``s``, the program and all that it
started are stopped: SIGINT to the program, after GENTLE seconds SIGTERM to all, after FIRM more SIGKILL. The
letter ``t`` skips SIGINT, ``k`` goes to SIGKILL. On Linux orphans become children of this process, so all are
found. Exits with the program's exit code.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path
from types import FrameType

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LOOK_SECONDS = 1.0  # between checks whether the parent lives
_STEP_SECONDS = 0.05  # between checks while stopping
_NOT_FOUND = 127  # as in a shell
_PROC = Path("/proc")


def main() -> int:
    """Run the command of ``sys.argv`` and wait until all its processes have ended.

    Returns its exit code, 128 plus the signal's number if a signal ended it.
    """
    gentle, firm, command = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    parent = os.getppid()
    _prctl(_SET_CHILD_SUBREAPER)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _handle_signal)
    guarded = _Guarded(_start(command), gentle, firm)
    watched = [reading, sys.stdin.fileno()]
    while not guarded.all_ended():
        wait = _STEP_SECONDS if guarded.ending else _LOOK_SECONDS
        ready, _, _ = select.select(watched, [], [], wait)
        if reading in ready:
            signals = set(os.read(reading, 512)) & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
            if signals:
                guarded.end()
        if sys.stdin.fileno() in ready:
            word = os.read(sys.stdin.fileno(), 512)
            if not word:
                watched = [reading]
            guarded.end(firmly=b"t" in word, at_once=b"k" in word)
        if os.getppid() != parent:
            guarded.end()
    return guarded.code


def _handle_signal(_signal: int, _frame: FrameType | None) -> None:
    """Handler: the wake-up pipe carries the signal's number."""


def _start(command: list[str]) -> int:
    """Start the program in its own process group; it gets SIGKILL if this process dies first."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.execvp(command[0], command)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(_NOT_FOUND)


def _prctl(option: int, value: int = 1) -> None:
    """Call prctl(2) if the system has it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _Guarded:
    """The program and all its processes."""

    def __init__(self, pid: int, gentle: float, firm: float) -> None:
        self._pid, self._gentle, self._firm = pid, gentle, firm
        self._status: int | None = None  # None while it runs
        self._began_ending: float | None = None
        self._terminated = False

    @property
    def ending(self) -> bool:
        return self._began_ending is not None or self._status is not None

    @property
    def code(self) -> int:
        code = os.waitstatus_to_exitcode(self._status or 0)
        return code if code >= 0 else 128 - code

    def end(self, *, firmly: bool = False, at_once: bool = False) -> None:
        """Begin to stop the program. Calling it again only makes it quicker."""
        if self._began_ending is None:
            self._began_ending = time.monotonic()
            if not firmly:
                self._send(self._pid, signal.SIGINT)
        if firmly or at_once:
            self._gentle = 0.0
        if at_once:
            self._firm = 0.0

    def all_ended(self) -> bool:
        """Whether no process is left. Continues stopping if that has begun or the program has ended."""
        self._reap()
        if not self.ending:
            return False
        left = self._left()
        if self._status is not None and not left:
            self._reap()  # leave no zombies
            return True
        now = time.monotonic()
        if self._began_ending is None:
            self._began_ending = now
        if self._status is not None:
            self._gentle = 0.0  # the program is gone: its processes need not wait
        waited = now - self._began_ending
        if waited >= self._gentle + self._firm and self._terminated:
            for pid in left:
                self._send(pid, signal.SIGKILL)
        elif waited >= self._gentle and not self._terminated:
            self._terminated = True
            self._began_ending = now - self._gentle
            for pid in left:
                self._send(pid, signal.SIGTERM)
        return False

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self._pid:
                    self._status = status

    def _left(self) -> list[int]:
        """All descendants of this process that are not zombies."""
        parents: dict[int, int] = {}
        for entry in _PROC.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                words = entry.read_text("ascii", "replace").rpartition(")")[2].split()
                if words[0] not in "ZX":
                    parents[int(entry.parent.name)] = int(words[1])
        if not parents:
            return [self._pid] if self._status is None else []
        found, look = [], [os.getpid()]
        while look:
            parent = look.pop()
            children = [pid for pid, above in parents.items() if above == parent]
            found += children
            look += children
        return found

    @staticmethod
    def _send(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())

"""The program ``exiftool``, kept running: a start for each picture would take longer than all it does there.

Knows where it is found, how it is sent commands (``-stay_open``), and how one that hangs or dies is told.
Does not know what is read or written (``exif.py``).
"""

import os
import secrets
import select
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vlfit.errors import UsageError

_SECONDS = 60.0  # for one command; a slow network drive takes some
_STOP_SECONDS = 2.0
_CONFIGURATION = Path(__file__).with_name("ends_with_vlfit.pl")
_INSTALL = (
    "Install it: apt install libimage-exiftool-perl (Debian, Ubuntu), brew install exiftool (macOS), "
    "winget install OliverBetz.ExifTool (Windows). --sidecar xmp and --sidecar txt need nothing."
)


class ExiftoolFailed(Exception):
    """Why a command has no answer: it could not be started, took too long, or ended."""


class Exiftool:
    """Runs commands one after another, from one thread at a time. Started with the first command, and again
    after a failure; ended with this object, or with this process. Raises ``UsageError`` where there is none.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        program = shutil.which("exiftool")
        if program is None:
            raise UsageError("--sidecar exif needs exiftool, and there is none on PATH", _INSTALL)
        self._start = [os.path.abspath(program), "-config", str(_CONFIGURATION)]
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Exiftool] | None = None

    def run(self, arguments: Sequence[bytes]) -> str:
        """What exiftool says to ``arguments``, on stdout and stderr together. Raises ``ExiftoolFailed``."""
        try:
            if any(set(argument) & set(b"\r\n") for argument in arguments):
                return self._run_alone(arguments)
            process = self._running()
            number = secrets.randbelow(10**9)  # nothing in a file can look like the end of this answer
            command = b"".join(argument + b"\n" for argument in (*arguments, b"-execute%d" % number))
            return _shown(self._exchange(process, command, b"{ready%d}" % number))
        except OSError as error:
            self.stop()
            raise ExiftoolFailed(f"exiftool cannot be run: {error.strerror or error}") from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the program, if it runs. It takes its unfinished copy of a picture away."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        process = subprocess.Popen(
            [*self._start, "-stay_open", "True", "-@", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches vlfit alone, which ends the run in order
        )
        self._process, self._end = process, weakref.finalize(self, _stop, process)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _exchange(self, process: "subprocess.Popen[bytes]", command: bytes, ready: bytes) -> bytes:
        """Send ``command``; what is said before the line ``ready``."""
        assert process.stdin is not None
        assert process.stdout is not None
        sends, reads = process.stdin.fileno(), process.stdout.fileno()
        watched = select.poll()
        watched.register(reads, select.POLLIN)
        watched.register(sends, select.POLLOUT)
        said, end = b"", time.monotonic() + self._seconds
        while not said.endswith((ready + b"\n", ready + b"\r\n")):
            events = dict(watched.poll(max(end - time.monotonic(), 0) * 1000))
            if not events:
                raise ExiftoolFailed(f"exiftool took more than {self._seconds:g} s")
            if sends in events:
                try:
                    command = command[os.write(sends, command) :]
                except BrokenPipeError:
                    command = b""  # why it ended is read next
                if not command:
                    watched.unregister(sends)
            if reads in events:
                if not (more := os.read(reads, 65_536)):
                    raise ExiftoolFailed(f"exiftool ended: {_shown(said).strip() or 'it said nothing'}")
                said += more
        return said[: said.rindex(ready)]

    def _run_alone(self, arguments: Sequence[bytes]) -> str:
        """Commands that are sent end at the end of a line, and names of files may hold one."""
        try:
            ended = subprocess.run(
                [*self._start, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
                timeout=self._seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ExiftoolFailed(f"exiftool took more than {self._seconds:g} s") from None
        return _shown(ended.stdout)


def _environment() -> dict[str, str]:
    return {**os.environ, "VLFIT_PROCESS": str(os.getpid())}


def _shown(said: bytes) -> str:
    return said.decode("utf-8", "replace")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    with suppress(OSError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()

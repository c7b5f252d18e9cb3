"""The description in the picture's own file: EXIF in a JPEG, PNG, WebP or TIFF, written by ``exiftool``.

Knows which tags are read and written, and which pictures are left alone. Does not know EXIF, nor how the
program is run (``tasks/batch/sidecars/exif.py``).
"""

import html
import json
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
from dataclasses import dataclass
from pathlib import Path

from vlfit.errors import CannotWrite, UsageError
from vlfit.images.file_kinds import kind_of
from vlfit.tasks.batch.items import shown_name
from vlfit.tasks.batch.sidecars.writer import Left, Writer, read_original
from vlfit.units import MIB

# The program ``exiftool``, kept running: a start for each picture would take longer than all it does there.
#
# Knows where it is found, how it is sent commands (``-stay_open``), and how one that hangs or dies is told.
# Does not know what is read or written (``exif.py``).


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


_MOST = 128 * MIB
_KINDS = ("a JPEG", "a PNG", "a WebP", "a TIFF")
# How a box of Content Credentials begins in all formats: its type is a UUID. Older versions of exiftool see
# it in some formats only.
_C2PA = b"jumdc2pa\x00\x11\x00\x10\x80\x00\x00\xaa\x00\x38\x9b\x71"
_DESCRIPTION, _COMMENT = "IFD0:ImageDescription", "ExifIFD:UserComment"


@dataclass(frozen=True, slots=True)
class _Found:
    """What is in a file: its type as exiftool calls it, ``ImageDescription``, and ``UserComment``."""

    kind: str
    description: str
    comment: str


class ExifSidecar(Writer):
    """``backup``: the picture as it was stays beside it. ``keep_times``: the file's time stays as it was.

    Raises ``UsageError`` where exiftool is not installed.
    """

    def __init__(self, overwrite: bool, *, backup: bool = False, keep_times: bool = False) -> None:
        super().__init__(overwrite)
        # Without -overwrite_original exiftool keeps the first original as FILE_original.
        self._options = [*([] if backup else ["-overwrite_original"]), *(["-P"] if keep_times else [])]
        self._exiftool = Exiftool()

    def _write(self, path: Path, words: str) -> None:
        original = read_original(path, _MOST)
        if original is None:
            raise CannotWrite(f"{shown_name(path)} is not there any more", "Was it moved?")
        if kind_of(original.data[:32]) not in _KINDS:
            raise Left("in files of this kind vlfit writes no EXIF (--sidecar xmp goes beside any)")
        if _C2PA in original.data:
            raise Left("Content Credentials (C2PA) are in the file, and any change makes them void")
        try:
            found = self._read(original.path)
            _check(found)
            if self._may_replace(found.description, words, "the EXIF"):
                # UserComment may hold another program's settings.
                alike = found.comment in ("", found.description)
                self._put(original.path, words, (_DESCRIPTION, _COMMENT) if alike else (_DESCRIPTION,))
        except ExiftoolFailed as error:
            raise CannotWrite(
                f"{shown_name(path)} is left as it is: {error}", "--sidecar xmp puts the words beside it."
            ) from None

    def _read(self, path: Path) -> _Found:
        said = self._exiftool.run(
            [b"-j", b"-FileType", f"-{_DESCRIPTION}".encode(), f"-{_COMMENT}".encode(), os.fsencode(path)]
        )
        start, end = said.find("[{"), said.rfind("}]")
        try:
            # exiftool writes a description of digits as a number: it is taken as it stands there.
            (facts,) = json.loads(said[start : end + 2], strict=False, parse_int=str, parse_float=str)
        except ValueError:
            raise ExiftoolFailed(_reason(said)) from None
        texts = [str(facts.get(name, "")).strip() for name in ("FileType", "ImageDescription", "UserComment")]
        return _Found(*texts)

    def _put(self, path: Path, words: str, tags: tuple[str, ...]) -> None:
        text = html.escape(words, quote=False).replace("\n", "&#10;")  # -E: one line, which is what is sent
        values = [f"-{tag}={text}" for tag in tags]
        unfinished = path.with_name(f"{path.name}_exiftool_tmp")
        was_there = unfinished.exists()
        try:
            said = self._exiftool.run(
                [*(word.encode() for word in ["-E", *self._options, *values]), os.fsencode(path)]
            )
        except ExiftoolFailed:
            if not was_there:
                with suppress(OSError):
                    unfinished.unlink(missing_ok=True)  # exiftool, if it was killed, could not
            raise
        if "1 image files updated" not in said:
            raise ExiftoolFailed(_reason(said))


def _check(found: _Found) -> None:
    """Raises ``Left`` for files that are not to be changed."""
    if found.kind == "DNG":
        raise Left("it is DNG, a camera's raw picture")
    if found.kind == "TIFF" and found.description.startswith(("<?xml", "<OME", "ImageJ=")):
        raise Left("a microscope's program has its settings where the description would be")


def _reason(said: str) -> str:
    """Why exiftool did nothing, without the name of the file, which may be long."""
    lines = said.strip().splitlines()
    told = next((line for line in lines if line.startswith("Error")), lines[0] if lines else "nothing")
    return f"exiftool says: {told.removeprefix('Error: ').partition(' - /')[0].strip()}"

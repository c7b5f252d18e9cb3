"""EXIF sidecar: the description inside a JPEG, PNG, WebP or TIFF file, written by the program ``exiftool``.

exiftool is kept running (``-stay_open``), as starting it for each picture would dominate; it is restarted if
it hangs or dies.
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
from vlfit.tasks.batch.items import display_name
from vlfit.tasks.batch.sidecars.writer import SidecarWriter, Skipped, read_original
from vlfit.units import MIB

_TIMEOUT_S = 60.0  # per command, as network drives may be slow
_STOP_TIMEOUT_S = 2.0
_CONFIGURATION = Path(__file__).with_name("ends_with_vlfit.pl")
_INSTALL = (
    "Install it: apt install libimage-exiftool-perl (Debian, Ubuntu), brew install exiftool (macOS), "
    "winget install OliverBetz.ExifTool (Windows). --sidecar xmp and --sidecar txt do not need it."
)


class ExiftoolFailed(Exception):
    """exiftool could not be started, timed out, ended unexpectedly, or did not do what it was told."""


class Exiftool:
    """A running exiftool, started by the first command and again after a failure. Not thread-safe.

    ``seconds``: time limit of each command. The program is stopped when this object is freed. Raises
    ``UsageError`` if exiftool is not installed.
    """

    def __init__(self, seconds: float = _TIMEOUT_S) -> None:
        program = shutil.which("exiftool")
        if program is None:
            raise UsageError("--sidecar exif needs exiftool, which is not on PATH", _INSTALL)
        self._command = [os.path.abspath(program), "-config", str(_CONFIGURATION)]
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., Exiftool] | None = None

    def run(self, arguments: Sequence[bytes]) -> str:
        """Run exiftool with ``arguments``. Returns its stdout and stderr together.

        Raises ``ExiftoolFailed`` if exiftool cannot be started, ends or takes too long. Errors that it prints
        do not raise: they are in the returned text.
        """
        try:
            if any(set(argument) & set(b"\r\n") for argument in arguments):
                return self._run_alone(arguments)
            process = self._running()
            number = secrets.randbelow(10**9)  # random: no file content can look like the end
            command = b"".join(argument + b"\n" for argument in (*arguments, b"-execute%d" % number))
            return _decode(self._exchange(process, command, b"{ready%d}" % number))
        except OSError as error:
            self.stop()
            raise ExiftoolFailed(f"exiftool cannot be run: {error.strerror or error}") from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the program, if it runs, so that it removes its unfinished copy of a picture. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        process = subprocess.Popen(
            [*self._command, "-stay_open", "True", "-@", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches vlfit only, which shuts down in order
        )
        self._process, self._finalizer = process, weakref.finalize(self, _stop, process)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _exchange(self, process: "subprocess.Popen[bytes]", command: bytes, ready: bytes) -> bytes:
        """Send ``command``. Returns the output before the line ``ready``."""
        assert process.stdin is not None
        assert process.stdout is not None
        sends, reads = process.stdin.fileno(), process.stdout.fileno()
        watched = select.poll()
        watched.register(reads, select.POLLIN)
        watched.register(sends, select.POLLOUT)
        output, end = b"", time.monotonic() + self._seconds
        while not output.endswith((ready + b"\n", ready + b"\r\n")):
            events = dict(watched.poll(max(end - time.monotonic(), 0) * 1000))
            if not events:
                raise ExiftoolFailed(f"exiftool took more than {self._seconds:g} s")
            if sends in events:
                try:
                    command = command[os.write(sends, command) :]
                except BrokenPipeError:
                    command = b""  # the reason is read next
                if not command:
                    watched.unregister(sends)
            if reads in events:
                if not (more := os.read(reads, 65_536)):
                    raise ExiftoolFailed(f"exiftool ended: {_decode(output).strip() or 'no message'}")
                output += more
        return output[: output.rindex(ready)]

    def _run_alone(self, arguments: Sequence[bytes]) -> str:
        """Start exiftool for one command: a file name with a newline cannot be sent to the running one."""
        try:
            ended = subprocess.run(
                [*self._command, *arguments],
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
        return _decode(ended.stdout)


def _environment() -> dict[str, str]:
    return {**os.environ, "VLFIT_PROCESS": str(os.getpid())}


def _decode(output: bytes) -> str:
    return output.decode("utf-8", "replace")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    with suppress(OSError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


_MAX_BYTES = 128 * MIB
_KINDS = ("a JPEG", "a PNG", "a WebP", "a TIFF")
# Start of a Content Credentials box in all formats (a JUMBF type UUID). Older versions of exiftool do not
# recognize it in all of them.
_C2PA = b"jumdc2pa\x00\x11\x00\x10\x80\x00\x00\xaa\x00\x38\x9b\x71"
_DESCRIPTION, _COMMENT = "IFD0:ImageDescription", "ExifIFD:UserComment"


@dataclass(frozen=True, slots=True)
class _ExifTags:
    """Tags of a file: exiftool's file type, ``ImageDescription`` and ``UserComment``."""

    kind: str
    description: str
    comment: str


class ExifSidecar(SidecarWriter):
    """Writes the text into the picture's own file, as ``ImageDescription``.

    Also as ``UserComment``, unless that holds something other than the old description. Leaves alone files
    other than JPEG, PNG, WebP and TIFF; DNG and microscopes' TIFF files; and pictures with Content
    Credentials (C2PA).

    ``overwrite``: replace another description. ``backup``: keep the original picture as
    ``photo.jpg_original``. ``keep_times``: keep the file's modification time. Raises ``UsageError`` if
    exiftool is not installed.
    """

    def __init__(self, overwrite: bool, *, backup: bool = False, keep_times: bool = False) -> None:
        super().__init__(overwrite)
        # Without -overwrite_original exiftool keeps the first original as FILE_original.
        self._options = [*([] if backup else ["-overwrite_original"]), *(["-P"] if keep_times else [])]
        self._exiftool = Exiftool()

    def _write(self, path: Path, text: str) -> None:
        original = read_original(path, _MAX_BYTES)
        if original is None:
            raise CannotWrite(f"{display_name(path)} does not exist any more", "Was it moved?")
        if kind_of(original.data[:32]) not in _KINDS:
            raise Skipped("vlfit does not write EXIF into this kind of file (--sidecar xmp works for any)")
        if _C2PA in original.data:
            raise Skipped("it has Content Credentials (C2PA), which any change would invalidate")
        try:
            tags = self._read_tags(original.path)
            _check_writable(tags)
            if self._may_replace(tags.description, text, "the EXIF"):
                # Another UserComment may be a program's settings, so it is kept.
                is_copy = tags.comment in ("", tags.description)
                self._write_tags(
                    original.path, text, (_DESCRIPTION, _COMMENT) if is_copy else (_DESCRIPTION,)
                )
        except ExiftoolFailed as error:
            raise CannotWrite(
                f"{display_name(path)} was not changed: {error}", "--sidecar xmp writes the text beside it."
            ) from None

    def _read_tags(self, path: Path) -> _ExifTags:
        output = self._exiftool.run(
            [b"-j", b"-FileType", f"-{_DESCRIPTION}".encode(), f"-{_COMMENT}".encode(), os.fsencode(path)]
        )
        start, end = output.find("[{"), output.rfind("}]")
        try:
            # exiftool prints a description of digits as a number: keep its digits.
            (fields,) = json.loads(output[start : end + 2], strict=False, parse_int=str, parse_float=str)
        except ValueError:
            raise ExiftoolFailed(_reason(output)) from None
        texts = [
            str(fields.get(name, "")).strip() for name in ("FileType", "ImageDescription", "UserComment")
        ]
        return _ExifTags(*texts)

    def _write_tags(self, path: Path, text: str, tags: tuple[str, ...]) -> None:
        escaped = html.escape(text, quote=False).replace("\n", "&#10;")  # -E: commands are one line
        values = [f"-{tag}={escaped}" for tag in tags]
        unfinished = path.with_name(f"{path.name}_exiftool_tmp")
        was_there = unfinished.exists()
        try:
            output = self._exiftool.run(
                [*(argument.encode() for argument in ["-E", *self._options, *values]), os.fsencode(path)]
            )
        except ExiftoolFailed:
            if not was_there:
                with suppress(OSError):
                    unfinished.unlink(missing_ok=True)  # a killed exiftool leaves it behind
            raise
        if "1 image files updated" not in output:
            raise ExiftoolFailed(_reason(output))


def _check_writable(tags: _ExifTags) -> None:
    """Raises ``Skipped`` for files that must not be changed."""
    if tags.kind == "DNG":
        raise Skipped("it is DNG, a camera's raw picture")
    if tags.kind == "TIFF" and tags.description.startswith(("<?xml", "<OME", "ImageJ=")):
        raise Skipped("its description holds the settings of a microscope's program")


def _reason(output: str) -> str:
    """exiftool's error message, without the file name, which may be long."""
    lines = output.strip().splitlines()
    message = next((line for line in lines if line.startswith("Error")), lines[0] if lines else "nothing")
    return f"exiftool says: {message.removeprefix('Error: ').partition(' - /')[0].strip()}"

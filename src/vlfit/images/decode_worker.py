"""The decode workers: small processes that open, decode and resize one picture at a time.

``python -m vlfit.images.decode_worker FD`` is started with a clean environment, imports Pillow once, and
forks a worker whenever the server asks on socket FD: a killed worker is replaced within milliseconds, and all
share the pages of what is imported. They end with the server, however that ends.
"""

import gc
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, cast

from vlfit.errors import NotAPicture, PictureError
from vlfit.images import sandbox
from vlfit.images.decode_memory import MAX_DECODE_BYTES, WORKER_BYTES
from vlfit.images.decode_wire import (
    BEGUN,
    COMMAND,
    EXIT_NO_MEMORY,
    FORK,
    READY,
    REPLY,
    Connection,
    ConnectionEnded,
)

if TYPE_CHECKING:
    from PIL import Image

    from vlfit.images.decode import DecodedImage, PictureFile

# The header of a small JPEG or PNG is read in milliseconds, whatever is in it: it alone says that the job has
# begun. A message before it would take 0.1 ms.
_MAX_QUICK_BYTES = 2**18
_QUICK = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
MAX_MESSAGE_CHARACTERS = 2000


# What a worker does: jobs from the connection, given its address space in bytes at the start.
Serve = Callable[[Connection, int], None]


def main() -> None:
    """Import the decoders, then fork workers on request until the server closes the socket."""

    def import_decoders() -> None:
        from vlfit.images import decode  # noqa: F401

    run_fork_server("vlfit-decoders", import_decoders, serve)


def run_fork_server(name: str, import_decoders: Callable[[], None], serve: Serve) -> None:
    """Fork workers that run ``serve``, on request, until the server closes the socket; then exit the process.

    The socket is the file descriptor ``sys.argv[1]``. ``name``: for this process, in ``top`` and ``ps``.
    ``import_decoders``: imports what all workers share.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    sandbox.ignore_terminal()
    sandbox.configure_malloc()
    sandbox.set_process_name(name)
    warnings.simplefilter("ignore")  # what matters of odd files becomes an error or a note
    import_decoders()
    gc.collect()
    gc.freeze()  # so that no worker's collector writes to the shared pages
    control.sendall(REPLY.pack(READY))
    _serve_forks(control, serve)


def _serve_forks(control: socket.socket, serve: Serve) -> None:
    workers: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if len(data) < COMMAND.size:
            break
        command, number = COMMAND.unpack(data)
        if command == FORK:
            answer = _fork(control, fds[0], serve)
            os.close(fds[0])
            workers.add(answer)
        else:
            answer = _end(number) if number in workers else 0
            workers.discard(number)
        control.sendall(REPLY.pack(answer))
    for pid in workers:
        _end(pid)
    os._exit(0)


def _end(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)  # if it has ended, it is a zombie until here, and the number its own
    return os.waitpid(pid, 0)[1]


def _fork(control: socket.socket, fd: int, serve: Serve) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        start = sandbox.address_space_bytes()
        sandbox.confine(parent, start + WORKER_BYTES + MAX_DECODE_BYTES)
        sandbox.set_process_name("vlfit-decode")
        serve(Connection(socket.socket(fileno=fd)), start)
    except ConnectionEnded:
        os._exit(0)
    except MemoryError:
        os._exit(EXIT_NO_MEMORY)
    finally:
        os._exit(1)


def serve(connection: Connection, start: int) -> None:
    """Do jobs until the connection ends, which raises ``ConnectionEnded``.

    ``start``: bytes of address space mapped before the first picture. After each job, sends how many bytes
    of address space are mapped beyond ``start``.
    """
    cpu_seconds = None
    while True:
        sandbox.limit_memory(start + WORKER_BYTES)
        job = connection.receive()
        if job["size"] > _MAX_QUICK_BYTES:
            connection.send(BEGUN)
        if job["cpu_seconds"] != cpu_seconds:
            sandbox.limit_cpu(job["cpu_seconds"])
        # The server has reserved what a large file takes.
        sandbox.limit_memory(start + WORKER_BYTES + job["size"])
        failure = _try_job(job, connection, start)
        if failure is not None:
            gc.collect()  # tracebacks keep pictures
            connection.send(failure)
        connection.send_count(sandbox.address_space_bytes() - start)
        cpu_seconds = job["cpu_seconds"]
        sandbox.limit_cpu(cpu_seconds)  # for the next job, which thus waits less


def _try_job(job: dict[str, Any], connection: Connection, start: int) -> dict[str, Any] | None:
    """Do ``job``. Returns the message of an error; None if all went well."""
    try:
        _run_job(job, connection, start)
    except PictureError as error:
        return {
            "error": type(error).__name__,
            "message": error.message[:MAX_MESSAGE_CHARACTERS],
            "hint": error.hint[:MAX_MESSAGE_CHARACTERS],
        }
    except MemoryError:
        sandbox.limit_memory(start + WORKER_BYTES + MAX_DECODE_BYTES)  # to be able to say so
        return {"error": "MemoryError"}
    except ConnectionEnded:
        raise
    except Exception as error:  # a decoder's, or ours: in both cases this picture is not read
        message = f"{job['label']} cannot be decoded: {type(error).__name__}: {error}"
        return {"error": NotAPicture.__name__, "message": message[:MAX_MESSAGE_CHARACTERS], "hint": ""}
    return None


def _run_job(job: dict[str, Any], connection: Connection, start: int) -> None:
    from vlfit.images import decode

    label, operation = job["label"], job["operation"]
    data = connection.receive_file(job["size"])
    if len(data) <= _MAX_QUICK_BYTES and not data.startswith(_QUICK):
        connection.send(BEGUN)
    file = decode.PictureFile(data, label, tuple(job["formats"]))
    connection.send({"width": file.width, "height": file.height, "bytes": file.memory})
    decoded = None
    if file.memory <= job["ahead"]:
        sandbox.limit_memory(start + WORKER_BYTES)
        decoded = _decode_ahead(file, connection, start)
    order = connection.receive()
    if not order["go"]:
        if decoded is not None:
            connection.send({"skipped": True})
        return
    sandbox.limit_memory(start + WORKER_BYTES + order["bytes"])
    if operation == "check":
        connection.send({"plain": file.is_plain()})
        return
    decoded = decoded or file.decode()
    del file, data
    upright = decoded.image
    facts = {"width": upright.width, "height": upright.height, "notes": decoded.notes}
    if operation == "size":
        connection.send(facts)
    elif operation == "encode":
        connection.send(facts)
        _send_file(connection, upright, job["file_format"], job["options"])
    else:
        width, height = next(each["to"] for each in order["sizes"] if each["of"] == list(upright.size))
        seen = decode.resize(upright, width, height)
        del decoded, upright
        _send_pixels(connection, facts, seen)


def _decode_ahead(file: "PictureFile", connection: Connection, start: int) -> "DecodedImage":
    """Decode while the order is on its way. After an error receive it, or it would be the next job."""
    try:
        return file.decode()
    except Exception:
        sandbox.limit_memory(start + WORKER_BYTES + MAX_DECODE_BYTES)  # memory may be what was lacking
        connection.receive()
        raise


def _send_pixels(connection: Connection, facts: dict[str, Any], image: "Image.Image") -> None:
    """Send ``facts``, so that the server wakes while the pixels are copied from Pillow, and then those.

    Pillow writes them piece by piece, which a file of its simplest format has as they are behind its header.
    ``Image.tobytes`` makes several copies of all.
    """
    connection.send(facts)
    header = b"P6\n%d %d\n255\n" % image.size
    image.save(cast("IO[bytes]", _PixelWriter(connection, header)), "PPM")


class _PixelWriter:
    """A file that is sent while it is written, without its ``header``."""

    def __init__(self, connection: Connection, header: bytes) -> None:
        self._connection = connection
        self._header = header

    def write(self, data: bytes) -> int:
        begin = min(len(self._header), len(data))
        if data[:begin] != self._header[:begin]:
            raise ValueError(f"Pillow wrote {data[:begin]!r} in a header, not {self._header[:begin]!r}")
        self._header = self._header[begin:]
        if begin < len(data):
            self._connection.send_bytes(memoryview(data)[begin:])
        return len(data)

    def flush(self) -> None:
        return


def _send_file(
    connection: Connection, image: "Image.Image", file_format: str, options: dict[str, Any]
) -> None:
    image.save(cast("IO[bytes]", _ChunkWriter(connection)), file_format, **options)
    connection.send_chunk(b"")


class _ChunkWriter:
    """A file that is sent while it is written."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> int:
        if data:
            self._connection.send_chunk(data)
        return len(data)

    def flush(self) -> None:
        return


if __name__ == "__main__":
    main()

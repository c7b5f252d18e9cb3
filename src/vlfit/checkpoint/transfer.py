"""Large files from the hub into its cache, so that a download that was stopped goes on where it stopped.

huggingface_hub 2 throws away what it has of a file when it is interrupted: five gigabytes start from nothing.
So the weights are fetched here, with its own HTTP and into its own cache: what is done of a file stays there
as ``<etag>.incomplete``.
"""

import hashlib
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from vlfit.api.progress import ByteProgress
from vlfit.errors import HubError
from vlfit.units import format_bytes, format_seconds

# A download's progress on stderr: one line that rewrites itself on a terminal, a line now and then in a
# log.


class StderrProgress:
    """Prints how far a download is. Call it with bytes done and bytes in all; ``close`` ends the line."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._started = time.monotonic()
        self._printed = float("-inf")
        self._already: int | None = None
        self._open_line = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        on_terminal = sys.stderr.isatty()
        if self._already is None:
            # Bytes of an earlier, interrupted download are not this one's speed.
            self._already, self._started = done, now
        if now - self._printed < (0.1 if on_terminal else 5.0) and done < total:
            return
        self._printed = now
        text = f"{self._label}: {self._describe(done, total, now - self._started)}"
        if on_terminal:
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
            self._open_line = True
        else:
            print(text, file=sys.stderr, flush=True)

    def _describe(self, done: int, total: int, seconds: float) -> str:
        share = 100 * done // total if total else 100
        text = f"{share:3d} %  {format_bytes(done)} of {format_bytes(total)}"
        speed = (done - (self._already or 0)) / seconds if seconds > 0.2 else 0.0
        if speed > 0:
            text += f"  {format_bytes(int(speed))}/s"
            if done < total:
                text += f"  {format_seconds((total - done) / speed)} left"
        return text

    def close(self) -> None:
        if self._open_line:
            print(file=sys.stderr, flush=True)
            self._open_line = False


_AT_ONCE = 4
_SHA256_DIGITS = 64


@dataclass(frozen=True, slots=True)
class _Item:
    """One file to fetch. ``etag`` is its SHA-256 if the hub keeps it as LFS; ``size`` is in bytes."""

    url: str
    etag: str
    size: int
    blob: Path
    lock: Path

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.etag}.incomplete")

    @property
    def done(self) -> int:
        """Bytes that are here already."""
        path = self.blob if self.blob.is_file() else self.partial
        return path.stat().st_size if path.is_file() else 0


class _Stopped(Exception):
    """Raised in the threads that download when another of them failed, or Ctrl-C was pressed."""


class _Meter:
    """Counts bytes over all files, and is where every thread finds out that it should stop."""

    def __init__(self, progress: ByteProgress, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total
        self._lock = threading.Lock()
        self._stopping = False

    def add(self, count: int) -> None:
        self.check()
        with self._lock:
            self._done += count
            self._progress(self._done, self._total)

    def check(self) -> None:
        if self._stopping:
            raise _Stopped

    def stop(self) -> None:
        self._stopping = True


class _MeteredFile:
    """A file that tells ``meter`` how it grows and, when a server cannot resume, shrinks."""

    def __init__(self, file: BinaryIO, meter: _Meter) -> None:
        self._file, self._meter = file, meter

    def write(self, data: bytes) -> int:
        # Written before it is counted: when the meter says stop, these bytes are not lost.
        written = self._file.write(data)
        self._meter.add(written)
        return written

    def truncate(self) -> int:
        before = os.fstat(self._file.fileno()).st_size
        after = self._file.truncate()
        self._meter.add(after - before)
        return after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def transfer(repository: str, commit: str, files: list[str], progress: ByteProgress) -> None:
    """Fetch ``files`` of ``repository`` at ``commit`` into the blobs of the hub's cache.

    Files that are there are left alone, parts of files are continued. ``progress`` gets bytes done and bytes
    in all. Raises ``HubError`` when the disk is too small or a checksum is wrong, and what huggingface_hub
    raises. The parts stay for the next call whatever happens.
    """
    items = [_locate(repository, commit, file) for file in files]
    total, done = sum(item.size for item in items), sum(item.done for item in items)
    _check_disk(items[0].blob.parent, total - done)
    progress(done, total)
    with no_other_bars():
        _fetch_all([item for item in items if not item.blob.is_file()], _Meter(progress, done, total))


def _fetch_all(items: list[_Item], meter: _Meter) -> None:
    """Fetch several files at a time. Raises the first error of any of them; the others stop soon after."""
    waiting = deque(items)
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        try:
            while (item := _next(waiting)) is not None:
                _fetch(item, meter)
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    # Daemons: Ctrl-C need not wait for a server that has gone silent.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_AT_ONCE, len(items)))]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            error = ended.get()
            if error is not None:
                raise error
    except BaseException:
        meter.stop()
        raise


def _next(waiting: deque[_Item]) -> _Item | None:
    with suppress(IndexError):
        return waiting.popleft()
    return None


def _locate(repository: str, commit: str, file: str) -> _Item:
    """Where ``file`` comes from and goes to. Asks the hub for its size and checksum."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, file, revision=commit)
    found = get_hf_file_metadata(url)
    if found.etag is None or found.size is None:
        raise HubError(f"the hub tells neither size nor checksum of {file}", "Check HF_ENDPOINT.")
    folder = f"models--{repository.replace('/', '--')}"
    root = Path(constants.HF_HUB_CACHE)
    blobs, locks = root / folder / "blobs", root / ".locks" / folder
    for path in (blobs, locks):
        path.mkdir(parents=True, exist_ok=True)
    return _Item(url, found.etag, found.size, blobs / found.etag, locks / f"{found.etag}.lock")


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise HubError(
            f"the disk is too full: {format_bytes(needed)} to fetch, {format_bytes(free)} free in {folder}",
            "Free some space (vlfit models rm NAME), or set HF_HOME to a larger disk.",
        )


def _fetch(item: _Item, meter: _Meter) -> None:
    """Bring ``item`` to its end and move it in place. One process at a time works on a file."""
    with _locked(item.lock, meter):
        if item.blob.is_file():
            meter.add(item.size)  # another process was quicker
            return
        if item.done > item.size:
            meter.add(-item.done)
            item.partial.unlink()
        while item.done < item.size:
            _fetch_more(item, meter)
        _check_sum(item)
        item.partial.replace(item.blob)


def _fetch_more(item: _Item, meter: _Meter) -> None:
    """One request for the rest of ``item``. A connection that breaks fails only if it brought nothing."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    # Compressed transfers cannot be continued from a byte of the file.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    start = item.done
    try:
        with item.partial.open("ab") as file:
            metered: Any = _MeteredFile(file, meter)
            http_get(item.url, metered, resume_size=start, headers=headers, expected_size=item.size)
    except _Stopped:
        raise
    except Exception:
        if item.done <= start:
            raise
        time.sleep(1)


@contextmanager
def _locked(path: Path, meter: _Meter) -> Iterator[None]:
    """Hold huggingface_hub's own lock of a file, so that its other users and we wait for each other."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    with ExitStack() as stack:
        while True:
            meter.check()
            try:
                stack.enter_context(WeakFileLock(path, timeout=0.5))
                break
            except TimeoutError:
                time.sleep(0.1)
        yield


def _check_sum(item: _Item) -> None:
    if len(item.etag) != _SHA256_DIGITS:
        return
    with item.partial.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != item.etag:
        item.partial.unlink()
        raise HubError(
            f"what was downloaded from {item.url} is not what the hub announced (SHA-256 {found[:12]}..., "
            f"expected {item.etag[:12]}...)",
            "It was deleted. Run the command again; if this returns, look at the proxy or mirror in between.",
        )


@contextmanager
def no_other_bars() -> Iterator[None]:
    """huggingface_hub draws a bar for each file unless told not to; ours shows all of them in one."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()

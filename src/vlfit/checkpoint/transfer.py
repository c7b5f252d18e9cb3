"""Resumable downloads of large files into the hub's cache, and their progress on stderr.

huggingface_hub 2 discards a partial file when it is interrupted. So weights are downloaded here, with its
HTTP client and into its cache, where a partial file stays as ``<etag>.incomplete``.
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

FREE_DISK_HINT = "Free some space (vlfit models rm NAME), or set HF_HOME to a larger disk."
_MAX_PARALLEL = 4
_SHA256_DIGITS = 64


class StderrProgress:
    """Prints a download's progress on stderr: a rewritten line on a terminal, else a line every 5 s.

    Call it with bytes done and in total, and ``close`` it at the end. Bytes done at the first call, of an
    earlier attempt, do not count towards the speed.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._started_at = time.monotonic()
        self._printed_at = float("-inf")
        self._resumed_bytes: int | None = None
        self._is_line_open = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        on_terminal = sys.stderr.isatty() and os.environ.get("TERM", "").lower() != "dumb"
        if self._resumed_bytes is None:
            # Bytes of an earlier, interrupted download do not count towards the speed.
            self._resumed_bytes, self._started_at = done, now
        if now - self._printed_at < (0.1 if on_terminal else 5.0) and done < total:
            return
        self._printed_at = now
        text = f"{self._label}: {self._describe(done, total, now - self._started_at)}"
        if on_terminal:
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
            self._is_line_open = True
        else:
            print(text, file=sys.stderr, flush=True)

    def _describe(self, done: int, total: int, seconds: float) -> str:
        share = 100 * done // total if total else 100
        text = f"{share:3d} %  {format_bytes(done)} of {format_bytes(total)}"
        speed = (done - (self._resumed_bytes or 0)) / seconds if seconds > 0.2 else 0.0
        if speed > 0:
            text += f"  {format_bytes(int(speed))}/s"
            if done < total:
                text += f"  {format_seconds((total - done) / speed)} left"
        return text

    def close(self) -> None:
        """End the line that is rewritten on a terminal. No effect if none is open."""
        if self._is_line_open:
            print(file=sys.stderr, flush=True)
            self._is_line_open = False


@dataclass(frozen=True, slots=True)
class _Download:
    """A file to download. ``etag`` is its SHA-256 if the hub stores it as LFS; ``size`` is in bytes."""

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
        """Bytes already downloaded."""
        path = self.blob if self.blob.is_file() else self.partial
        return path.stat().st_size if path.is_file() else 0


class _Cancelled(Exception):
    """Raised in download threads when another one failed or Ctrl-C was pressed."""


class _ByteCounter:
    """Counts bytes of all files; raises ``_Cancelled`` in threads that should stop."""

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
            raise _Cancelled

    def stop(self) -> None:
        self._stopping = True


class _CountedFile:
    """A file that reports to ``counter`` how it grows, or shrinks if the server cannot resume."""

    def __init__(self, file: BinaryIO, counter: _ByteCounter) -> None:
        self._file, self._counter = file, counter

    def write(self, data: bytes) -> int:
        # Written before it is counted: cancelling loses no bytes.
        written = self._file.write(data)
        self._counter.add(written)
        return written

    def truncate(self) -> int:
        before = os.fstat(self._file.fileno()).st_size
        after = self._file.truncate()
        self._counter.add(after - before)
        return after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def download_blobs(repository: str, commit: str, files: list[str], progress: ByteProgress) -> None:
    """Download ``files`` (at least one) of ``repository`` at ``commit`` into the blobs of the hub's cache.

    Complete files are skipped, partial ones resumed; a failure leaves partial files in place. ``progress``:
    called with bytes done and in total, from several threads but one at a time; bytes done decrease if the
    server cannot resume. Raises ``HubError`` if the disk is too full or a checksum is wrong, and the errors
    of huggingface_hub.
    """
    items = [_download_of(repository, commit, file) for file in files]
    total, done = sum(item.size for item in items), sum(item.done for item in items)
    blobs = items[0].blob.parent
    check_free_bytes(total - done, shutil.disk_usage(blobs).free, blobs)
    progress(done, total)
    with without_hub_progress_bars():
        _fetch_all([item for item in items if not item.blob.is_file()], _ByteCounter(progress, done, total))


def _fetch_all(items: list[_Download], counter: _ByteCounter) -> None:
    """Download several files at a time. Raises the first error; the others stop soon after."""
    waiting = deque(items)
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        try:
            while (item := _pop(waiting)) is not None:
                _fetch(item, counter)
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    # Daemons, so that Ctrl-C does not wait for a silent server.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_MAX_PARALLEL, len(items)))]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            error = ended.get()
            if error is not None:
                raise error
    except BaseException:
        counter.stop()
        raise


def _pop(waiting: deque[_Download]) -> _Download | None:
    with suppress(IndexError):
        return waiting.popleft()
    return None


def _download_of(repository: str, commit: str, file: str) -> _Download:
    """URL and cache paths of ``file``, with its size and checksum from the hub."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, file, revision=commit)
    found = get_hf_file_metadata(url)
    if found.etag is None or found.size is None:
        raise HubError(f"the hub gives no size or no checksum of {file}", "Check HF_ENDPOINT.")
    folder = f"models--{repository.replace('/', '--')}"
    root = Path(constants.HF_HUB_CACHE)
    blobs, locks = root / folder / "blobs", root / ".locks" / folder
    for path in (blobs, locks):
        path.mkdir(parents=True, exist_ok=True)
    return _Download(url, found.etag, found.size, blobs / found.etag, locks / f"{found.etag}.lock")


def check_free_bytes(needed: int, free: int, folder: Path | str) -> None:
    """Raise ``HubError`` if a download needs more than the ``free`` bytes of a disk.

    ``needed``: bytes still to download. ``folder``: on that disk, for the message.
    """
    if needed > free:
        raise HubError(
            f"the disk is too full: {format_bytes(needed)} to fetch, {format_bytes(free)} free in {folder}",
            FREE_DISK_HINT,
        )


def _fetch(item: _Download, counter: _ByteCounter) -> None:
    """Download ``item`` and move it in place. One process at a time works on a file."""
    with _locked(item.lock, counter):
        if item.blob.is_file():
            counter.add(item.size)  # by another process
            return
        if item.done > item.size:
            counter.add(-item.done)
            item.partial.unlink()
        while item.done < item.size:
            _fetch_rest(item, counter)
        _check_sha256(item)
        item.partial.replace(item.blob)


def _fetch_rest(item: _Download, counter: _ByteCounter) -> None:
    """One request for the rest of ``item``. Raises for a broken connection only if no bytes came."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    # Compressed transfers cannot be resumed at a byte of the file.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    start = item.done
    try:
        with item.partial.open("ab") as file:
            metered: Any = _CountedFile(file, counter)
            http_get(item.url, metered, resume_size=start, headers=headers, expected_size=item.size)
    except _Cancelled:
        raise
    except Exception:
        if item.done <= start:
            raise
        time.sleep(1)


@contextmanager
def _locked(path: Path, counter: _ByteCounter) -> Iterator[None]:
    """Hold huggingface_hub's own lock of a file, which its other users respect."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    with ExitStack() as stack:
        while True:
            counter.check()
            try:
                stack.enter_context(WeakFileLock(path, timeout=0.5))
                break
            except TimeoutError:
                time.sleep(0.1)
        yield


def _check_sha256(item: _Download) -> None:
    if len(item.etag) != _SHA256_DIGITS:
        return
    with item.partial.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != item.etag:
        item.partial.unlink()
        raise HubError(
            f"{item.url} has a wrong checksum: SHA-256 {found[:12]}..., expected {item.etag[:12]}...",
            "The file was deleted. Run the command again; if it happens again, check the proxy or mirror.",
        )


@contextmanager
def without_hub_progress_bars() -> Iterator[None]:
    """Within the block, turn off huggingface_hub's progress bars, one per file, for the whole process."""
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

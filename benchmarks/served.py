"""`vlfit serve` as a process of its own, watched from outside while it starts and answers.

Knows how the command says that it is ready, NVML's account of the card, and /proc. Does not know what is
asked.
"""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx

from benchmarks.ledger_job import Meter
from benchmarks.measure import MIB, ROOT, environment

PATIENCE = 300.0  # seconds to start: the first start on a machine also compiles kernels
STOPPING = 15.0
EVERY = 0.004  # seconds between two looks at the card: a read of NVML takes a tenth of it
HOST_EVERY = 10  # looks at the card between two looks at /proc
LINES = 4000  # of what the server says that are kept


class DidNotStart(Exception):
    """What the server said before it ended, or for too long."""


@dataclass
class Watched:
    """What was seen of a process, in bytes: on the card, where there is one, and in the host's RAM.

    ``curve``: seconds since the start and bytes on the card, at each change. ``anonymous``: RAM that is no
    page of a file.
    """

    curve: list[tuple[float, int]] = field(default_factory=list)
    peak: int = 0
    peak_resident: int = 0
    peak_anonymous: int = 0

    def peak_until(self, seconds: float) -> int:
        return max((count for at, count in self.curve if at <= seconds), default=0)

    def reached(self, count: int) -> float:
        """Seconds after which so many bytes were first on the card; the end of the curve if never."""
        ends = [at for at, seen in self.curve if seen >= count]
        return ends[0] if ends else self.curve[-1][0] if self.curve else 0.0

    def since(self, seconds: float) -> tuple[int, int]:
        """Least and most on the card from then on: what it was then counts."""
        later = [count for at, count in self.curve if at > seconds]
        before = [count for at, count in self.curve if at <= seconds]
        seen = [*before[-1:], *later]
        return (min(seen), max(seen)) if seen else (0, 0)


class Served:
    """A server for as long as the ``with`` block lasts. ``meter`` None: no GPU, only RAM is watched.

    ``ready_s``: from the start of the command to the first 200 of /health. ``told``: what it said on stderr,
    with the seconds since its start.
    """

    def __init__(self, arguments: list[str], meter: Meter | None) -> None:
        self.arguments = arguments
        self.watched = Watched()
        self.told: deque[tuple[float, str]] = deque(maxlen=LINES)
        self.url = ""
        self.ready_s = 0.0
        self._meter = meter
        self._over = threading.Event()

    def __enter__(self) -> Self:
        if self._meter is not None:
            self._meter.start_over()
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vlfit", "serve", *self.arguments, "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(PYTHONUNBUFFERED="1"),
        )
        self._announced: list[str] = []
        self._threads = [
            threading.Thread(target=self._watch, daemon=True),
            threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True),
            threading.Thread(target=self._hear, args=(self._process.stdout,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds(self) -> float:
        """Since the start of the command."""
        return time.perf_counter() - self.began

    def on_card(self) -> int:
        """Bytes more in use on the card than before the server came; 0 without a card."""
        return 0 if self._meter is None else self._meter.process()

    def own(self) -> int | None:
        """What NVML lists for the server's process, where it does."""
        return None if self._meter is None else self._meter.own(self.pid)

    def memory(self, line: str) -> int:
        """``VmRSS``, ``VmHWM`` or ``RssAnon`` of the server, in bytes; 0 when it is gone."""
        try:
            text = Path(f"/proc/{self.pid}/status").read_text("ascii", errors="replace")
        except OSError:
            return 0
        found = re.search(rf"^{line}:\s+(\d+) kB", text, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0

    def ask(self, path: str) -> dict[str, Any]:
        """JSON of a GET request."""
        answer: dict[str, Any] = httpx.get(f"{self.url}{path}", timeout=30).raise_for_status().json()
        return answer

    def words(self, count: int = 40) -> str:
        """The last lines that it said."""
        return "\n".join(line for _, line in list(self.told)[-count:])

    def _wait(self) -> None:
        while self.seconds < PATIENCE:
            if self._announced:
                self.url = json.loads(self._announced[0])["url"]
                if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                    self.ready_s = self.seconds
                    return
            if self._process.poll() is not None:
                for thread in self._threads[1:]:
                    thread.join(5)
                raise DidNotStart(f"exit code {self._process.returncode}\n{self.words()}")
            time.sleep(0.002)
        raise DidNotStart(f"not ready after {PATIENCE:.0f} s\n{self.words()}")

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOPPING)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._over.set()
        for thread in self._threads:
            thread.join(5)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _watch(self) -> None:
        watched, looks, last = self.watched, 0, -1
        while not self._over.wait(EVERY):
            if self._meter is not None and (now := self._meter.process()) != last:
                watched.curve.append((self.seconds, now))
                watched.peak, last = max(watched.peak, now), now
            if looks % HOST_EVERY == 0:
                watched.peak_resident = max(watched.peak_resident, self.memory("VmRSS"))
                watched.peak_anonymous = max(watched.peak_anonymous, self.memory("RssAnon"))
            looks += 1

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self.told.append((self.seconds, line.rstrip()))

    def _hear(self, stream: IO[str]) -> None:
        for line in stream:
            self._announced.append(line)


def held_beside(ledger: dict[str, Any], process: int) -> int:
    """``process`` less weights and KV cache, of what /v1/vlfit/ledger says that they hold."""
    return process - sum(
        row["actual"] or 0
        for row in ledger["ledger"]
        if row["line"].startswith("weights.") or row["line"] == "kv_cache"
    )


def planned_for_process(ledger: dict[str, Any]) -> int:
    """The plan's total but for the desktop, and for the air, which is a choice and nobody's."""
    return sum(row["planned"] or 0 for row in ledger["ledger"] if row["line"] not in ("desktop", "reserve"))


def ledger_table(ledger: dict[str, Any]) -> list[list[str]]:
    """Rows of a table: line, planned, held, in MiB."""
    rows = [["line", "planned MiB", "held MiB"]]
    for row in ledger["ledger"]:
        counts = (row["planned"], row["actual"])
        rows.append([row["line"], *("-" if count is None else f"{count / MIB:,.1f}" for count in counts)])
    return rows

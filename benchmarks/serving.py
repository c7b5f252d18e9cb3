"""`vlfit serve` as a child process that is watched from outside, and chat requests as a client sends them."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx
import numpy as np
from PIL import Image

from benchmarks.gpu_memory import GpuMeter
from benchmarks.harness import MIB, ROOT, environment, process_memory

START_TIMEOUT = 300.0  # seconds: the first start on a machine also compiles kernels
STOP_TIMEOUT = 15.0
SAMPLE_INTERVAL = 0.004  # seconds between two samples of GPU memory: reading NVML takes a tenth of it
HOST_SAMPLES = 10  # samples of GPU memory for one of RAM
LOG_LINES = 4000  # that are kept
READ_TIMEOUT = 600.0  # seconds between two bytes of an answer: a queue may be long
DISCONNECTED = "hung up"  # by the client
BROKEN_OFF = "broke off"  # by the server
_GRID = 24  # random colours across a picture, so that it compresses as photos do


# --- the server --------------------------------------------------------------------------------------------


class DidNotStart(Exception):
    """What the server logged before it ended or timed out."""


@dataclass
class MemoryCurve:
    """Memory of a server over time, in bytes: on the GPU, if there is one, and in RAM.

    ``curve``: seconds since the start and bytes on the GPU, at each change. ``peak_anonymous``: RAM without
    pages of files.
    """

    curve: list[tuple[float, int]] = field(default_factory=list)
    peak: int = 0
    peak_resident: int = 0
    peak_anonymous: int = 0

    def peak_until(self, seconds: float) -> int:
        return max((size for at, size in self.curve if at <= seconds), default=0)

    def time_to(self, size: int) -> float:
        """Seconds until ``size`` bytes were first on the GPU; the end of the curve if they never were."""
        times = [at for at, each in self.curve if each >= size]
        return times[0] if times else self.curve[-1][0] if self.curve else 0.0

    def range_since(self, seconds: float) -> tuple[int, int]:
        """Least and most on the GPU from then on, what it was at that moment included."""
        later = [size for at, size in self.curve if at > seconds]
        before = [size for at, size in self.curve if at <= seconds]
        sizes = [*before[-1:], *later]
        return (min(sizes), max(sizes)) if sizes else (0, 0)


class ServerProcess:
    """A server inside the ``with`` block. ``meter`` None: no GPU, only RAM is watched.

    ``source``: the src folder of another version of vlfit, to run instead of this one's. ``settings``: more
    environment variables.

    ``facts``: what it says as JSON once it is ready. ``ready_s``: from the start of the command to the first
    200 of /health. ``log``: lines of stderr with the seconds since the start.
    """

    def __init__(
        self,
        arguments: list[str],
        meter: GpuMeter | None,
        source: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.arguments = arguments
        self.memory = MemoryCurve()
        self.log: deque[tuple[float, str]] = deque(maxlen=LOG_LINES)
        self.url = ""
        self.facts: dict[str, Any] = {}
        self.ready_s = 0.0
        self._meter = meter
        self._source = source
        self._settings = dict(settings or {})
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        if self._meter is not None:
            self._meter.reset()
        self.started_at = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vlfit", "serve", *self.arguments, "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self._environment(),
        )
        self._stdout: list[str] = []
        self._threads = [
            threading.Thread(target=self._sample_memory, daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
            threading.Thread(target=self._read_stdout, args=(self._process.stdout,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._wait_until_ready()
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
        return time.perf_counter() - self.started_at

    def gpu_bytes(self) -> int:
        """Bytes in use on the GPU beyond what was before the server came; 0 without a GPU."""
        return 0 if self._meter is None else self._meter.growth()

    def gpu_bytes_listed(self) -> int | None:
        """What NVML lists for the server's process, if it does."""
        return None if self._meter is None else self._meter.of_process(self.pid)

    def host_bytes(self, line: str) -> int:
        """``VmRSS``, ``VmHWM`` or ``RssAnon`` of the server."""
        return process_memory(line, self.pid)

    def get(self, path: str) -> dict[str, Any]:
        """JSON of a GET request."""
        answer: dict[str, Any] = httpx.get(f"{self.url}{path}", timeout=30).raise_for_status().json()
        return answer

    def log_tail(self, count: int = 40) -> str:
        return "\n".join(line for _, line in list(self.log)[-count:])

    def log_without_requests(self) -> list[str]:
        return [f"{at:.2f} {line}" for at, line in self.log if " POST " not in line]

    def _environment(self) -> dict[str, str]:
        variables = environment(PYTHONUNBUFFERED="1", **self._settings)
        if self._source is not None:
            variables["PYTHONPATH"] = os.pathsep.join([str(self._source), variables["PYTHONPATH"]])
        return variables

    def _wait_until_ready(self) -> None:
        while self.seconds < START_TIMEOUT:
            if self._stdout:
                self.facts = json.loads(self._stdout[0])
                self.url = self.facts["url"]
                if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                    self.ready_s = self.seconds
                    return
            if self._process.poll() is not None:
                for thread in self._threads[1:]:
                    thread.join(5)
                raise DidNotStart(f"exit code {self._process.returncode}\n{self.log_tail()}")
            time.sleep(0.002)
        raise DidNotStart(f"not ready after {START_TIMEOUT:.0f} s\n{self.log_tail()}")

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._stopping.set()
        for thread in self._threads:
            thread.join(5)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _sample_memory(self) -> None:
        memory, samples, last = self.memory, 0, -1
        while not self._stopping.wait(SAMPLE_INTERVAL):
            if self._meter is not None and (now := self._meter.growth()) != last:
                memory.curve.append((self.seconds, now))
                memory.peak, last = max(memory.peak, now), now
            if samples % HOST_SAMPLES == 0:
                memory.peak_resident = max(memory.peak_resident, self.host_bytes("VmRSS"))
                memory.peak_anonymous = max(memory.peak_anonymous, self.host_bytes("RssAnon"))
            samples += 1

    def _read_stderr(self, stream: IO[str]) -> None:
        for line in stream:
            self.log.append((self.seconds, line.rstrip()))

    def _read_stdout(self, stream: IO[str]) -> None:
        for line in stream:
            self._stdout.append(line)


# --- its ledger (/v1/vlfit/ledger) -------------------------------------------------------------------------


def bytes_beside_pools(ledger: dict[str, Any], process: int) -> int:
    """``process`` less what the ledger says that weights and KV cache hold."""
    return process - sum(
        row["actual"] or 0
        for row in ledger["ledger"]
        if row["line"].startswith("weights.") or row["line"] == "kv_cache"
    )


def planned_for_process(ledger: dict[str, Any]) -> int:
    """The plan's total without the desktop, and without the reserve, which nobody holds."""
    return sum(row["planned"] or 0 for row in ledger["ledger"] if row["line"] not in ("desktop", "reserve"))


def ledger_table(ledger: dict[str, Any]) -> list[list[str]]:
    """Rows of a table: line, planned, held, in MiB."""
    rows = [["line", "planned MiB", "held MiB"]]
    for row in ledger["ledger"]:
        sizes = (row["planned"], row["actual"])
        rows.append([row["line"], *("-" if size is None else f"{size / MIB:,.1f}" for size in sizes)])
    return rows


# --- its clients -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client got. ``status``: of HTTP, 0 without any.

    ``ended``: the finish reason, an error's code, ``DISCONNECTED`` or ``BROKEN_OFF``. ``images``: what the
    server says of each picture. ``seconds`` and ``first_s`` (the first event with a token, of a stream) count
    from sending.
    """

    status: int
    ended: str
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_s: float = 0.0
    message: str = ""
    retry_after: str = ""
    images: tuple[dict[str, Any], ...] = ()


def random_jpeg(width: int, height: int, seed: int) -> bytes:
    """A picture of soft random colours, the same for the same arguments."""
    generator = np.random.default_rng((width, height, seed))
    colours = generator.integers(0, 256, (_GRID, _GRID, 3), dtype=np.uint8)
    image = Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def data_url(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode('ascii')}"


def chat_body(text: str, urls: list[str] | None = None, detail: str = "auto", **params: Any) -> bytes:
    """The body of a chat request with pictures (``urls``) before ``text``."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url, "detail": detail}} for url in urls or []
    ]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return json.dumps({"messages": [message], **params}).encode()


def new_client() -> httpx.Client:
    """An HTTP client, for one thread."""
    return httpx.Client(timeout=httpx.Timeout(READ_TIMEOUT, connect=30))


def send(client: httpx.Client, url: str, body: bytes) -> Reply:
    """Send one request and wait for the whole answer."""
    began = time.perf_counter()
    try:
        answer = client.post(f"{url}/v1/chat/completions", content=body)
    except httpx.HTTPError as error:
        return Reply(0, BROKEN_OFF, seconds=time.perf_counter() - began, message=repr(error))
    seconds = time.perf_counter() - began
    if answer.status_code != 200:
        return _refusal(answer, seconds)
    content = answer.json()
    return Reply(
        200,
        content["vlfit"]["finish_reasons"][0],
        content["usage"]["prompt_tokens"],
        content["usage"]["completion_tokens"],
        seconds,
        images=tuple(content["vlfit"]["images"]),
    )


def stream_and_disconnect(client: httpx.Client, url: str, body: bytes, after: int) -> Reply:
    """Send one streaming request and hang up after ``after`` tokens (0: when the answer begins).

    The request has to ask for logprobs: a token that is part of a character has no text, and without them no
    event.
    """
    began = time.perf_counter()
    tokens, first_s = 0, 0.0
    try:
        with client.stream("POST", f"{url}/v1/chat/completions", content=body) as answer:
            if answer.status_code != 200:
                answer.read()
                return _refusal(answer, time.perf_counter() - began)
            lines = answer.iter_lines()
            while tokens < after:
                line = next(lines, None)
                if line is None:
                    message = f"the stream ended after {tokens} of {after} tokens"
                    return Reply(200, BROKEN_OFF, tokens=tokens, message=message)
                if '"error"' in line and (error := _error_in(line)):
                    return Reply(200, str(error["code"]), tokens=tokens, message=str(error["message"]))
                if more := line.count('"logprob":'):
                    tokens += more
                    first_s = first_s or time.perf_counter() - began
    except httpx.HTTPError as error:
        return Reply(0, BROKEN_OFF, tokens=tokens, message=repr(error))
    return Reply(200, DISCONNECTED, 0, tokens, time.perf_counter() - began, first_s)


def _refusal(answer: httpx.Response, seconds: float) -> Reply:
    error: dict[str, Any] = answer.json().get("error", {})
    return Reply(
        answer.status_code,
        str(error.get("code")),
        seconds=seconds,
        message=str(error.get("message")),
        retry_after=answer.headers.get("retry-after", ""),
    )


def _error_in(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line.removeprefix("data: "))
    except ValueError:
        return None
    error: dict[str, Any] | None = event.get("error")
    return error

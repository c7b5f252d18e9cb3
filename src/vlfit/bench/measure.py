"""Benchmark a model on this machine: start-up, time to first token by part, decoding, memory, bandwidth roof.

All in one process: import, load, warm-up request, repetitions. Memory bandwidth is measured last, when the
model is freed and the device is warm. The parts of the first token come from separate requests that
synchronize the device before and after the vision encoder.
"""

import gc
import queue
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlfit.api.conversation import Conversation
from vlfit.api.outputs import Chunk
from vlfit.api.progress import LoadProgress, StatusCallback
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import EngineAccount
from vlfit.backends.base import Backend, Ticket
from vlfit.backends.held_memory import expected_memory, ledger_rows
from vlfit.backends.native import NativeBackend
from vlfit.backends.startup import StartupTimer
from vlfit.bench.workload import BenchOptions, BenchRequests, make_requests
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import DoesNotFit, VlfitError
from vlfit.loading import preload
from vlfit.machine.gpu import gpu_of_device, read_gpus
from vlfit.machine.model import Gpu, Machine
from vlfit.machine.survey import survey
from vlfit.plan.actual import planned_and_held

if TYPE_CHECKING:
    from vlfit.tuning.timing import StepBytes


@dataclass(frozen=True, slots=True)
class RequestPhases:
    """How long the phases of a request took, in seconds.

    ``preprocess_s``: decode and resize the picture, tokenize the text; ``prefill_s``: from then to the first
    token, vision encoder included; ``decode_s``: from the first to the last token.
    """

    preprocess_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """The times of one request (``time.perf_counter``): submitted, prepared, and the arrival of each token.

    ``prompt_tokens``: of the whole prompt, ``image_tokens`` included. ``token_ids``: of the answer; empty
    unless log probabilities were requested.
    """

    submitted_at: float
    prepared_at: float
    token_times: tuple[float, ...]
    prompt_tokens: int
    image_tokens: int
    token_ids: tuple[int, ...] = ()

    @property
    def phases(self) -> RequestPhases:
        """How long preparing, prefill and decoding took."""
        return RequestPhases(
            self.prepared_at - self.submitted_at,
            self.token_times[0] - self.prepared_at,
            self.token_times[-1] - self.token_times[0],
        )

    @property
    def first_token_s(self) -> float:
        """Time to first token in seconds, from the submission, so with picture decoding."""
        return self.token_times[0] - self.submitted_at

    def num_tokens_at(self, moment: float) -> int:
        """Number of tokens that had arrived at ``moment`` (``time.perf_counter``)."""
        return sum(token_time <= moment for token_time in self.token_times)


def run_requests(
    backend: Backend, conversations: Sequence[Conversation], sampling: SamplingParams
) -> list[TimedRequest]:
    """Run ``conversations`` concurrently and wait for all answers. Returns one result for each, in their
    order.

    Requests are prepared one after another, and each is started as soon as it is prepared; ``submitted_at``
    is the time of the call for all. If a request fails, the others are cancelled and its error is raised; on
    Ctrl-C, all are cancelled.
    """
    arrivals: queue.SimpleQueue[tuple[int, float, Chunk | Exception]] = queue.SimpleQueue()
    tickets: list[Ticket] = []
    prepared_at: list[float] = []
    sizes: list[tuple[int, int]] = []
    submitted_at = time.perf_counter()
    try:
        for number, conversation in enumerate(conversations):
            prepared = backend.prepare(conversation, sampling)
            prepared_at.append(time.perf_counter())
            sizes.append(
                (prepared.prompt_tokens, prepared.image_tokens or 0)
            )  # an in-process backend always counts them

            def listen(arrival: Chunk | Exception, number: int = number) -> None:
                arrivals.put((number, time.perf_counter(), arrival))

            tickets.append(backend.start(prepared, sampling, listen))
        times, ids = _collect_tokens(arrivals, len(conversations))
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        raise
    return [
        TimedRequest(
            submitted_at, prepared_at[number], tuple(times[number]), *sizes[number], tuple(ids[number])
        )
        for number in range(len(conversations))
    ]


def _collect_tokens(
    arrivals: "queue.SimpleQueue[tuple[int, float, Chunk | Exception]]", requests: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Times and ids of all tokens, until all ``requests`` have ended."""
    times: list[list[float]] = [[] for _ in range(requests)]
    ids: list[list[int]] = [[] for _ in range(requests)]
    running = requests
    while running:
        number, moment, chunk = arrivals.get()
        if isinstance(chunk, Exception):
            raise chunk
        times[number].append(moment)
        ids[number].extend(token.token_id for token in chunk.logprobs)
        running -= chunk.finish_reason is not None
    return times, ids


ShowLoading = Callable[[], AbstractContextManager[LoadProgress | None]]

# Parts of the time to first token, in order: on the CPU, then on the device.
FIRST_TOKEN_PARTS = ("decode", "resize", "text", "vision", "prefill")


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeated measurements of one quantity, in the order in which they were made; at least one."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of ``values``."""
        return statistics.median(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation; 0 for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Measurements with ``concurrency`` requests at the same time; in seconds, one sample per repetition.

    ``step``: one decode step of all requests. ``first_token``: time to first token, the median over the
    requests, which were all submitted at the same time. ``whole``: from their submission until all are
    complete. ``cached_tokens``: tokens of all requests in the KV cache, halfway through decoding.
    """

    concurrency: int
    step: Samples
    first_token: Samples
    whole: Samples
    cached_tokens: float

    @property
    def speed(self) -> Samples:
        """Tokens per second while decoding, of all requests together."""
        return Samples(tuple(self.concurrency / seconds for seconds in self.step.values))


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All measurements of one benchmark, in seconds, bytes and bytes per second.

    ``machine``: as it was before loading. ``startup_phases``: seconds by phase, in order.
    ``first_token_parts``: seconds of each of ``FIRST_TOKEN_PARTS``; without a picture, only of ``text`` and
    ``prefill``. ``decoding``: one for each of ``options.batches``. ``account``: the engine's settings and
    memory. ``gpu_bytes``: GPU memory of this process; None on a CPU, or if it is not known. ``step_bytes``:
    the bytes that a decode step reads; None with layers offloaded to RAM. ``roof``: measured memory
    bandwidth, bytes/s; None if that failed, for the reason ``roof_error``. ``planned_bytes``, ``held_bytes``:
    of the ledger's lines whose held bytes are known; 0 without a plan.
    """

    checkpoint: Checkpoint
    options: BenchOptions
    machine: Machine
    requests: BenchRequests
    startup_phases: dict[str, float]
    first_token_parts: dict[str, Samples]
    decoding: tuple[DecodeResult, ...]
    account: EngineAccount
    gpu_bytes: int | None
    step_bytes: "StepBytes | None"
    roof: float | None
    roof_error: str = ""
    planned_bytes: int = 0
    held_bytes: int = 0

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that was used, as it was before loading; None on a CPU, or if NVML does not report it."""
        return _gpu_of(self.account, self.machine.gpus)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in memory, as loaded."""
        return sum(self.account.memory.weights.values())

    def read_speed_and_share(self, each: DecodeResult) -> tuple[float | None, float | None]:
        """How fast the decode steps of ``each`` read memory, in bytes/s, and as a fraction of ``roof``.

        None for what is not known.
        """
        if self.step_bytes is None:
            return None, None
        speed = self.step_bytes.total(each.cached_tokens) / each.step.median
        return speed, speed / self.roof if self.roof else None


def run_bench(
    checkpoint: Checkpoint,
    options: BenchOptions,
    on_status: StatusCallback,
    phases: StartupTimer | None = None,
    loading: ShowLoading = nullcontext,
) -> BenchResult:
    """Load ``checkpoint``, measure it, and free it. Takes minutes.

    ``on_status``: called with a line of text after each step. ``phases``: the timer of the start-up phases
    before this call, which is continued; None: start-up begins with this call. ``loading``: makes a context
    manager that is entered while the model loads, and yields a progress callback, or None.

    Raises ``DoesNotFit`` if the requests do not fit into memory, or end too early to measure (see
    ``decode_step_time``), and what ``make_requests`` raises. If only the memory bandwidth cannot be measured,
    that is in the result.
    """
    phases = phases or StartupTimer()
    phases.begin("requests")
    requests = make_requests(checkpoint, options, max(options.batches))
    if requests.shared_pictures:
        on_status(
            "fewer pictures than concurrent requests: requests about the same picture share its encoding"
        )
    phases.begin("machine")
    machine = survey()
    if "torch" not in sys.modules:
        preload.start_cuda_context(options.device)
    with loading() as progress:
        backend = NativeBackend.load(checkpoint, requests.engine_options(options), progress)
    phases.end()
    with backend:
        sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
        decoding = tuple(
            _measure_decoding(backend, requests.conversations[:count], sampling, options.repeat, on_status)
            for count in dict.fromkeys(options.batches)
        )
        parts = _measure_first_token(backend, requests.conversations[0], options.repeat)
        account, step_bytes, device = backend.account(), _step_bytes(backend), backend.engine.device
        gpu_bytes = _gpu_bytes_held(account, machine.gpus)
        rows = ledger_rows(account, _gpu_of(account, read_gpus()[0]), expected_memory(backend, machine.gpus))
    del backend  # frees its memory, which reference cycles hold
    gc.collect()
    on_status("measuring the memory bandwidth")
    roof, roof_error = None, ""
    try:
        from vlfit.tuning.bandwidth import measure_memory_bandwidth

        roof = measure_memory_bandwidth(device)
    except VlfitError as error:
        roof_error = error.message
    return BenchResult(
        *(checkpoint, options, machine, requests, phases.seconds_by_phase, parts, decoding),
        *(account, gpu_bytes, step_bytes, roof, roof_error, *planned_and_held(rows)),
    )


def _measure_decoding(
    backend: NativeBackend,
    conversations: Sequence[Conversation],
    sampling: SamplingParams,
    repeat: int,
    on_status: StatusCallback,
) -> DecodeResult:
    count = len(conversations)
    run_requests(backend, conversations, sampling)  # warms up
    steps, first_tokens, wholes, cached = [], [], [], 0.0
    for repetition in range(repeat):
        requests = run_requests(backend, conversations, sampling)
        step, cached = decode_step_time(requests)
        steps.append(step)
        first_tokens.append(statistics.median(each.first_token_s for each in requests))
        wholes.append(max(each.token_times[-1] for each in requests) - requests[0].submitted_at)
        on_status(f"{count} at once, {repetition + 1} of {repeat}: {count / step:,.1f} tokens/s")
    return DecodeResult(
        count, Samples(tuple(steps)), Samples(tuple(first_tokens)), Samples(tuple(wholes)), cached
    )


def decode_step_time(requests: Sequence[TimedRequest]) -> tuple[float, float]:
    """Seconds per decode step while all ``requests`` decode, and tokens in the KV cache halfway through that
    time.

    That time begins when the last request gets its first token, and ends when the first request gets its last
    token, so it contains no prefill. Raises ``DoesNotFit`` if one request ends before another gets a token.
    """
    begin = max(each.token_times[0] for each in requests)
    end = min(each.token_times[-1] for each in requests)
    steps = sum(each.num_tokens_at(end) - each.num_tokens_at(begin) for each in requests) / len(requests)
    if end <= begin or steps <= 0:
        raise DoesNotFit(
            f"of {len(requests)} concurrent requests the first ended before the last had a token",
            "Use more --tokens, or a smaller --batch.",
        )
    middle = sum(
        each.prompt_tokens + (each.num_tokens_at(begin) + each.num_tokens_at(end)) / 2 for each in requests
    )
    return (end - begin) / steps, middle


def _measure_first_token(
    backend: NativeBackend, conversation: Conversation, repeat: int
) -> dict[str, Samples]:
    """Seconds of each part of the time to first token, ``repeat`` times."""
    from vlfit.tuning.timing import time_requests

    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    found: dict[str, list[float]] = {name: [] for name in FIRST_TOKEN_PARTS}
    for _ in range(repeat):
        with time_requests(backend.engine) as timed:
            [request] = run_requests(backend, [conversation], sampling)
        timings = request.phases
        decode, prepare, vision = sum(timed.decode), sum(timed.prepare), sum(timed.encode)
        times = (decode, prepare - decode, timings.preprocess_s - prepare, vision, timings.prefill_s - vision)
        for name, seconds in zip(FIRST_TOKEN_PARTS, times, strict=True):
            found[name].append(seconds)
    names = FIRST_TOKEN_PARTS if timed.prepare else ("text", "prefill")
    return {name: Samples(tuple(found[name])) for name in names}


def _step_bytes(backend: NativeBackend) -> "StepBytes | None":
    from vlfit.tuning.timing import step_bytes

    return step_bytes(backend.engine)


def _gpu_of(account: EngineAccount, gpus: tuple[Gpu, ...]) -> Gpu | None:
    settings = account.settings
    return None if settings.device == "cpu" else gpu_of_device(gpus, settings.gpu_uuid, settings.device)


def _gpu_bytes_held(account: EngineAccount, before: tuple[Gpu, ...]) -> int | None:
    """GPU memory of this process; if the driver does not report it, the decrease of free memory."""
    current, earlier = _gpu_of(account, read_gpus()[0]), _gpu_of(account, before)
    if current is None or earlier is None:
        return None
    ours = current.total - current.free - current.desktop
    return ours if ours > 0 else max(earlier.free - current.free, 0)

"""Measures one model on this machine: start, first token by phases, decoding, memory, against its own roof.

All in one process, in the order of a person's wait: import, load, a request that warms up, repetitions. The
speed of memory is measured last, when the model is gone and the device is warm. The parts of a first
token are those of runs of their own, in which the device is waited for around the vision tower. Knows what is
measured and its statistics; no words (``bench/results.py``).
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
from vlfit.api.sampling_params import SamplingParams
from vlfit.api.stats import EngineAccount
from vlfit.backends.base import LocalBackend, Phases, Ticket
from vlfit.backends.native import NativeBackend, Progress
from vlfit.bench.workload import Requests, Wanted, requests_for
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import DoesNotFit, VlfitError
from vlfit.loading import preload as head_start
from vlfit.machine.gpu import gpu_behind, read_gpus
from vlfit.machine.model import Gpu, Machine
from vlfit.machine.survey import survey

if TYPE_CHECKING:
    from vlfit.tuning.timing import StepBytes


# Requests, one or several at once, and when each of their tokens came. Knows clocks; no statistics.


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one request: picture and text to tensors; to the first token; the tokens after the first."""

    preprocess_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Heard:
    """One request on the clock of ``time.perf_counter``: ``asked``, ``prepared``, then when each token came.

    ``token_ids`` are there if log probabilities were asked for.
    """

    asked: float
    prepared: float
    arrived: tuple[float, ...]
    prompt_tokens: int
    image_tokens: int
    token_ids: tuple[int, ...] = ()

    @property
    def round(self) -> Round:
        return Round(
            self.prepared - self.asked, self.arrived[0] - self.prepared, self.arrived[-1] - self.arrived[0]
        )

    @property
    def first_token_s(self) -> float:
        """From the bytes of the picture to the first token."""
        return self.arrived[0] - self.asked

    def spoken(self, moment: float) -> int:
        """How many tokens had come at ``moment``."""
        return sum(arrived <= moment for arrived in self.arrived)


def ask_at_once(
    backend: LocalBackend, conversations: Sequence[Conversation], sampling: SamplingParams
) -> list[Heard]:
    """Ask ``conversations``, each as soon as it is prepared, and listen until all have their answers.

    All are asked at the same moment. Raises what the first of them fails with; the others are cancelled then,
    as by Ctrl-C.
    """
    arrivals: queue.SimpleQueue[tuple[int, float, Chunk | Exception]] = queue.SimpleQueue()
    tickets: list[Ticket] = []
    prepared_at: list[float] = []
    sizes: list[tuple[int, int]] = []
    asked = time.perf_counter()
    try:
        for number, conversation in enumerate(conversations):
            prepared = backend.prepare(conversation, sampling)
            prepared_at.append(time.perf_counter())
            sizes.append((prepared.prompt_tokens, prepared.image_tokens or 0))  # in process all is counted

            def listen(arrival: Chunk | Exception, number: int = number) -> None:
                arrivals.put((number, time.perf_counter(), arrival))

            tickets.append(backend.start(prepared, sampling, listen))
        times, ids = _listen(arrivals, len(conversations))
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        raise
    return [
        Heard(asked, prepared_at[number], tuple(times[number]), *sizes[number], tuple(ids[number]))
        for number in range(len(conversations))
    ]


def _listen(
    arrivals: "queue.SimpleQueue[tuple[int, float, Chunk | Exception]]", requests: int
) -> tuple[list[list[float]], list[list[int]]]:
    """When each token came, and which they were, until all ``requests`` have ended."""
    times: list[list[float]] = [[] for _ in range(requests)]
    ids: list[list[int]] = [[] for _ in range(requests)]
    speaking = requests
    while speaking:
        number, moment, chunk = arrivals.get()
        if isinstance(chunk, Exception):
            raise chunk
        times[number].append(moment)
        ids[number].extend(token.token_id for token in chunk.logprobs)
        speaking -= chunk.finish_reason is not None
    return times, ids


Say = Callable[[str], None]
Loading = Callable[[], AbstractContextManager[Progress | None]]

# The parts of a first token, in order: on the CPU, then on the device.
PARTS = ("decode", "resize", "text", "vision", "prefill")


@dataclass(frozen=True, slots=True)
class Many:
    """What was measured several times: all of it, in the order of time."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation; 0 of a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Decoding:
    """``at_once`` requests: seconds of a step in which all of them speak, each time it was measured.

    ``cached`` tokens were in the KV cache at its middle, of all together. ``first_token``: seconds until
    the request that is at the median has one, all being asked at the same moment. ``whole``: until all have
    all theirs.
    """

    at_once: int
    step: Many
    first_token: Many
    whole: Many
    cached: float

    @property
    def speed(self) -> Many:
        """Tokens per second, of all together."""
        return Many(tuple(self.at_once / seconds for seconds in self.step.values))


@dataclass(frozen=True, slots=True)
class Measured:
    """All of it, in seconds, bytes and bytes per second. ``machine`` is as it was before anything was loaded.

    ``start`` has its phases in order, from when the process began; ``parts`` are those of a first token.
    ``held``: bytes of the GPU that this process had, None on a CPU. ``read``: bytes of a decode step; None
    where layers wait in RAM. ``roof``: the speed of memory; None where it could not be measured, and
    ``no_roof`` says why.
    """

    checkpoint: Checkpoint
    wanted: Wanted
    machine: Machine
    requests: Requests
    start: dict[str, float]
    parts: dict[str, Many]
    decoding: tuple[Decoding, ...]
    account: EngineAccount
    held: int | None
    read: "StepBytes | None"
    roof: float | None
    no_roof: str = ""

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that was measured; None on a CPU, or where the driver's library does not tell."""
        return _gpu_of(self.account, self.machine.gpus)

    @property
    def weights_loaded(self) -> int:
        return sum(self.account.holdings.weights.values())

    def speed_and_share(self, each: Decoding) -> tuple[float | None, float | None]:
        """Bytes per second that a step reads, and which share of the roof that is; None where not known."""
        if self.read is None:
            return None, None
        speed = self.read.of(each.cached) / each.step.median
        return speed, speed / self.roof if self.roof else None


def measure(
    checkpoint: Checkpoint,
    wanted: Wanted,
    say: Say,
    phases: Phases | None = None,
    loading: Loading = nullcontext,
) -> Measured:
    """Measure ``checkpoint`` as it is ``wanted``. ``say`` is told how far it is.

    ``phases`` of the start go on; ``loading`` is entered while the model loads, and gives who is told.
    Raises ``DoesNotFit`` where there is no room for as many requests at once.
    """
    phases = phases or Phases()
    phases.begin("requests")
    requests = requests_for(checkpoint, wanted, max(wanted.batches))
    if requests.alike:
        say("fewer pictures than requests at once: those about the same one look at it together")
    phases.begin("machine")
    machine = survey()
    if "torch" not in sys.modules:
        head_start.make_context(wanted.device)
    with loading() as progress:
        backend = NativeBackend.load(checkpoint, requests.options(wanted), progress)
    phases.end()
    with backend:
        sampling = SamplingParams(max_tokens=wanted.tokens, ignore_eos=True)
        decoding = tuple(
            _decoding(backend, requests.conversations[:count], sampling, wanted.repeat, say)
            for count in dict.fromkeys(wanted.batches)
        )
        parts = _parts(backend, requests.conversations[0], wanted.repeat)
        account, read, device = backend.account(), _read(backend), backend.engine.device
        held = _held(account, machine.gpus)
    del backend  # its memory is wanted, which its parts hold in circles
    gc.collect()
    say("speed of memory")
    roof, why_not = None, ""
    try:
        from vlfit.tuning.bandwidth import memory_speed

        roof = memory_speed(device)
    except VlfitError as error:
        why_not = error.message
    return Measured(
        *(checkpoint, wanted, machine, requests, phases.seconds, parts, decoding),
        *(account, held, read, roof, why_not),
    )


def _decoding(
    backend: NativeBackend,
    conversations: Sequence[Conversation],
    sampling: SamplingParams,
    repeat: int,
    say: Say,
) -> Decoding:
    count = len(conversations)
    ask_at_once(backend, conversations, sampling)  # warms up
    steps, firsts, wholes, cached = [], [], [], 0.0
    for turn in range(repeat):
        heard = ask_at_once(backend, conversations, sampling)
        step, cached = step_of(heard)
        steps.append(step)
        firsts.append(statistics.median(each.first_token_s for each in heard))
        wholes.append(max(each.arrived[-1] for each in heard) - heard[0].asked)
        say(f"{count} at once, {turn + 1} of {repeat}: {count / step:,.1f} tokens/s")
    return Decoding(count, Many(tuple(steps)), Many(tuple(firsts)), Many(tuple(wholes)), cached)


def step_of(heard: Sequence[Heard]) -> tuple[float, float]:
    """Seconds of a step in which all requests speak, and how many tokens are in the cache then.

    Counted from when the last of them has begun until the first is done: no prompt is read in between.
    Raises ``DoesNotFit`` where there is no such time.
    """
    begin = max(each.arrived[0] for each in heard)
    end = min(each.arrived[-1] for each in heard)
    steps = sum(each.spoken(end) - each.spoken(begin) for each in heard) / len(heard)
    if end <= begin or steps <= 0:
        raise DoesNotFit(
            f"of {len(heard)} requests at once the first ended before the last began to speak",
            "decode more --tokens, or ask fewer at once with --batch",
        )
    middle = sum(each.prompt_tokens + (each.spoken(begin) + each.spoken(end)) / 2 for each in heard)
    return (end - begin) / steps, middle


def _parts(backend: NativeBackend, conversation: Conversation, repeat: int) -> dict[str, Many]:
    """Seconds of each part of one request's first token, ``repeat`` times."""
    from vlfit.tuning.timing import parts_of_requests

    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    for _ in range(repeat):
        with parts_of_requests(backend.engine) as timed:
            [heard] = ask_at_once(backend, [conversation], sampling)
        seen = heard.round
        decode, prepare, vision = sum(timed.decode), sum(timed.prepare), sum(timed.look)
        times = (decode, prepare - decode, seen.preprocess_s - prepare, vision, seen.prefill_s - vision)
        for name, seconds in zip(PARTS, times, strict=True):
            found[name].append(seconds)
    names = PARTS if timed.prepare else ("text", "prefill")
    return {name: Many(tuple(found[name])) for name in names}


def _read(backend: NativeBackend) -> "StepBytes | None":
    from vlfit.tuning.timing import step_bytes

    return step_bytes(backend.engine)


def _gpu_of(account: EngineAccount, gpus: tuple[Gpu, ...]) -> Gpu | None:
    settings = account.settings
    return None if settings.device == "cpu" else gpu_behind(gpus, settings.gpu_uuid, settings.device)


def _held(account: EngineAccount, before: tuple[Gpu, ...]) -> int | None:
    """What this process holds of its GPU; where no driver tells, what is less free than ``before``."""
    now, then = _gpu_of(account, read_gpus()[0]), _gpu_of(account, before)
    if now is None or then is None:
        return None
    ours = now.total - now.free - now.desktop
    return ours if ours > 0 else max(then.free - now.free, 0)

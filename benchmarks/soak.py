"""A thousand mixed requests over HTTP, and whether memory stays where it was.

    python -m benchmarks.soak --json FILE               4B in FP8 with 7,200 MiB of the card free: ten minutes
    python -m benchmarks.soak --model mini --device cpu --requests 40 --settled 10    half a minute, no GPU

Pictures of 64 to 4,000 pixels, one to four in a request, 1 to 600 tokens out, a third hung up on midway; some
with `detail: low`, some too large for the context, some broken, and now and then more at once than the queue
takes. The right outcomes of each are fixed before it is sent (``soak_requests.py``). Exit code 1 if there was
another outcome, if GPU memory moved by a MiB after the first ``--settled`` requests, or if the server's RAM
grew by 50 MiB from then to the end. Memory is read when no request runs: before the first, after
``--settled`` and after the last; and in between, for the curve.

Resident RAM is anonymous pages, which are the process's own, and pages of files: code of libraries, in RAM
from its first run until the system needs the room. Pages are counted one by one (``smaps_rollup``): the
counters in /proc/PID/status are kept per processor, and with 100 processors they may be off by more than the
growth that is looked for.
"""

import argparse
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checkpoints import checkpoint_of, ram_folder
from benchmarks.gpu_memory import GpuMeter, MemoryHolder
from benchmarks.harness import (
    MIB,
    add_json_option,
    argument_parser,
    at_once,
    card,
    commit,
    in_mib,
    print_table,
    require_gpu,
    versions_of,
    write_json,
)
from benchmarks.memory import Row, serve_arguments
from benchmarks.serving import (
    DISCONNECTED,
    DidNotStart,
    Reply,
    ServerProcess,
    new_client,
    send,
    stream_and_disconnect,
)
from benchmarks.soak_requests import BURST, SoakRequest, requests
from vlfit.models.registry import read_config

CONTEXT = 6144
MAX_RAM_GROWTH = 50 * MIB
MAX_GPU_CHANGE = MIB
SETTLING = 3.0  # seconds after the last answer: cancelled requests end at the next step, heaps are trimmed
MAX_TRIES = 120
READY, SETTLED, END = "ready", "settled", "the end"  # moments without running requests
SAMPLE_INTERVAL = 50  # requests between two samples of memory
QUEUE_PER_SEQUENCE = 8  # requests that may wait for each running one (``cli/serving/serve_here.py``)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes after so many ``requests``, ``seconds`` after the start of the command.

    ``name`` is empty if requests were running. ``card``: GPU memory of the process (NVML), of which ``pool``
    is torch's; the rest is CUDA's, with the kernels that are loaded. ``image_cache`` (features of pictures,
    bounded and planned) is part of ``anonymous``, and that of ``resident``.
    """

    name: str
    requests: int
    seconds: float
    card: int
    resident: int
    anonymous: int
    image_cache: int
    pool: int = 0

    @property
    def files(self) -> int:
        """Pages of files, and memory shared with other processes."""
        return self.resident - self.anonymous


@dataclass
class SoakRun:
    """Outcomes and memory of a run. Many threads add to it, one at a time."""

    planned: int
    replies: list[tuple[SoakRequest, Reply]] = field(default_factory=list)
    moments: list[MemorySample] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, server: ServerProcess, request: SoakRequest, replies: list[Reply]) -> None:
        with self.lock:
            before = len(self.replies)
            self.replies += [(request, reply) for reply in replies]
            if len(self.replies) // SAMPLE_INTERVAL > before // SAMPLE_INTERVAL:
                self.sample(server)

    def sample(self, server: ServerProcess, name: str = "") -> None:
        self.moments.append(sample_memory(server, name, len(self.replies)))

    def at(self, name: str) -> MemorySample | None:
        """The sample of that name, if the run came so far."""
        return next((each for each in self.moments if each.name == name), None)

    @property
    def wrong(self) -> list[tuple[SoakRequest, Reply]]:
        return [(request, reply) for request, reply in self.replies if not request.accepts(reply)]


def main() -> None:
    options = read_options()
    if options.device != "cpu":
        require_gpu("soak")
    facts: dict[str, Any] = {"commit": commit(), **versions_of("torch", "triton")}
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    with tempfile.TemporaryDirectory(prefix="vlfit-soak-", dir=ram_folder()) as folder:
        checkpoint = checkpoint_of(options.model, Path(folder), random=True)
        options.context = options.context or default_context(checkpoint)
        row = Row(options.model, "", options.context, options.image_tokens, options.sequences)
        places = options.sequences + max(QUEUE_PER_SEQUENCE * options.sequences, 16)
        drawn = requests(options.requests, options.context, options.image_tokens, places, options.seed)
        try:
            with limited_gpu(options) as meter:
                arguments = [
                    *serve_arguments(row, checkpoint, on_gpu=meter is not None),
                    *options.serve.split(),
                ]
                with ServerProcess(arguments, meter) as server:
                    facts |= {"card": card(), "ready_s": round(server.ready_s, 2)} if meter else {}
                    run = run_soak(server, options, drawn)
                    result = {"facts": facts, "command": arguments, **summary(server, run, options)}
                    print_result(result, run, server)
        except DidNotStart as error:
            sys.exit(f"the server did not start: {error}")
    write_json(options.json, result)
    sys.exit(1 if result["verdicts"] else 0)


def read_options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--model", default="4B-fp8", help="SIZE-FORMAT, written with random weights; or mini, or a folder"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--free", type=int, default=7200, metavar="MIB", help="of the card; 0: all of it")
    parser.add_argument("--requests", type=int, default=1000, metavar="N")
    parser.add_argument("--settled", type=int, default=100, metavar="N", help="memory counts from here on")
    parser.add_argument("--context", type=int, help=f"{CONTEXT:,}, or the checkpoint's if that is less")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--image-tokens", type=int, default=1280)
    parser.add_argument(
        "--serve", default="", metavar="OPTIONS", help="more options of vlfit serve, in one argument"
    )
    parser.add_argument("--clients", type=int, default=8, help="that wait for an answer at any time")
    parser.add_argument("--seconds", type=float, default=540.0, help="send no new request after so long")
    parser.add_argument("--seed", type=int, default=1)
    add_json_option(parser)
    return parser.parse_args()


def default_context(checkpoint: Path) -> int:
    return min(CONTEXT, read_config(checkpoint).text.max_position_embeddings)


@contextmanager
def limited_gpu(options: argparse.Namespace) -> Iterator[GpuMeter | None]:
    """A meter of the GPU with ``options.free`` MiB free; None on a CPU."""
    if options.device == "cpu":
        yield None
    elif not options.free:
        yield GpuMeter()
    else:
        with MemoryHolder() as holder:
            holder.leave_free(options.free * MIB)
            yield GpuMeter()


# --- requests ----------------------------------------------------------------------------------------------


def run_soak(server: ServerProcess, options: argparse.Namespace, drawn: list[SoakRequest]) -> SoakRun:
    """Send all requests; sample memory before them, after the first ``options.settled``, and at the end."""
    run = SoakRun(options.requests)
    deadline = time.perf_counter() + options.seconds
    run.sample(server, READY)
    first = position_after(drawn, options.settled)
    for part, moment in ((drawn[:first], SETTLED), (drawn[first:], END)):
        if part:
            send_all(server, run, part, options.clients, deadline)
            time.sleep(SETTLING)
        if moment == END or len(run.replies) >= options.settled:
            run.sample(server, moment)
    return run


def position_after(drawn: list[SoakRequest], count: int) -> int:
    """How many elements of ``drawn`` make ``count`` requests."""
    total = 0
    for position, request in enumerate(drawn):
        if total >= count:
            return position
        total += request.count
    return len(drawn)


def send_all(
    server: ServerProcess, run: SoakRun, drawn: list[SoakRequest], clients: int, deadline: float
) -> None:
    """Send ``drawn`` in order, from so many clients; a burst has clients of its own."""
    queue = iter(drawn)
    lock = threading.Lock()

    def run_client() -> None:
        with new_client() as client:
            while time.perf_counter() < deadline:
                with lock:
                    request = next(queue, None)
                if request is None:
                    return
                if request.kind == BURST:
                    run.add(server, request, send_burst(server.url, request))
                else:
                    run.add(server, request, [send_with_retries(client, server.url, request)])

    threads = [threading.Thread(target=run_client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send_with_retries(client: httpx.Client, url: str, request: SoakRequest) -> Reply:
    """Send ``request``, again each second while the queue is full, as it is during a burst."""
    body = request.body()
    for _ in range(MAX_TRIES):
        if request.disconnect_after is None:
            reply = send(client, url, body)
        else:
            reply = stream_and_disconnect(client, url, body, request.disconnect_after)
        if reply.status != 429:
            break
        time.sleep(1)
    return reply


def send_burst(url: str, request: SoakRequest) -> list[Reply]:
    """Send ``request.count`` copies at the same moment, each from a client of its own."""

    def send_one(body: bytes) -> Reply:
        with new_client() as client:
            return send(client, url, body)

    return at_once([partial(send_one, request.body())] * request.count)


# --- memory ------------------------------------------------------------------------------------------------


def sample_memory(server: ServerProcess, name: str, requests: int) -> MemorySample:
    resident, anonymous = resident_and_anonymous(server)
    status = server.get("/v1/vlfit/status")
    cache = status.get("image_cache", {}).get("bytes", 0)
    pool = (status["memory"]["pool"] or {}).get("reserved", 0)
    return MemorySample(name, requests, server.seconds, server.gpu_bytes(), resident, anonymous, cache, pool)


def resident_and_anonymous(server: ServerProcess) -> tuple[int, int]:
    try:
        text = Path(f"/proc/{server.pid}/smaps_rollup").read_text("ascii", errors="replace")
    except OSError:  # an old kernel
        return server.host_bytes("VmRSS"), server.host_bytes("RssAnon")
    matches = [re.search(rf"^{line}:\s+(\d+) kB", text, re.MULTILINE) for line in ("Rss", "Anonymous")]
    resident, anonymous = (int(match[1]) * 1024 if match else 0 for match in matches)
    return resident, anonymous


def memory_table(moments: Sequence[MemorySample]) -> list[list[str]]:
    """A row for each sample, in MiB."""
    heading = "requests", "s", "card", "of it torch's", "resident", "of it anonymous", "pages of files"
    rows = [[*heading, "kept features"]]
    for each in moments:
        sizes = (each.card, each.pool, each.resident, each.anonymous, each.files, each.image_cache)
        cells = (in_mib(size, 1) for size in sizes)
        rows.append([f"{each.requests} {each.name}".strip(), f"{each.seconds:.0f}", *cells])
    return rows


def growth(before: MemorySample, after: MemorySample) -> str:
    """In words, what RAM grew by, and which kind of it."""
    files, cache = after.files - before.files, after.image_cache - before.image_cache
    own = after.anonymous - before.anonymous - cache
    return (
        f"{(after.resident - before.resident) / MIB:+.1f} MiB of RAM from {before.name} to {after.name}: "
        f"{cache / MIB:+.1f} kept features, {own / MIB:+.1f} anonymous beside them, "
        f"{files / MIB:+.1f} of files"
    )


# --- the report --------------------------------------------------------------------------------------------


def summary(server: ServerProcess, run: SoakRun, options: argparse.Namespace) -> dict[str, Any]:
    """Outcomes, memory and ``verdicts``: what is wrong with them."""
    settled, end = run.at(SETTLED), run.at(END)
    status = server.get("/v1/vlfit/status")
    verdicts = [describe(request, reply) for request, reply in run.wrong]
    if len(run.replies) < run.planned:
        verdicts.append(f"{len(run.replies)} of {run.planned} requests were sent in the time there was")
    if settled is None or end is None:
        verdicts.append("too few requests were sent: nothing is known of memory")
    else:
        least, most = server.memory.range_since(settled.seconds)
        moved = most - least >= MAX_GPU_CHANGE or abs(end.card - settled.card) >= MAX_GPU_CHANGE
        if options.device != "cpu" and moved:
            verdicts.append(f"GPU memory moved between {least / MIB:.1f} and {most / MIB:.1f} MiB")
        if (grown := end.resident - settled.resident) >= MAX_RAM_GROWTH:
            verdicts.append(f"the server's RAM grew by {grown / MIB:.0f} MiB")
    verdicts += leaks(status)
    answered = [reply for _, reply in run.replies if reply.status == 200 and reply.ended != DISCONNECTED]
    seconds = server.seconds - server.ready_s - 2 * SETTLING
    return {
        "outcomes": count_outcomes(run),
        "verdicts": verdicts,
        "seconds": round(seconds, 1),
        "tokens": sum(reply.tokens for _, reply in run.replies),
        "answer_s": quantiles([reply.seconds for reply in answered]),
        "memory": {
            "moments": [asdict(each) | {"files": each.files} for each in run.moments],
            "card": {
                each.name: server.memory.range_since(each.seconds)
                for each in run.moments
                if each.name not in ("", END)
            },
            "card_changes": [each for each in server.memory.curve if each[0] > server.ready_s],
            "card_peak": server.memory.peak,
            "resident_peak": server.memory.peak_resident,
            "growth": [growth(before, end) for before in (run.at(READY), settled) if before and end],
        },
        "status": {name: status[name] for name in ("requests", "tokens", "steps", "kv_blocks", "places")},
        "ledger": server.get("/v1/vlfit/ledger"),
    }


def count_outcomes(run: SoakRun) -> dict[str, dict[str, int]]:
    """How often each outcome came, by kind of request."""
    counted: dict[str, Counter[str]] = {}
    for request, reply in run.replies:
        counted.setdefault(request.kind, Counter())[f"{reply.status} {reply.ended}"] += 1
    return {kind: dict(counts) for kind, counts in sorted(counted.items())}


def leaks(status: dict[str, Any]) -> Iterator[str]:
    """Messages for what is still taken when all requests are over, and for requests that failed inside."""
    if failed := status["requests"]["failed"]:
        yield f"{failed} requests failed inside the engine"
    for name in ("running", "waiting"):
        if count := status["requests"][name]:
            yield f"{count} requests are still {name}"
    if taken := status["places"]["taken"]:
        yield f"{taken} places are still taken"
    blocks = status["kv_blocks"]
    if blocks["used"] > blocks["known"]:
        yield f"{blocks['used'] - blocks['known']} KV blocks are leaked"


def describe(request: SoakRequest, reply: Reply) -> str:
    return f"{request.kind}: {reply.status} {reply.ended}, {reply.tokens} tokens; {reply.message[:300]}"


def quantiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    parts = statistics.quantiles(values, n=20)
    return {"median": round(statistics.median(values), 3), "of_20_the_slowest": round(parts[-1], 3)}


def print_result(result: dict[str, Any], run: SoakRun, server: ServerProcess) -> None:
    ends = sorted({end for counts in result["outcomes"].values() for end in counts})
    rows = [["requests", *ends]]
    rows += [
        [kind, *(str(counts.get(end, "")) for end in ends)] for kind, counts in result["outcomes"].items()
    ]
    print_table(rows)
    print("\nMiB")
    print_table(memory_table(run.moments))
    for line in result["memory"]["growth"]:
        print(line)
    for seconds, size in result["memory"]["card_changes"]:
        print(f"card at {seconds:.1f} s: {size / MIB:,.1f} MiB")
    for name, (least, most) in result["memory"]["card"].items():
        print(f"card since {name}: {in_mib(least, 1)} to {in_mib(most, 1)} MiB")
    print(
        f"\n{sum(sum(counts.values()) for counts in result['outcomes'].values())} requests, "
        f"{result['tokens']} tokens received in {result['seconds']:.0f} s; answers {result['answer_s']}"
    )
    for message in result["verdicts"]:
        print(f"WRONG: {message}")
    if result["verdicts"]:
        print(server.log_tail(12), file=sys.stderr)


if __name__ == "__main__":
    main()

"""What `vlfit batch` adds to the engine, the memory it holds, and what being killed costs it.

    python -m benchmarks.batch                                     10,000 small pictures, killed three times
    python -m benchmarks.batch --pictures 600 --blocks 4           to see it run: three minutes

Pictures of 32 x 32 pixels, no two alike, are made on the fly and described in a few tokens by mini on the
CPU, which gets 16 tokens of each (the default is 64 at least). Two parts:

**Overhead**: one engine, blocks of pictures in turn: through a batch (a folder, hashes, records, a file), and
straight through the same backend (bytes already in memory, the same number of preparing threads and of
requests in flight, nothing stored). CPU time and wall time of each block, the batch's from its first look
into the folder to its last record on disk. Blocks are short and alternate, since a machine that others use is
faster or slower for seconds on end. Printed are the ratio of the sums of all blocks and the median ratio of
pairs, each with its 95 % interval (a bootstrap over pairs). The engine's own threads do the same work in
both: where others work too, read the CPU time of all other threads, which is where a batch does its work.

**Kills**: `vlfit batch` as a program, ended by SIGKILL at random places of its output and started again until
it is through: whether every picture is there once, and how far the resident memory of each process rose from
its 100th picture to its last. Exit code 1 if a picture is missing or there twice.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.harness import (
    MIB,
    ROOT,
    LineCounter,
    add_json_option,
    argument_parser,
    commit,
    cpu_name,
    environment,
    process_memory,
    write_json,
)
from vlfit.api.conversation import ImagePart
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend
from vlfit.backends.opening import BackendSpec
from vlfit.tasks.batch.executor import BatchExecutor, ExecutorOptions
from vlfit.tasks.batch.job import Job, PictureTask, Wish
from vlfit.tasks.batch.output import Output
from vlfit.tasks.batch.runner import BatchRunner, open_for_batch
from vlfit.tasks.batch.sources import open_sources

RESAMPLED = 20_000  # bootstrap samples
WARM_PICTURES = 100  # after which memory should not grow
SAMPLE_INTERVAL = 0.2  # seconds between two samples of a running program


@dataclass(frozen=True)
class BlockCost:
    """Seconds of a block of ``pictures``; ``beside``: CPU time of all threads but the engine's."""

    pictures: int
    processor: float
    wall: float
    beside: float

    def __str__(self) -> str:
        processor, wall, beside = (
            1e3 * seconds / self.pictures for seconds in (self.processor, self.wall, self.beside)
        )
        return f"{processor:.2f} ms of CPU time, {beside:.2f} of it outside the engine; {wall:.2f} ms"


@dataclass
class Overhead:
    """Blocks in pairs, and the seconds to open and close an output, which is done once a run."""

    alone: list[BlockCost] = field(default_factory=list)
    batch: list[BlockCost] = field(default_factory=list)
    once: list[float] = field(default_factory=list)


@dataclass
class BatchProcess:
    """One start of the program: pictures done, and resident bytes at the 100th and at the last."""

    done: int = 0
    at_100: int | None = None
    last: int = 0
    most: int = 0
    killed: bool = False

    @property
    def growth(self) -> int | None:
        return None if self.at_100 is None else self.last - self.at_100


@dataclass
class Results:
    """All results, for --json. Bytes and seconds."""

    commit: str
    processor: str
    threads: int
    settings: dict[str, Any]
    overhead: Overhead | None = None
    processes: list[BatchProcess] = field(default_factory=list)
    missing: int | None = None
    twice: int | None = None
    seconds: float | None = None


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pictures", type=int, default=10_000, help="of the kills part")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--block", type=int, default=40, help="pictures of a block, of the overhead part")
    parser.add_argument("--blocks", type=int, default=60, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--image-tokens", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8, help="requests that run at once")
    parser.add_argument("--seed", type=int, default=8, help="of the places where it is killed")
    parser.add_argument("--only", choices=("overhead", "kills"))
    add_json_option(parser)
    options = parser.parse_args()
    import torch

    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
    }
    results = Results(commit(), cpu_name(), torch.get_num_threads(), settings)
    print(f"commit {results.commit}; {results.processor}, {results.threads} threads")
    with tempfile.TemporaryDirectory(prefix="vlfit-batch-") as folder:
        if options.only != "kills":
            results.overhead = measure_overhead(options, Path(folder))
            print_overhead(results.overhead)
        if options.only != "overhead":
            measure_kills(options, Path(folder), results)
            print_kills(results)
    write_json(options.json, asdict(results))
    if results.missing or results.twice:
        sys.exit("pictures are missing or there twice")


# --- overhead ----------------------------------------------------------------------------------------------


def make_pictures(folder: Path, count: int, seed: int) -> None:
    """``count`` small pictures of noise in the new ``folder``, no two alike for different seeds."""
    folder.mkdir(parents=True)
    noise = random.Random(seed)
    for number in range(count):
        small = Image.frombytes("RGB", (4, 4), noise.randbytes(48))
        small.resize((32, 32)).save(folder / f"{number:06}.png", compress_level=1)


def measure_overhead(options: argparse.Namespace, folder: Path) -> Overhead:
    """``options.blocks`` pairs of blocks of ``options.block`` pictures, after one pair that warms up."""
    overhead = Overhead()
    sampling = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    engine = EngineOptions(device="cpu", image_tokens=options.image_tokens)
    backend, executor_options = open_for_batch(
        BackendSpec(model="mini", options=engine), options.sequences, readers=2
    )
    try:
        for block in range(2 * options.blocks + 2):
            pictures_folder = folder / f"block{block}"
            make_pictures(pictures_folder, options.block, seed=block)
            # Each pair the other way round: A B, B A, A B, ...
            if block % 4 in (0, 3):
                costs = overhead.alone
                files = sorted(pictures_folder.iterdir())
                pictures = [ImagePart(file.read_bytes(), file.name) for file in files]
                task = PictureTask(Wish.caption(), sampling)
                run = partial(run_straight, backend, task, pictures, executor_options)
                cost = measure_cost(len(pictures), run)
            else:
                costs = overhead.batch
                job = Job(Wish.caption(), sampling, (str(pictures_folder),), folder / f"block{block}.jsonl")
                cost, once = run_batch(backend, job, executor_options, options.block)
                overhead.once.append(once)
            if block >= 2:  # the first of each warms up
                costs.append(cost)
                print(f"  {'alone' if costs is overhead.alone else 'batch'}: {cost}", flush=True)
    finally:
        backend.close()
    return overhead


def measure_cost(pictures: int, run: Callable[[], object]) -> BlockCost:
    """Cost of ``run``, which starts and ends threads of its own."""
    lasting = thread_seconds()
    began, processor_began = time.perf_counter(), time.process_time()
    run()
    wall, used = time.perf_counter() - began, time.process_time() - processor_began
    # The engine's threads exist before and after; those that prepare and write do not.
    engine = sum(seconds - lasting[task] for task, seconds in thread_seconds().items() if task in lasting)
    return BlockCost(pictures, used, wall, used - engine)


def thread_seconds() -> dict[str, float]:
    """CPU time of each thread of this process but this one, by its id."""
    tasks = Path("/proc/self/task")
    own = str(threading.get_native_id())
    return {
        task.name: int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in tasks.iterdir()
        if task.name != own
    }


def run_straight(
    backend: Backend, task: PictureTask, pictures: list[ImagePart], options: ExecutorOptions
) -> None:
    """The same requests without a batch around them."""
    slots = threading.Semaphore(options.max_in_flight)
    queue: Iterator[ImagePart] = iter(pictures)
    lock, ended, unfinished = threading.Lock(), threading.Event(), [len(pictures)]

    def listen(arrival: Chunk | Exception) -> None:
        if isinstance(arrival, Exception):
            raise arrival
        if arrival.finish_reason is not None:
            slots.release()
            with lock:
                unfinished[0] -= 1
                if not unfinished[0]:
                    ended.set()

    def prepare() -> None:
        while True:
            with lock:
                picture = next(queue, None)
            if picture is None:
                return
            prepared = task.prepare(backend, picture)
            slots.acquire()
            backend.start(prepared, task.sampling, listen)

    threads = [threading.Thread(target=prepare) for _ in range(options.readers)]
    for thread in threads:
        thread.start()
    ended.wait()
    for thread in threads:
        thread.join()


def run_batch(backend: Backend, job: Job, options: ExecutorOptions, pictures: int) -> tuple[BlockCost, float]:
    """Cost as ``vlfit batch`` has it; and seconds to open and close the output, nothing over thousands of
    pictures.
    """
    began = time.perf_counter()
    output = Output(job)
    try:
        output.begin(backend.model)
        runner = BatchRunner(
            BatchExecutor(PictureTask.from_job(job), backend, options), open_sources(job.sources), output
        )
        cost = measure_cost(pictures, runner.run)
    finally:
        output.close()
    if runner.tally.done != pictures:
        raise RuntimeError(f"of {pictures} pictures {runner.tally.done} were done")
    return cost, time.perf_counter() - began - cost.wall


def print_overhead(overhead: Overhead) -> None:
    pairs = len(overhead.alone)
    drawn = np.random.default_rng(0).integers(pairs, size=(RESAMPLED, pairs))
    print(f"{pairs} pairs of blocks of {overhead.alone[0].pictures} pictures; in brackets the 95 % interval:")
    for name, attribute in (("CPU time", "processor"), ("wall time", "wall")):
        batch, alone = _per_picture(overhead.batch, attribute), _per_picture(overhead.alone, attribute)
        total = _percent_more(batch.sum() / alone.sum(), batch[drawn].sum(1) / alone[drawn].sum(1))
        in_pairs = _percent_more(np.median(batch / alone), np.median((batch / alone)[drawn], axis=1))
        print(f"overhead in {name}: {total} in all, {in_pairs} in the median pair")
    whole = statistics.median(cost.processor / cost.pictures for cost in overhead.alone)
    more = statistics.median(
        (batch.beside - one.beside) / one.pictures
        for one, batch in zip(overhead.alone, overhead.batch, strict=True)
    )
    print(
        f"overhead outside the engine: {1e3 * more:+.2f} ms of CPU time a picture, "
        f"{100 * more / whole:+.1f} % of {1e3 * whole:.2f} ms"
    )
    print(f"once a run: {1e3 * statistics.median(overhead.once):.1f} ms to open and close the output")


def _per_picture(costs: Sequence[BlockCost], name: str) -> NDArray[np.float64]:
    return np.array([getattr(cost, name) / cost.pictures for cost in costs])


def _percent_more(ratio: float, drawn: NDArray[np.float64]) -> str:
    """``ratio`` less one in per cent, with the interval of 95 % of the ``drawn`` ratios."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    return "{:+.1f} % ({:+.1f} to {:+.1f})".format(*(100 * (each - 1) for each in (ratio, low, high)))


# --- kills -------------------------------------------------------------------------------------------------


def measure_kills(options: argparse.Namespace, folder: Path, results: Results) -> None:
    pictures, output = folder / "pictures", folder / "captions.jsonl"
    make_pictures(pictures, options.pictures, seed=-1)
    chance = random.Random(options.seed)
    ends = sorted(chance.randrange(1, options.pictures) for _ in range(options.kills))
    command = [
        *(sys.executable, "-m", "vlfit", "batch", str(pictures), "-o", str(output), "-m", "mini", "-q"),
        *("--device", "cpu", "--max-tokens", str(options.max_tokens)),
        *("--concurrency", str(options.sequences)),
    ]
    began = time.perf_counter()
    for end in [*ends, None]:
        process = run_until(command, output, end)
        results.processes.append(process)
        growth = (
            "too short for growth"
            if process.growth is None
            else f"{process.growth / MIB:+.1f} MiB since its 100th"
        )
        print(
            f"  {'killed' if process.killed else 'through'} after {process.done} pictures: "
            f"{process.last / MIB:.0f} MiB resident, {growth}, at most {process.most / MIB:.0f}",
            flush=True,
        )
    results.seconds = time.perf_counter() - began
    keys = [json.loads(line)["key"] for line in output.read_text("utf-8").splitlines()]
    results.twice = len(keys) - len(set(keys))
    results.missing = len({path.name for path in pictures.iterdir()} - set(keys))


def run_until(command: list[str], output: Path, end: int | None) -> BatchProcess:
    """Start the program and kill it when its output has ``end`` lines; None: let it finish."""
    process = BatchProcess()
    lines = LineCounter(output)
    before = lines.count()
    with subprocess.Popen(command, cwd=ROOT, env=environment()) as program:
        try:
            while program.poll() is None:
                resident = process_memory("VmRSS", program.pid)
                process.done = lines.count() - before
                if resident:
                    process.last, process.most = resident, max(process.most, resident)
                    if process.done >= WARM_PICTURES and process.at_100 is None:
                        process.at_100 = resident
                if end is not None and before + process.done >= end:
                    program.send_signal(signal.SIGKILL)
                    process.killed = True
                    break
                time.sleep(SAMPLE_INTERVAL)
        finally:
            program.kill()
    process.done = lines.count() - before
    if not process.killed and program.returncode:
        sys.exit(f"vlfit batch ended with {program.returncode}")
    return process


def print_kills(results: Results) -> None:
    growths = [process.growth for process in results.processes if process.growth is not None]
    kills = sum(process.killed for process in results.processes)
    print(
        f"kills: {results.settings['pictures']:,} pictures in {results.seconds:.0f} s with {kills} kills: "
        f"{results.missing} missing, {results.twice} twice; resident memory rose by at most "
        f"{max(growths, default=0) / MIB:.1f} MiB"
    )


if __name__ == "__main__":
    main()

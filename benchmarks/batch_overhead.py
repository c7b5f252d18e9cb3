"""What a batch adds to the engine, picture by picture: blocks of both by turns, and how sure the figure is.

A part of ``benchmarks.batch``, which says what is compared. Blocks are short and stand side by side, since a
machine that others use is faster or slower for seconds on end. Told are the quotient of the sums of all
blocks, the median of the quotients of neighbours, and for each an interval that 19 of 20 such measurements
lie in, as far as these pairs tell (a bootstrap over pairs).
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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

RESAMPLED = 20_000


@dataclass(frozen=True)
class Cost:
    """Seconds of a block of ``pictures``; ``beside``: processor time of all but the engine's own threads."""

    pictures: int
    processor: float
    wall: float
    beside: float

    def __str__(self) -> str:
        processor, wall, beside = (
            1e3 * seconds / self.pictures for seconds in (self.processor, self.wall, self.beside)
        )
        return f"{processor:.2f} ms of processor time, {beside:.2f} of it beside the engine; {wall:.2f} ms"


@dataclass
class Overhead:
    """Blocks in pairs, in the order of the pairs; and what opening and closing an output took, once a run."""

    alone: list[Cost] = field(default_factory=list)
    batch: list[Cost] = field(default_factory=list)
    once: list[float] = field(default_factory=list)


def make_pictures(folder: Path, count: int, seed: int) -> None:
    """``count`` small pictures of noise in ``folder``: no two are the same, and none was seen before."""
    folder.mkdir(parents=True)
    noise = random.Random(seed)
    for number in range(count):
        small = Image.frombytes("RGB", (4, 4), noise.randbytes(48))
        small.resize((32, 32)).save(folder / f"{number:06}.png", compress_level=1)


def measure_overhead(options: argparse.Namespace, folder: Path) -> Overhead:
    """``options.blocks`` pairs of blocks of ``options.block`` pictures, after one pair that warms up."""
    found = Overhead()
    sampling = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    engine = EngineOptions(device="cpu", image_tokens=options.image_tokens)
    backend, pace = open_for_batch(BackendSpec(model="mini", options=engine), options.sequences, readers=2)
    try:
        for block in range(2 * options.blocks + 2):
            place = folder / f"block{block}"
            make_pictures(place, options.block, seed=block)
            # By turns, and each pair the other way round: A B, B A, A B, ...
            if block % 4 in (0, 3):
                kept = found.alone
                pictures = [ImagePart(name.read_bytes(), name.name) for name in sorted(place.iterdir())]
                work = PictureTask(Wish.caption(), sampling)
                cost = cost_of(len(pictures), partial(straight, backend, work, pictures, pace))
            else:
                kept = found.batch
                job = Job(Wish.caption(), sampling, (str(place),), folder / f"block{block}.jsonl")
                cost, once = through_batch(backend, job, pace, options.block)
                found.once.append(once)
            if block >= 2:  # the first of each warms up
                kept.append(cost)
                print(f"  {'alone' if kept is found.alone else 'batch'}: {cost}", flush=True)
    finally:
        backend.close()
    return found


def cost_of(pictures: int, work: Callable[[], object]) -> Cost:
    """What ``work`` takes, which begins its own threads and ends them."""
    lasting = thread_seconds()
    began, processor_began = time.perf_counter(), time.process_time()
    work()
    wall, used = time.perf_counter() - began, time.process_time() - processor_began
    # The engine's threads were there before and are there after; those that prepare and write are not.
    engine = sum(seconds - lasting[task] for task, seconds in thread_seconds().items() if task in lasting)
    return Cost(pictures, used, wall, used - engine)


def thread_seconds() -> dict[str, float]:
    """Processor time of each thread of this process but this one, by its number."""
    tasks = Path("/proc/self/task")
    own = str(threading.get_native_id())
    return {
        task.name: int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in tasks.iterdir()
        if task.name != own
    }


def straight(backend: Backend, work: PictureTask, pictures: list[ImagePart], pace: ExecutorOptions) -> None:
    """The same requests with nothing around them."""
    places = threading.Semaphore(pace.at_once)
    left: Iterator[ImagePart] = iter(pictures)
    lock, ended, running = threading.Lock(), threading.Event(), [len(pictures)]

    def listen(arrival: Chunk | Exception) -> None:
        if isinstance(arrival, Exception):
            raise arrival
        if arrival.finish_reason is not None:
            places.release()
            with lock:
                running[0] -= 1
                if not running[0]:
                    ended.set()

    def prepare() -> None:
        while True:
            with lock:
                picture = next(left, None)
            if picture is None:
                return
            prepared = work.prepare(backend, picture)
            places.acquire()
            backend.start(prepared, work.sampling, listen)

    threads = [threading.Thread(target=prepare) for _ in range(pace.readers)]
    for thread in threads:
        thread.start()
    ended.wait()
    for thread in threads:
        thread.join()


def through_batch(backend: Backend, job: Job, pace: ExecutorOptions, pictures: int) -> tuple[Cost, float]:
    """As ``vlfit batch`` does it; and the seconds that opening and closing the output took, whose share in
    thousands of pictures is nothing.
    """
    began = time.perf_counter()
    output = Output(job)
    try:
        output.begin(backend.model)
        runner = BatchRunner(
            BatchExecutor(PictureTask.from_job(job), backend, pace), open_sources(job.sources), output
        )
        cost = cost_of(pictures, runner.run)
    finally:
        output.close()
    if runner.tally.done != pictures:
        raise RuntimeError(f"of {pictures} pictures {runner.tally.done} were done")
    return cost, time.perf_counter() - began - cost.wall


def tell_overhead(found: Overhead) -> None:
    """In words, with how far the figures may be off."""
    pairs = len(found.alone)
    drawn = np.random.default_rng(0).integers(pairs, size=(RESAMPLED, pairs))
    print(f"{pairs} pairs of blocks of {found.alone[0].pictures} pictures; in brackets what 95 % lie in:")
    for what, value in (("processor time", "processor"), ("wall time", "wall")):
        batch, alone = _values(found.batch, value), _values(found.alone, value)
        in_all = _more(batch.sum() / alone.sum(), batch[drawn].sum(1) / alone[drawn].sum(1))
        in_pairs = _more(np.median(batch / alone), np.median((batch / alone)[drawn], axis=1))
        print(f"overhead in {what}: {in_all} in all, {in_pairs} in the median pair")
    whole = statistics.median(cost.processor / cost.pictures for cost in found.alone)
    more = statistics.median(
        (batch.beside - one.beside) / one.pictures
        for one, batch in zip(found.alone, found.batch, strict=True)
    )
    print(
        f"overhead beside the engine: {1e3 * more:+.2f} ms of processor time a picture, "
        f"{100 * more / whole:+.1f} % of {1e3 * whole:.2f} ms"
    )
    print(f"once a run: {1e3 * statistics.median(found.once):.1f} ms to open and close the output")


def _values(costs: Sequence[Cost], name: str) -> NDArray[np.float64]:
    return np.array([getattr(cost, name) / cost.pictures for cost in costs])


def _more(quotient: float, drawn: NDArray[np.float64]) -> str:
    """How much more than 1, in per cent, and between which 95 % of the ``drawn`` lie."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    return "{:+.1f} % ({:+.1f} to {:+.1f})".format(*(100 * (each - 1) for each in (quotient, low, high)))

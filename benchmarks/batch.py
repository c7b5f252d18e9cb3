"""What `vlfit batch` adds to the engine, what it holds, and what a kill costs.

    python -m benchmarks.batch                                     10,000 small pictures, killed three times
    python -m benchmarks.batch --pictures 600 --blocks 4           to try it

Pictures of 32 x 32 pixels, no two alike, are made on the fly and described in so few tokens by mini on the
CPU, which sees 16 tokens of each (of its own accord none has fewer than 64). Two parts, each told as it ends:

overhead    one engine, blocks of pictures by turns: through a batch (a folder, hashes, records, a file) and
            straight through the same backend (bytes that are in memory already, as many threads that prepare
            them, as many in flight, nothing kept). Processor time and wall time of each block; what is told
            is the median of the quotients of neighbours. The engine's own threads do the same work in both,
            as fast as the machine lets them just then: where others work too, read the processor time of all
            other threads, which is where a batch does what it does.
kills       `vlfit batch` as a program, ended by SIGKILL at random places of its output, and started again
            until it is through: whether every picture is there once, and how far the resident memory of each
            process rose from its 100th picture to its last.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.facts import commit, processor
from benchmarks.measure import ROOT, environment
from vlfit.backends.base import LocalBackend
from vlfit.backends.opening import Wanted
from vlfit.engine.answer import Chunk
from vlfit.engine.conversation import ImagePart
from vlfit.engine.options import EngineOptions
from vlfit.engine.sampling import SamplingParams
from vlfit.tasks.batch.crew import Crew, Pace
from vlfit.tasks.batch.job import Job, Work
from vlfit.tasks.batch.opening import open_for_batch
from vlfit.tasks.batch.output import Output
from vlfit.tasks.batch.runner import Runner
from vlfit.tasks.batch.sources import open_sources
from vlfit.tasks.batch.wish import Wish

MIB = 1 << 20
WARM = 100  # pictures after which memory should be what it stays at
LOOK = 0.2  # seconds between two looks at a program that runs


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
class Process:
    """One start of the program: pictures done, and its resident memory at the 100th and at the last."""

    done: int = 0
    at_100: int | None = None
    last: int = 0
    most: int = 0
    killed: bool = False

    @property
    def growth(self) -> int | None:
        return None if self.at_100 is None else self.last - self.at_100


@dataclass
class Facts:
    """All that is told, for --json. Bytes and seconds."""

    commit: str
    processor: str
    threads: int
    settings: dict[str, Any]
    alone: list[Cost] = field(default_factory=list)
    batch: list[Cost] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    missing: int | None = None
    twice: int | None = None
    seconds: float | None = None


def make_pictures(folder: Path, count: int, seed: int) -> None:
    """``count`` small pictures of noise in ``folder``: no two are the same, and none was seen before."""
    folder.mkdir(parents=True)
    noise = random.Random(seed)
    for number in range(count):
        small = Image.frombytes("RGB", (4, 4), noise.randbytes(48))
        small.resize((32, 32)).save(folder / f"{number:06}.png", compress_level=1)


# --- overhead ----------------------------------------------------------------------------------------------


def cost_of(pictures: int, work: Callable[[], None]) -> Cost:
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


def straight(backend: LocalBackend, work: Work, pictures: list[ImagePart], pace: Pace) -> None:
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


def through_batch(backend: LocalBackend, job: Job, pace: Pace) -> None:
    """As ``vlfit batch`` does it."""
    output = Output(job)
    try:
        output.begin(backend.model)
        Runner(Crew(Work.of(job), backend, pace), open_sources(job.sources), output).run()
    finally:
        output.close()


def measure_overhead(options: argparse.Namespace, folder: Path, facts: Facts) -> None:
    sampling = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    engine = EngineOptions(device="cpu", image_tokens=options.image_tokens)
    backend, pace = open_for_batch(Wanted(model="mini", options=engine), options.sequences, readers=2)
    try:
        for block in range(2 * options.blocks + 2):
            place = folder / f"block{block}"
            make_pictures(place, options.block, seed=block)
            job = Job(Wish.caption(), sampling, (str(place),), folder / f"block{block}.jsonl")
            names = sorted(place.iterdir())
            pictures = [ImagePart(name.read_bytes(), name.name) for name in names]
            # By turns, and each pair the other way round: A B, B A, A B, ...
            if block % 4 in (0, 3):
                kept, todo = facts.alone, partial(straight, backend, Work.of(job), pictures, pace)
            else:
                kept, todo = facts.batch, partial(through_batch, backend, job, pace)
            cost = cost_of(len(names), todo)
            if block >= 2:  # the first of each warms up
                kept.append(cost)
                print(f"  {'alone' if kept is facts.alone else 'batch'}: {cost}", flush=True)
    finally:
        backend.close()


def tell_overhead(facts: Facts) -> None:
    pairs = list(zip(facts.alone, facts.batch, strict=True))
    alone = statistics.median(cost.processor / cost.pictures for cost in facts.alone)
    for what, value in (("processor time", "processor"), ("wall time", "wall")):
        quotients = [100 * (getattr(batch, value) / getattr(one, value) - 1) for one, batch in pairs]
        print(
            f"overhead in {what}: {statistics.median(quotients):+.1f} % "
            f"(pairs from {min(quotients):+.1f} to {max(quotients):+.1f} %)"
        )
    more = statistics.median((batch.beside - one.beside) / one.pictures for one, batch in pairs)
    print(
        f"overhead beside the engine: {1e3 * more:+.2f} ms of processor time a picture, "
        f"{100 * more / alone:+.1f} % of {1e3 * alone:.2f} ms"
    )


# --- kills -------------------------------------------------------------------------------------------------


def measure_kills(options: argparse.Namespace, folder: Path, facts: Facts) -> None:
    pictures, output = folder / "pictures", folder / "captions.jsonl"
    make_pictures(pictures, options.pictures, seed=-1)
    chance = random.Random(options.seed)
    ends = sorted(chance.randrange(1, options.pictures) for _ in range(options.kills))
    command = [
        *(sys.executable, "-m", "vlfit", "batch", str(pictures), "-o", str(output), "-m", "mini", "-q"),
        *(
            "--device",
            "cpu",
            "--max-tokens",
            str(options.max_tokens),
            "--concurrency",
            str(options.sequences),
        ),
    ]
    began = time.perf_counter()
    for end in [*ends, None]:
        process = run_until(command, output, end)
        facts.processes.append(process)
        told = (
            "no growth told" if process.growth is None else f"{process.growth / MIB:+.1f} MiB since its 100th"
        )
        print(
            f"  {'killed' if process.killed else 'through'} after {process.done} pictures: "
            f"{process.last / MIB:.0f} MiB resident, {told}, at most {process.most / MIB:.0f}",
            flush=True,
        )
    facts.seconds = time.perf_counter() - began
    keys = [json.loads(line)["key"] for line in output.read_text("utf-8").splitlines()]
    facts.twice = len(keys) - len(set(keys))
    facts.missing = len({path.name for path in pictures.iterdir()} - set(keys))


def run_until(command: list[str], output: Path, end: int | None) -> Process:
    """Start the program and kill it when the output has ``end`` lines; None: let it come to its end."""
    found = Process()
    lines = Lines(output)
    before = lines.count()
    with subprocess.Popen(command, cwd=ROOT, env=environment()) as program:
        try:
            while program.poll() is None:
                resident = resident_bytes(program.pid)
                found.done = lines.count() - before
                if resident:
                    found.last, found.most = resident, max(found.most, resident)
                    if found.done >= WARM and found.at_100 is None:
                        found.at_100 = resident
                if end is not None and before + found.done >= end:
                    program.send_signal(signal.SIGKILL)
                    found.killed = True
                    break
                time.sleep(LOOK)
        finally:
            program.kill()
    found.done = lines.count() - before
    if not found.killed and program.returncode:
        sys.exit(f"vlfit batch ended with {program.returncode}")
    return found


class Lines:
    """Counts the lines of a file that grows, reading each byte once."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._lines = path, 0, 0

    def count(self) -> int:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
            whole = data.rfind(b"\n") + 1  # what is behind may be cut off again
            self._lines += data.count(b"\n")
            self._read += whole
        return self._lines


def resident_bytes(pid: int) -> int:
    """What a process holds in RAM now; 0 when it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except (OSError, ProcessLookupError):
        pass
    return 0


def tell_kills(facts: Facts) -> None:
    growths = [process.growth for process in facts.processes if process.growth is not None]
    kills = sum(process.killed for process in facts.processes)
    print(
        f"kills: {facts.settings['pictures']:,} pictures in {facts.seconds:.0f} s with {kills} kills: "
        f"{facts.missing} missing, {facts.twice} twice; resident memory rose by at most "
        f"{max(growths, default=0) / MIB:.1f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=10_000, help="of the part with kills")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument(
        "--block", type=int, default=100, help="pictures of a block, of the part about overhead"
    )
    parser.add_argument("--blocks", type=int, default=10, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--image-tokens", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8, help="requests that run at once")
    parser.add_argument("--seed", type=int, default=8, help="says where it is killed")
    parser.add_argument("--only", choices=("overhead", "kills"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    import torch

    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
    }
    facts = Facts(commit(), processor(), torch.get_num_threads(), settings)
    print(f"commit {facts.commit}; {facts.processor}, {facts.threads} threads")
    with tempfile.TemporaryDirectory(prefix="vlfit-batch-") as folder:
        if options.only != "kills":
            measure_overhead(options, Path(folder), facts)
            tell_overhead(facts)
        if options.only != "overhead":
            measure_kills(options, Path(folder), facts)
            tell_kills(facts)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(facts), indent=1) + "\n")
    if facts.missing or facts.twice:
        sys.exit("the output is not what it should be")


if __name__ == "__main__":
    main()

"""What a second Ray worker gives: a batch over a local cluster with one worker and with two, in turn.

    python -m benchmarks.ray_batch                      six minutes on a quiet machine of two cores
    python -m benchmarks.ray_batch --pictures 96 --rounds 1 --at-least 0      to see it run

Each worker has one core and one thread of torch, whether the other is there or not; the driver, which lists
and writes, and Ray's own processes share those cores. Speeds are those between the first chunk that came back
when all workers had begun and the last one while all were still busy: start and end are left out. CPU seconds
of all processes that are not workers show what else a picture costs. Exit code 1 if two workers give less
than ``--at-least`` times the pictures of one.
"""

import io
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from benchmarks.harness import (
    add_json_option,
    alternate,
    argument_parser,
    commit,
    cpu_name,
    print_table,
    process_tree,
    write_json,
)
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.opening import BackendSpec
from vlfit.tasks.batch.executor import Outcome
from vlfit.tasks.batch.job import Job, Wish
from vlfit.tasks.batch.output import Output
from vlfit.tasks.batch.ray import LOCAL, RayOptions
from vlfit.tasks.batch.ray.coordinator import run_on_ray
from vlfit.tasks.batch.runner import BatchProgress
from vlfit.tasks.batch.sources import open_sources

CORES = 2
SIZE = 320, 240


@dataclass(frozen=True, slots=True)
class Run:
    """``pictures_per_s`` while all workers were busy; CPU seconds of the whole run."""

    workers: int
    pictures_per_s: float
    wall_s: float
    worker_cpu_s: float
    other_cpu_s: float


class TimedProgress(BatchProgress):
    """When pictures came back, and the CPU seconds of the workers."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._workers = workers
        self._begun: set[int] = set()
        self.moments: list[float] = []
        self.cpu: dict[int, float] = {}
        self.all_begun = 0.0

    def settled(self, outcome: Outcome) -> None:
        super().settled(outcome)
        self.moments.append(time.perf_counter())

    def note(self, text: str) -> None:
        if "has begun" in text:
            self._begun.add(int(text.rpartition(":")[2]))
            if len(self._begun) == self._workers:
                self.all_begun = time.perf_counter()

    def tick(self) -> None:
        super().tick()
        for process in self._begun:  # while they run
            self.cpu[process] = cpu_seconds(process) or self.cpu.get(process, 0.0)

    def speed(self, total: int) -> float:
        """Pictures a second from the chunk with which all had begun until the last sixth."""
        inside = [moment for moment in self.moments[: total - total // 6] if moment > self.all_begun]
        first = sum(moment <= inside[0] + 1e-2 for moment in inside)  # of one chunk, written at once
        return (len(inside) - first) / (inside[-1] - inside[0])


def cpu_seconds(process: int) -> float | None:
    """User and system time of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of_tree() -> dict[int, float]:
    """CPU seconds of this process and its descendants, by PID."""
    return {pid: cpu_seconds(pid) or 0.0 for pid in process_tree(os.getpid())}


def make_pictures(folder: Path, count: int) -> None:
    """Pictures that all differ: a batch describes equal files once."""
    chance = random.Random(7)
    for number in range(count):
        image = Image.new("RGB", SIZE, (chance.randrange(256), chance.randrange(256), chance.randrange(256)))
        left, top = chance.randrange(SIZE[0] - 90), chance.randrange(SIZE[1] - 90)
        ImageDraw.Draw(image).ellipse((left, top, left + 80, top + 80), fill=(chance.randrange(256), 40, 90))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        (folder / f"{number:05}.jpg").write_bytes(file.getvalue())


def measure(pictures: Path, output: Path, workers: int, tokens: int, at_once: int) -> Run:
    job = Job(Wish.caption(), SamplingParams(max_tokens=tokens), (str(pictures),), output)
    source = open_sources([str(pictures)])
    total = source.count()
    assert total is not None
    progress = TimedProgress(workers)
    records = Output(job)
    before, start = cpu_seconds_of_tree(), time.perf_counter()
    try:
        run_on_ray(
            job,
            BackendSpec(model="mini", options=EngineOptions(device="cpu")),
            RayOptions(LOCAL, workers),
            source=source,
            output=records,
            progress=progress,
            concurrency=at_once,
        )
    finally:
        records.close()
    wall = time.perf_counter() - start
    others = {pid: used for pid, used in cpu_seconds_of_tree().items() if pid not in progress.cpu}
    other_s = sum(used - before.get(pid, 0.0) for pid, used in others.items())
    if progress.tally.done != total:
        raise SystemExit(f"{progress.tally.done} of {total} pictures are done")
    return Run(workers, progress.speed(total), wall, sum(progress.cpu.values()), other_s)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pictures", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16, help="most tokens of an answer")
    parser.add_argument("--at-once", type=int, default=4, help="requests in each worker")
    parser.add_argument("--at-least", type=float, default=1.6)
    add_json_option(parser)
    options = parser.parse_args()

    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) / "pictures"
        pictures.mkdir()
        make_pictures(pictures, options.pictures)
        ray.init("local", num_cpus=CORES, include_dashboard=False, log_to_driver=False)
        try:
            for number, workers in alternate(options.rounds, (1, 2)):
                output = Path(folder) / f"{number}-{workers}.jsonl"
                runs.append(measure(pictures, output, workers, options.tokens, options.at_once))
                print(f"{workers} workers: {runs[-1].pictures_per_s:.2f} pictures/s", file=sys.stderr)
        finally:
            ray.shutdown()
    ratio = report(runs, options.pictures)
    facts = {"commit": commit(), "processor": cpu_name(), "ratio": ratio}
    write_json(options.json, {**facts, "rows": [*map(asdict, runs)]})
    sys.exit(ratio < options.at_least)


def report(runs: list[Run], pictures: int) -> float:
    """Print the table. Returns the median over rounds of two workers' speed over one's."""
    table = [
        ["workers", "pictures/s", "wall, s", "CPU of workers, s", "of all else, s", "of it, ms a picture"]
    ]
    for run in runs:
        cells = [f"{run.pictures_per_s:.2f}", f"{run.wall_s:.1f}", f"{run.worker_cpu_s:.1f}"]
        cells += [f"{run.other_cpu_s:.1f}", f"{1e3 * run.other_cpu_s / pictures:.1f}"]
        table.append([str(run.workers), *cells])
    load = os.getloadavg()[0]
    print(f"commit {commit()}, {cpu_name()}, {os.cpu_count()} cores, load {load:.1f} at the end\n")
    print_table(table)
    speeds = {count: [run.pictures_per_s for run in runs if run.workers == count] for count in (1, 2)}
    ratios = [two / one for one, two in zip(speeds[1], speeds[2], strict=True)]
    ratio = statistics.median(ratios)
    print(f"\ntwo workers over one: {', '.join(f'{one:.2f}' for one in ratios)}; median {ratio:.2f}")
    return ratio


if __name__ == "__main__":
    main()

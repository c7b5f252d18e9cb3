"""What a second worker is worth: a batch over a local Ray cluster with one worker and with two, in turn.

    python -m benchmarks.ray_batch                      six minutes on a quiet machine of two cores
    python -m benchmarks.ray_batch --pictures 96 --rounds 1   to see it run

Each worker has one core and one thread of torch, whether the other is there or not; the process that lists
and writes, and Ray's own, share those cores with them. Speeds are those between the first handful that came
back when all workers had begun and the last one while all were still busy, so starting and ending are left
out. The CPU seconds of all that are not workers say what else a picture costs. The exit code is 1 if two
workers give less than ``--at-least`` times the pictures of one.
"""

import argparse
import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from benchmarks.facts import commit, cpu_name
from benchmarks.report import markdown
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
class Row:
    """One run. ``pictures_per_s`` while all workers were busy; CPU seconds are of the whole run."""

    workers: int
    pictures_per_s: float
    wall_s: float
    worker_cpu_s: float
    other_cpu_s: float


class Clock(BatchProgress):
    """When pictures came back, and what processes had used by then."""

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
        for process in self._begun:  # looked at while they live
            self.cpu[process] = cpu_seconds(process) or self.cpu.get(process, 0.0)

    def speed(self, total: int) -> float:
        """Pictures in a second between the handful with which all had begun, and the last sixth."""
        inside = [moment for moment in self.moments[: total - total // 6] if moment > self.all_begun]
        first = sum(moment <= inside[0] + 1e-2 for moment in inside)  # of one handful, written at once
        return (len(inside) - first) / (inside[-1] - inside[0])


def cpu_seconds(process: int) -> float | None:
    """Of user and system, of a process that runs. None if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family() -> dict[int, float]:
    """CPU seconds of this process and of all that are below it, by process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    ours = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return {process: cpu_seconds(process) or 0.0 for process in ours}


def paint(folder: Path, many: int) -> None:
    """Pictures that are all different: a batch asks about the same bytes once."""
    chance = random.Random(7)
    for number in range(many):
        image = Image.new("RGB", SIZE, (chance.randrange(256), chance.randrange(256), chance.randrange(256)))
        left, top = chance.randrange(SIZE[0] - 90), chance.randrange(SIZE[1] - 90)
        ImageDraw.Draw(image).ellipse((left, top, left + 80, top + 80), fill=(chance.randrange(256), 40, 90))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        (folder / f"{number:05}.jpg").write_bytes(file.getvalue())


def measure(pictures: Path, output: Path, workers: int, tokens: int, at_once: int) -> Row:
    job = Job(Wish.caption(), SamplingParams(max_tokens=tokens), (str(pictures),), output)
    source = open_sources([str(pictures)])
    total = source.count()
    assert total is not None
    clock = Clock(workers)
    kept = Output(job)
    before, start = family(), time.perf_counter()
    try:
        run_on_ray(
            job,
            BackendSpec(model="mini", options=EngineOptions(device="cpu")),
            RayOptions(LOCAL, workers),
            source=source,
            output=kept,
            progress=clock,
            at_once=at_once,
        )
    finally:
        kept.close()
    wall = time.perf_counter() - start
    others = {process: used for process, used in family().items() if process not in clock.cpu}
    beside = sum(used - before.get(process, 0.0) for process, used in others.items())
    if clock.tally.done != total:
        raise SystemExit(f"{clock.tally.done} of {total} pictures are done")
    return Row(workers, clock.speed(total), wall, sum(clock.cpu.values()), beside)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16, help="most tokens of an answer")
    parser.add_argument("--at-once", type=int, default=4, help="requests in each worker")
    parser.add_argument("--at-least", type=float, default=1.6)
    parser.add_argument("--json", type=Path, help="where every run is written")
    wanted = parser.parse_args()

    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        pictures = Path(place) / "pictures"
        pictures.mkdir()
        paint(pictures, wanted.pictures)
        ray.init("local", num_cpus=CORES, include_dashboard=False, log_to_driver=False)
        try:
            for turn in range(wanted.rounds):
                # In turn, and the other one first every time: what else the machine does falls on both.
                for workers in (1, 2) if turn % 2 == 0 else (2, 1):
                    output = Path(place) / f"{turn}-{workers}.jsonl"
                    rows.append(measure(pictures, output, workers, wanted.tokens, wanted.at_once))
                    print(f"{workers} workers: {rows[-1].pictures_per_s:.2f} pictures/s", file=sys.stderr)
        finally:
            ray.shutdown()
    ratio = tell(rows, wanted.pictures)
    if wanted.json:
        facts = {"commit": commit(), "processor": cpu_name(), "ratio": ratio, "rows": [*map(asdict, rows)]}
        wanted.json.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(ratio < wanted.at_least)


def tell(rows: list[Row], pictures: int) -> float:
    """Print the table. Gives the median over rounds of two workers' speed over one's."""
    table = [
        ["workers", "pictures/s", "wall, s", "CPU of workers, s", "of all else, s", "of it, ms a picture"]
    ]
    for row in rows:
        cells = [f"{row.pictures_per_s:.2f}", f"{row.wall_s:.1f}", f"{row.worker_cpu_s:.1f}"]
        cells += [f"{row.other_cpu_s:.1f}", f"{1e3 * row.other_cpu_s / pictures:.1f}"]
        table.append([str(row.workers), *cells])
    load = os.getloadavg()[0]
    print(f"commit {commit()}, {cpu_name()}, {os.cpu_count()} cores, load {load:.1f} at the end\n")
    print(*markdown(table), sep="\n")
    speeds = {count: [row.pictures_per_s for row in rows if row.workers == count] for count in (1, 2)}
    ratios = [two / one for one, two in zip(speeds[1], speeds[2], strict=True)]
    ratio = statistics.median(ratios)
    print(f"\ntwo workers over one: {', '.join(f'{one:.2f}' for one in ratios)}; median {ratio:.2f}")
    return ratio


if __name__ == "__main__":
    main()

"""`vlfit batch` on a machine with several GPUs: over Ray, with a worker killed, and without Ray.

    python -m benchmarks.ray_gpus --json FILE             five minutes on two H200
    python -m benchmarks.ray_gpus --ways "Ray, 2 workers" --place FOLDER    one way; files stay in FOLDER
    python -m benchmarks.ray_gpus --model mini --device cpu --gpus 1 --pictures 24 --max-tokens 8
                                                          to see it run

The program is started as a person would, with a model of true shape and random weights and pictures of
1024x768 (``batch_speed.py``), in these ways: on one GPU without Ray; with Ray and one worker; with as many as
there are GPUs; the same, and one is ended by SIGKILL half-way; and without Ray, a part for each GPU
(``--shard``). The growing output is read every 20 ms. Speeds are those between the moment when all workers
had written something and the one when five sixths were done: start and end are left out. A worker is back
when the first chunk of its successor is written. Ends with an error if a picture is missing or there twice.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.batch_speed import make_pictures
from benchmarks.checkpoints import checkpoint_of, ram_folder
from benchmarks.harness import (
    ROOT,
    LineCounter,
    add_json_option,
    argument_parser,
    card,
    commit,
    cpu_name,
    environment,
    print_table,
    write_json,
)

ONE, RAY_ONE, RAY_ALL, KILLED, PARTS = (
    "without Ray, 1 GPU",
    "Ray, 1 worker",
    "Ray, {} workers",
    "Ray, one of {} killed",
    "without Ray, {} parts",
)
SAMPLE_INTERVAL = 0.02  # seconds
WARM_UP = 16  # pictures of a run that is not measured: it compiles kernels
TIMEOUT = 240.0  # seconds of one way
BEGUN = re.compile(r"worker \d+ has begun: \S+:(\d+)\s*$")


@dataclass(frozen=True, slots=True)
class Row:
    """One way. ``first_s``: from the command to the first record. ``back_s``: from SIGKILL to the first chunk
    of the successor; None if no worker was killed, or none came in time.
    """

    way: str
    gpus: int
    pictures: int
    pictures_per_s: float
    first_s: float
    wall_s: float
    back_s: float | None = None
    told: list[str] = field(default_factory=list)


@dataclass(slots=True)
class WorkerLog:
    """Lines of stderr, and when each worker began (seconds of ``perf_counter``) and its PID."""

    lines: list[str] = field(default_factory=list)
    workers: list[tuple[float, int]] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.lines.append(line.rstrip())
        match = BEGUN.search(line)
        if match:
            self.workers.append((time.perf_counter(), int(match[1])))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--model", default="2B-fp8", metavar="SIZE-FORMAT", help="with random weights; or mini"
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--pictures", type=int, default=1000, help="for each GPU")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once, of each worker")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ways", action="append", metavar="WAY", help="only this one; may be repeated")
    parser.add_argument("--place", type=Path, help="folder for model and pictures, which stay there")
    add_json_option(parser)
    options = parser.parse_args()
    facts = {"commit": commit(), "card": card(), "cpu": f"{cpu_name()}, {os.cpu_count()} cores"}
    print("; ".join(facts.values()), flush=True)
    rows: list[Row] = []
    with _work_folder(options.place) as folder:
        model, pictures = prepare(Path(folder), options)
        bench = Bench(model, pictures, options)
        if not options.ways or ONE in options.ways:
            bench.warm_up()
        for way in [one.format(options.gpus) for one in (ONE, RAY_ONE, RAY_ALL, KILLED, PARTS)]:
            if options.ways and way not in options.ways:
                continue
            rows.append(bench.run(way))
            print(f"{way}: {_describe(rows[-1])}", flush=True)
            data = {"facts": facts, "options": _json_options(options), "rows": [*map(asdict, rows)]}
            write_json(options.json, data)
    print()
    print_table(table(rows))


def _work_folder(given: Path | None) -> "nullcontext[str] | tempfile.TemporaryDirectory[str]":
    if given is None:
        return tempfile.TemporaryDirectory(prefix="vlfit-ray-gpus-", dir=ram_folder())
    given.mkdir(parents=True, exist_ok=True)
    return nullcontext(str(given))


def prepare(folder: Path, options: argparse.Namespace) -> tuple[str, Path]:
    """The model and the folder of pictures, made unless they are there."""
    model = checkpoint_of(options.model, folder, random=True)
    count = options.pictures * options.gpus
    pictures = folder / f"pictures-{count}"
    if not pictures.is_dir():
        make_pictures(pictures, count)
    return str(model), pictures


class Bench:
    """Runs the ways, one after another."""

    def __init__(self, model: str, pictures: Path, options: argparse.Namespace) -> None:
        self._gpus, self._pictures = options.gpus, options.pictures
        self._arguments = [str(pictures), "--model", model, "--device", options.device, "--json"]
        self._arguments += [
            "--max-tokens",
            str(options.max_tokens),
            "--concurrency",
            str(options.concurrency),
        ]

    def warm_up(self) -> None:
        with tempfile.TemporaryDirectory(prefix="vlfit-ray-gpus-") as folder:
            watch([Command([*self._arguments, "--limit", str(WARM_UP)], Path(folder) / "out.jsonl")], 1, None)

    def run(self, way: str) -> Row:
        """Run one way and check its output. Ends the program with the log if it fails."""
        gpus = 1 if way in (ONE, RAY_ONE) else self._gpus
        total = self._pictures * gpus
        with tempfile.TemporaryDirectory(prefix="vlfit-ray-gpus-") as folder:
            outputs = [Path(folder) / f"{number}.jsonl" for number in range(gpus)]
            kill_at = total // 6 if way == KILLED.format(gpus) else None
            if way in (ONE, PARTS.format(gpus)):
                commands = [
                    Command(
                        [*self._arguments, *(["--shard", f"{number + 1}/{gpus}"] if gpus > 1 else ())],
                        output,
                        {"CUDA_VISIBLE_DEVICES": str(number)},
                    )
                    for number, output in enumerate(outputs)
                ]
            else:
                commands = [Command([*self._arguments, "--ray", "local", "--workers", str(gpus)], outputs[0])]
            for command in commands:
                command.arguments += ["--limit", str(total)]
            run = watch(commands, gpus, kill_at)
            check([command.output for command in commands], total)
        return run.row(way, gpus, total)


@dataclass(slots=True)
class Command:
    """`vlfit batch` with ``arguments``, to ``output``; ``settings``: environment variables."""

    arguments: list[str]
    output: Path
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class WatchedRun:
    """Records over time (seconds of ``perf_counter``) in each output of a run."""

    start: float
    log: WorkerLog
    workers: int
    counts: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    killed: float | None = None
    end: float = 0.0

    def row(self, way: str, gpus: int, total: int) -> Row:
        first = next(when for when, counts in self.counts if sum(counts))
        back = None
        if self.killed is not None and len(self.log.workers) > self.workers:
            back = self.log.workers[self.workers][0] - self.killed
        wall = self.end - self.start
        lines = [line for line in self.log.lines if "worker" in line]
        return Row(way, gpus, total, self.speed(total), first - self.start, wall, back, lines)

    def speed(self, total: int) -> float:
        """Pictures a second from the moment when all had begun until five sixths were done."""
        begun = self._all_begun()
        inside = [(when, sum(counts)) for when, counts in self.counts if when >= begun]
        inside = [(when, count) for when, count in inside if count * 6 <= total * 5]
        if len(inside) < 3:
            return float("nan")  # too short
        # With Ray records come in chunks: the slope over all moments is less noisy than two of them.
        return statistics.linear_regression(*zip(*inside, strict=True)).slope

    def _all_begun(self) -> float:
        if self.log.workers:
            return self.log.workers[min(self.workers, len(self.log.workers)) - 1][0]
        return next(when for when, counts in self.counts if all(counts))


def watch(commands: Sequence[Command], workers: int, kill_at: int | None) -> WatchedRun:
    """Run ``commands`` side by side to their end; after ``kill_at`` records one worker is killed."""
    log = WorkerLog()
    run = WatchedRun(time.perf_counter(), log, workers)
    files = [LineCounter(command.output) for command in commands]
    with _started(commands, log) as processes:
        while any(process.poll() is None for process in processes):
            time.sleep(SAMPLE_INTERVAL)
            now = time.perf_counter()
            counts = tuple(file.count() for file in files)
            if not run.counts or counts != run.counts[-1][1]:
                run.counts.append((now, counts))
            all_begun = len(log.workers) == workers
            if kill_at is not None and run.killed is None and sum(counts) >= kill_at and all_begun:
                os.kill(log.workers[0][1], signal.SIGKILL)
                run.killed = now
            if now - run.start > TIMEOUT:
                raise SystemExit(f"not over after {TIMEOUT:g} s:\n" + "\n".join(log.lines[-20:]))
        run.end = time.perf_counter()
        run.counts.append((run.end, tuple(file.count() for file in files)))
        if any(process.returncode for process in processes):
            codes = [process.returncode for process in processes]
            raise SystemExit(f"ended with {codes}:\n" + "\n".join(log.lines[-20:]))
    return run


@contextmanager
def _started(commands: Sequence[Command], log: WorkerLog) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the programs and read their stderr; they are ended with the block."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            arguments = ["batch", *command.arguments, "--output", str(command.output)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "vlfit", *arguments],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                    env=environment(TOKENIZERS_PARALLELISM="false", **command.settings),
                )
            )
        readers = [
            threading.Thread(target=_read_stderr, args=(process, log), daemon=True) for process in processes
        ]
        for reader in readers:
            reader.start()
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # which ends the cluster, too
        for process in processes:
            process.wait()


def _read_stderr(process: subprocess.Popen[str], log: WorkerLog) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        log.add(line)


def check(outputs: Sequence[Path], total: int) -> None:
    """End the program unless ``total`` pictures are in ``outputs``, each of them once."""
    keys = Counter(
        json.loads(line)["key"] for path in outputs for line in path.read_text("utf-8").splitlines()
    )
    twice = [key for key, count in keys.items() if count > 1]
    if len(keys) != total or twice:
        raise SystemExit(f"{len(keys)} of {total} pictures are done, {len(twice)} of them twice")


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Speeds, and their ratio to one GPU (with Ray or without)."""
    single = {row.way.startswith("Ray"): row.pictures_per_s for row in rows if row.gpus == 1}
    head = [
        "",
        "GPUs",
        "pictures",
        "pictures/s",
        "x of 1 GPU",
        "first after, s",
        "in all, s",
        "back after, s",
    ]
    lines = [head]
    for row in rows:
        alone = single.get(row.way.startswith("Ray"))
        cells = [f"{row.pictures_per_s:.1f}", f"{row.pictures_per_s / alone:.2f}" if alone else ""]
        cells += [
            f"{row.first_s:.1f}",
            f"{row.wall_s:.1f}",
            "" if row.back_s is None else f"{row.back_s:.1f}",
        ]
        lines.append([row.way, str(row.gpus), str(row.pictures), *cells])
    return lines


def _describe(row: Row) -> str:
    words = f"{row.pictures_per_s:.1f} pictures/s, the first after {row.first_s:.1f} s"
    words += f", all after {row.wall_s:.1f} s"
    return words + ("" if row.back_s is None else f"; the killed worker was back after {row.back_s:.1f} s")


def _json_options(options: argparse.Namespace) -> dict[str, str | int | list[str] | None]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}


if __name__ == "__main__":
    main()

"""What Ray is worth on a machine with several GPUs: `vlfit batch` over it, a worker killed, and without Ray.

    python -m benchmarks.ray_gpus --json FILE             five minutes on two H200
    python -m benchmarks.ray_gpus --ways "Ray, 2 workers" --place FOLDER    one way; what is made stays there

The program is started as a person would, with a model of true shape and random weights and pictures of
1024x768 (``batch_speed.py``), in these ways: on one GPU without Ray; with Ray and one worker; with as many as
there are GPUs; the same, and one is ended by SIGKILL in the midst; and without Ray, a part for each GPU
(``--shard``). The growing output is looked at every 20 ms. Speeds are those between the moment when all
workers had given something and the one when five sixths were done, so starting and ending are left out. A
worker is back when the first handful of the one that replaces it is written.

Every way is checked: all pictures are in the output, and none twice. Each prints its line at once.
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
from benchmarks.facts import card, commit, cpu_name
from benchmarks.measure import ROOT, environment
from benchmarks.random_weights import room_in_memory, write_random
from benchmarks.report import print_rows

ONE, RAY_ONE, RAY_ALL, KILLED, PARTS = (
    "without Ray, 1 GPU",
    "Ray, 1 worker",
    "Ray, {} workers",
    "Ray, one of {} killed",
    "without Ray, {} parts",
)
LOOK_S = 0.02
WARM_UP = 16  # pictures of a run that is not measured: kernels are compiled in it
LONGEST_S = 240.0  # of one way
BEGUN = re.compile(r"worker \d+ has begun: \S+:(\d+)\s*$")


@dataclass(frozen=True, slots=True)
class Row:
    """One way. ``first_s``: from the command until the first record. ``back_s``: from SIGKILL until the
    first handful of the worker that came instead; None: none was killed, or none came in time.
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
class Heard:
    """What a run said on stderr about workers: when, and which processes. Seconds of ``perf_counter``."""

    lines: list[str] = field(default_factory=list)
    workers: list[tuple[float, int]] = field(default_factory=list)

    def hear(self, line: str) -> None:
        self.lines.append(line.rstrip())
        begun = BEGUN.search(line)
        if begun:
            self.workers.append((time.perf_counter(), int(begun[1])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="2B-fp8", metavar="SIZE-FORMAT", help="of random weights; or mini")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--pictures", type=int, default=1000, help="for each GPU")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once, of each worker")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ways", action="append", metavar="WAY", help="only this one; may be repeated")
    parser.add_argument("--place", type=Path, help="where model and pictures are made, and stay")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written again after each way")
    options = parser.parse_args()
    facts = {"commit": commit(), "card": card(), "cpu": f"{cpu_name()}, {os.cpu_count()} cores"}
    print("; ".join(facts.values()), flush=True)
    rows: list[Row] = []
    with _place(options.place) as folder:
        model, pictures = prepare(Path(folder), options)
        bench = Bench(model, pictures, options)
        if not options.ways or ONE in options.ways:
            bench.warm_up()
        for way in [one.format(options.gpus) for one in (ONE, RAY_ONE, RAY_ALL, KILLED, PARTS)]:
            if options.ways and way not in options.ways:
                continue
            rows.append(bench.run(way))
            print(f"{way}: {_in_words(rows[-1])}", flush=True)
            if options.json:
                data = {"facts": facts, "options": _plain(options), "rows": [*map(asdict, rows)]}
                options.json.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    print()
    print_rows(table(rows))


def _place(given: Path | None) -> "nullcontext[str] | tempfile.TemporaryDirectory[str]":
    if given is None:
        return tempfile.TemporaryDirectory(prefix="vlfit-ray-gpus-", dir=room_in_memory())
    given.mkdir(parents=True, exist_ok=True)
    return nullcontext(str(given))


def prepare(folder: Path, options: argparse.Namespace) -> tuple[str, Path]:
    """The model and the pictures, made if they are not there."""
    size, _, weights = options.model.partition("-")
    model = folder / options.model if weights else None
    if model is not None and not model.is_dir():
        write_random(model, size, weights)
    wanted = options.pictures * options.gpus
    pictures = folder / f"pictures-{wanted}"
    if not pictures.is_dir():
        make_pictures(pictures, wanted)
    return str(model or size), pictures


class Bench:
    """Runs the ways, one after another."""

    def __init__(self, model: str, pictures: Path, options: argparse.Namespace) -> None:
        self._gpus, self._many = options.gpus, options.pictures
        self._words = [str(pictures), "--model", model, "--device", options.device, "--json"]
        self._words += ["--max-tokens", str(options.max_tokens), "--concurrency", str(options.concurrency)]

    def warm_up(self) -> None:
        with tempfile.TemporaryDirectory(prefix="vlfit-ray-gpus-") as folder:
            watch([Command([*self._words, "--limit", str(WARM_UP)], Path(folder) / "out.jsonl")], 1, None)

    def run(self, way: str) -> Row:
        """One way, checked. Ends the program with what was said if it fails."""
        gpus = 1 if way in (ONE, RAY_ONE) else self._gpus
        total = self._many * gpus
        with tempfile.TemporaryDirectory(prefix="vlfit-ray-gpus-") as folder:
            outputs = [Path(folder) / f"{number}.jsonl" for number in range(gpus)]
            kill_at = total // 6 if way == KILLED.format(gpus) else None
            if way in (ONE, PARTS.format(gpus)):
                commands = [
                    Command(
                        [*self._words, *(["--shard", f"{number + 1}/{gpus}"] if gpus > 1 else ())],
                        output,
                        {"CUDA_VISIBLE_DEVICES": str(number)},
                    )
                    for number, output in enumerate(outputs)
                ]
            else:
                commands = [Command([*self._words, "--ray", "local", "--workers", str(gpus)], outputs[0])]
            for command in commands:
                command.words += ["--limit", str(total)]
            seen = watch(commands, gpus, kill_at)
            check([command.output for command in commands], total)
        return seen.row(way, gpus, total)


@dataclass(slots=True)
class Command:
    """`vlfit batch` with these words, to ``output``."""

    words: list[str]
    output: Path
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Seen:
    """What was seen of a run: how many records there were when (seconds of ``perf_counter``), by output."""

    start: float
    heard: Heard
    workers: int
    counts: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    killed: float | None = None
    end: float = 0.0

    def row(self, way: str, gpus: int, total: int) -> Row:
        first = next(when for when, counts in self.counts if sum(counts))
        back = None
        if self.killed is not None and len(self.heard.workers) > self.workers:
            back = self.heard.workers[self.workers][0] - self.killed
        wall = self.end - self.start
        told = [line for line in self.heard.lines if "worker" in line]
        return Row(way, gpus, total, self.speed(total), first - self.start, wall, back, told)

    def speed(self, total: int) -> float:
        """Pictures a second from the moment when all had begun until five sixths were done."""
        begun = self._all_begun()
        inside = [(when, sum(counts)) for when, counts in self.counts if when >= begun]
        inside = [(when, count) for when, count in inside if count * 6 <= total * 5]
        if len(inside) < 3:
            return float("nan")  # too short a run to tell
        # With Ray records come by the handful, so the slope of all moments says it better than two of them.
        return statistics.linear_regression(*zip(*inside, strict=True)).slope

    def _all_begun(self) -> float:
        if self.heard.workers:
            return self.heard.workers[min(self.workers, len(self.heard.workers)) - 1][0]
        return next(when for when, counts in self.counts if all(counts))


def watch(commands: Sequence[Command], workers: int, kill_at: int | None) -> Seen:
    """Run them side by side to their end. ``kill_at`` records a worker is ended, which must be heard of."""
    heard = Heard()
    seen = Seen(time.perf_counter(), heard, workers)
    files = [Growing(command.output) for command in commands]
    with _started(commands, heard) as processes:
        while any(process.poll() is None for process in processes):
            time.sleep(LOOK_S)
            now = time.perf_counter()
            counts = tuple(file.lines() for file in files)
            if not seen.counts or counts != seen.counts[-1][1]:
                seen.counts.append((now, counts))
            all_begun = len(heard.workers) == workers
            if kill_at is not None and seen.killed is None and sum(counts) >= kill_at and all_begun:
                os.kill(heard.workers[0][1], signal.SIGKILL)
                seen.killed = now
            if now - seen.start > LONGEST_S:
                raise SystemExit(f"not over after {LONGEST_S:g} s:\n" + "\n".join(heard.lines[-20:]))
        seen.end = time.perf_counter()
        seen.counts.append((seen.end, tuple(file.lines() for file in files)))
        if any(process.returncode for process in processes):
            codes = [process.returncode for process in processes]
            raise SystemExit(f"ended with {codes}:\n" + "\n".join(heard.lines[-20:]))
    return seen


@contextmanager
def _started(commands: Sequence[Command], heard: Heard) -> Iterator[list[subprocess.Popen[str]]]:
    """The programs; what they say is heard. None of them outlives the block."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            words = ["batch", *command.words, "--output", str(command.output)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "vlfit", *words],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                    env=environment(TOKENIZERS_PARALLELISM="false", **command.settings),
                )
            )
        listeners = [
            threading.Thread(target=_listen, args=(process, heard), daemon=True) for process in processes
        ]
        for listener in listeners:
            listener.start()
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # which ends the cluster, too
        for process in processes:
            process.wait()


def _listen(process: subprocess.Popen[str], heard: Heard) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        heard.hear(line)


class Growing:
    """A file that grows: how many lines it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = self._lines = 0

    def lines(self) -> int:
        """So far. Reads what has come since it was asked last."""
        if self._path.exists() and self._path.stat().st_size > self._read:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
            self._read += len(data)
            self._lines += data.count(b"\n")
        return self._lines


def check(outputs: Sequence[Path], total: int) -> None:
    """Ends the program unless ``total`` pictures are in ``outputs``, each of them once."""
    keys = Counter(
        json.loads(line)["key"] for path in outputs for line in path.read_text("utf-8").splitlines()
    )
    twice = [key for key, count in keys.items() if count > 1]
    if len(keys) != total or twice:
        raise SystemExit(f"{len(keys)} of {total} pictures are done, {len(twice)} of them twice")


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Speeds, beside that of one GPU in the same way (Ray's or without)."""
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


def _in_words(row: Row) -> str:
    words = f"{row.pictures_per_s:.1f} pictures/s, the first after {row.first_s:.1f} s"
    words += f", all after {row.wall_s:.1f} s"
    return words + ("" if row.back_s is None else f"; the killed worker was back after {row.back_s:.1f} s")


def _plain(options: argparse.Namespace) -> dict[str, str | int | list[str] | None]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}


if __name__ == "__main__":
    main()

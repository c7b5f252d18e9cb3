"""What `vlfit batch` adds to the engine, what it holds, and what a kill costs.

    python -m benchmarks.batch                                     10,000 small pictures, killed three times
    python -m benchmarks.batch --pictures 600 --blocks 4           to try it

Pictures of 32 x 32 pixels, no two alike, are made on the fly and described in so few tokens by mini on the
CPU, which sees 16 tokens of each (of its own accord none has fewer than 64). Two parts, each told as it ends:

overhead    one engine, blocks of pictures by turns: through a batch (a folder, hashes, records, a file) and
            straight through the same backend (bytes that are in memory already, as many threads that prepare
            them, as many in flight, nothing kept). Processor time and wall time of each block, the batch's
            from its first look into the folder to its last record on the disk; `batch_overhead.py` says how
            they are compared. The engine's own threads do the same work in both, as fast as the machine lets
            them just then: where others work too, read the processor time of all other threads, which is
            where a batch does what it does.
kills       `vlfit batch` as a program, ended by SIGKILL at random places of its output, and started again
            until it is through: whether every picture is there once, and how far the resident memory of each
            process rose from its 100th picture to its last.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.batch_overhead import Overhead, make_pictures, measure_overhead, tell_overhead
from benchmarks.facts import commit, cpu_name
from benchmarks.measure import ROOT, environment

MIB = 1 << 20
WARM = 100  # pictures after which memory should be what it stays at
LOOK = 0.2  # seconds between two looks at a program that runs


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
    overhead: Overhead | None = None
    processes: list[Process] = field(default_factory=list)
    missing: int | None = None
    twice: int | None = None
    seconds: float | None = None


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
        "--block", type=int, default=40, help="pictures of a block, of the part about overhead"
    )
    parser.add_argument("--blocks", type=int, default=60, help="of each kind")
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
    facts = Facts(commit(), cpu_name(), torch.get_num_threads(), settings)
    print(f"commit {facts.commit}; {facts.processor}, {facts.threads} threads")
    with tempfile.TemporaryDirectory(prefix="vlfit-batch-") as folder:
        if options.only != "kills":
            facts.overhead = measure_overhead(options, Path(folder))
            tell_overhead(facts.overhead)
        if options.only != "overhead":
            measure_kills(options, Path(folder), facts)
            tell_kills(facts)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(facts), indent=1) + "\n")
    if facts.missing or facts.twice:
        sys.exit("the output is not what it should be")


if __name__ == "__main__":
    main()

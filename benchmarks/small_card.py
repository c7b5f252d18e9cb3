"""Any benchmark on as many multiprocessors as a small card has, by CUDA MPS, beside the whole card.

    python -m benchmarks.small_card --multiprocessors 30 sizes 2B-bf16 4B-int4
    python -m benchmarks.small_card --llama-bench PROGRAM --gguf FILE --json FILE sizes 2B-bf16
    python -m benchmarks.small_card --multiprocessors 20,30 --probe-only

First what the multiprocessors give by themselves: bytes/s of a kernel that only reads, and a product of
bfloat16 matrices by torch; nothing else runs if MPS does not limit them. Then llama-bench, if asked for, and
the benchmark: on each number of multiprocessors, and last on the whole card, outside of MPS.

What follows the benchmark's name is for it. Of a `--json FILE.json` there each run gets a file of its own:
FILE-30.json with 30 multiprocessors, FILE-132.json on a whole card of 132. `--json` before the name is for
this module: what the multiprocessors give, and llama-bench.

An MPS daemon of its own is started and ended: no setting of the card changes, and processes outside of it see
nothing. Bandwidth and clocks stay those of the card: a real small card is slower where memory is the limit.
Needs one NVIDIA GPU and nvidia-cuda-mps-control (it comes with the driver; not under WSL2).
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    ROOT,
    add_json_option,
    argument_parser,
    card,
    commit,
    environment,
    print_table,
    run_worker,
    write_json,
)

CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_WAIT_SECONDS = 20.0
_PROBE_SECONDS = 300.0
_SIDE = 4096  # of the matrices that are multiplied
_MAX_NUMBERS = 8


class CannotLimit(Exception):
    """MPS cannot be used here; the message says why, and what to do."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    if options.worker:
        print(json.dumps(probe()))
        return
    try:
        sys.exit(run(options))
    except CannotLimit as error:
        sys.exit(f"benchmarks.small_card: {error}")


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends with a message and code 2 for what makes no sense."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--multiprocessors", type=counts, default=(30,), metavar="N,N", help="30: an RTX 5060"
    )
    parser.add_argument("--probe-only", action="store_true", help="no benchmark: reads and a product alone")
    parser.add_argument("--limited-only", action="store_true", help="the benchmark not on the whole card")
    parser.add_argument(
        "--llama-bench", type=Path, metavar="PROGRAM", help="llama.cpp's, built for this card"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="its model")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    add_json_option(parser, "what the multiprocessors give, and llama-bench, but nothing of the benchmark,")
    parser.add_argument("benchmark", nargs="?", help="name of a module of benchmarks/")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark")
    options = parser.parse_args(arguments)
    if options.worker:
        return options
    if options.benchmark is None and not options.probe_only:
        parser.error("which benchmark? Name one, such as sizes, or use --probe-only")
    if options.benchmark is not None and options.probe_only:
        parser.error("--probe-only runs no benchmark")
    if options.benchmark is not None and not is_benchmark(options.benchmark):
        parser.error(f"there is no benchmark {options.benchmark!r} in benchmarks/ that runs by itself")
    if (options.llama_bench is None) != (options.gguf is None):
        parser.error("--llama-bench and --gguf go together")
    for file in (options.llama_bench, options.gguf):
        if file is not None and not file.is_file():
            parser.error(f"there is no file {file}")
    theirs = [ROOT / file for file in json_files(options.arguments)]
    for file in [options.json, *theirs] if options.json is not None else theirs:
        try:
            check_writable(file)
        except (OSError, ValueError) as error:
            parser.error(f"--json {file} cannot be written: {getattr(error, 'strerror', None) or error}")
    return options


def counts(text: str) -> tuple[int, ...]:
    """Parse "20,30"."""
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not one or more numbers with commas")
    numbers = tuple(int(each) for each in text.split(","))
    if min(numbers) < 1 or len(numbers) > _MAX_NUMBERS or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: 1 to {_MAX_NUMBERS} numbers from 1 on, each once")
    return numbers


def is_benchmark(name: str) -> bool:
    """Whether ``name`` is a module of benchmarks/ that can be run, other than this one.

    Programs that other benchmarks start, such as ``engine_workers``, have no options and are none.
    """
    file = ROOT / "benchmarks" / f"{name}.py"
    if not name.isidentifier() or name == Path(__file__).stem or not file.is_file():
        return False
    text = file.read_text("utf-8")
    return "__main__" in text and re.search(r"argument_parser\(|ArgumentParser\(", text) is not None


def check_writable(file: Path) -> None:
    """Open ``file`` for writing, and leave it as it was; its folder is made. Raises ``OSError``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    existed = file.exists()
    file.open("a").close()
    if not existed:
        file.unlink()


def json_files(arguments: Sequence[str]) -> list[str]:
    """The files of ``--json`` among a benchmark's arguments."""
    return [file for _, _, file in _json_words(arguments)]


def with_number(arguments: Sequence[str], number: int) -> list[str]:
    """``arguments`` with ``number`` before the suffix of each file of ``--json``."""
    made = list(arguments)
    for at, front, file in _json_words(arguments):
        path = Path(file)
        made[at] = f"{front}{path.with_stem(f'{path.stem}-{number}')}"
    return made


def _json_words(arguments: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Where a file of ``--json`` stands, what is before it in its word, and the file.

    Also of ``--json=FILE`` and of what argparse takes for the same, such as ``--js``. Not of an empty name.
    """
    for at, word in enumerate(arguments):
        option, equals, file = word.partition("=")
        if len(option) > len("--") and "--json".startswith(option):
            place = at if equals else at + 1
            given = file if equals else "".join(arguments[place : place + 1])
            if Path(given).name:
                yield place, f"{option}=" if equals else "", given


def run(options: argparse.Namespace) -> int:
    """Probe, and run the benchmark. Returns its worst exit code. Raises ``CannotLimit``."""
    check_host()
    whole = {"wanted": None, **run_probe({})}
    total = whole["multiprocessors"]
    check_numbers(options.multiprocessors, total)
    facts = {"commit": commit(), "card": card()}
    print(f"commit {facts['commit']}; {facts['card']}")
    rows, worst = [whole], 0

    def save() -> None:
        write_json(options.json, {**facts, "runs": rows})

    save()
    with mps_daemon() as settings:
        limits = [settings | {_LIMIT: str(percentage(each, total))} for each in options.multiprocessors]
        for number, limit in zip(options.multiprocessors, limits, strict=True):
            rows.append({"wanted": number, **check_limited(run_probe(limit), number, total)})
            save()
        print_rows(rows)
        for row, limit in zip(rows[1:], limits, strict=True):
            worst = max(worst, run_on(row, total, limit, options, save))
    return max(worst, run_on(whole, total, {}, options, save))


def check_numbers(numbers: Sequence[int], total: int) -> None:
    """Raise ``CannotLimit`` for one of ``numbers`` that takes 100 % of ``total``, or more."""
    most = 99 * total // 100
    for number in numbers:
        if number > most:
            raise CannotLimit(
                f"the card has {total} multiprocessors, and MPS, which counts in percent, limits it to "
                f"{most} at most: --multiprocessors {number} is no limit"
            )


def run_on(
    row: dict[str, Any],
    total: int,
    limit: dict[str, str],
    options: argparse.Namespace,
    save: Callable[[], None],
) -> int:
    """llama-bench, into ``row``, and the benchmark, as far as asked for; the benchmark's exit code.

    ``limit``: environment of MPS's clients; empty: the whole card. ``save`` is called when ``row`` has grown.
    """
    number = row["multiprocessors"]
    if options.llama_bench is not None:
        row["llama.cpp"] = run_llama(options.llama_bench, options.gguf, limit)
        save()
        print(f"llama.cpp on {number} multiprocessors: {row['llama.cpp']}", flush=True)
    if options.benchmark is None or (options.limited_only and not limit):
        return 0
    print(f"\n--- {options.benchmark} on {number} of {total} multiprocessors", flush=True)
    return run_benchmark(options.benchmark, with_number(options.arguments, row["wanted"] or total), limit)


def check_host() -> None:
    """Raise ``CannotLimit`` without MPS's program or a GPU, or beside another MPS."""
    if not Path("/dev/nvidiactl").exists():
        raise CannotLimit("there is no NVIDIA GPU here (no /dev/nvidiactl)")
    if shutil.which(CONTROL) is None:
        raise CannotLimit(
            f"{CONTROL} is not installed; it comes with NVIDIA's driver for Linux, not under WSL2"
        )
    running = mps_processes()
    if running:
        raise CannotLimit(
            f"another MPS runs here (process {running[0]}): two of them on one card disturb each other; end "
            f"it first: echo quit | {CONTROL}"
        )


def mps_processes(proc: Path = Path("/proc")) -> list[int]:
    """Processes of any MPS daemon or server, of all users that can be seen."""
    found = []
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                program = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            except OSError:
                continue
            if Path(program).name in (CONTROL, SERVER):
                found.append(int(folder.name))
    return sorted(found)


def percentage(number: int, total: int) -> int:
    """The smallest whole percentage of ``total`` multiprocessors that is at least ``number`` of them."""
    return next(percent for percent in range(1, 101) if percent * total // 100 >= number)


def check_limited(found: dict[str, Any], wanted: int, total: int) -> dict[str, Any]:
    """``found``, if MPS did limit the process to about ``wanted``; else raise ``CannotLimit``."""
    number = found["multiprocessors"]
    if number >= total or abs(number - wanted) > max(2, wanted // 10):
        raise CannotLimit(f"MPS gave {number} of {total} multiprocessors for {wanted}: nothing was measured")
    return found


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Run an MPS daemon of one's own; yields the environment of its clients. Ends it and its server.

    SIGTERM ends them, too: within the block it raises ``SystemExit``.
    """
    with tempfile.TemporaryDirectory(prefix="vlfit-mps-") as folder:
        settings = {
            "CUDA_MPS_PIPE_DIRECTORY": str(Path(folder) / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(Path(folder) / "log"),
        }
        for each in settings.values():
            Path(each).mkdir()
        before = set(mps_processes())
        on_sigterm = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            control([CONTROL, "-d"], settings)
            try:
                yield settings
            finally:
                try:
                    control([CONTROL], settings, "quit\n")
                finally:
                    wait_for_end(set(mps_processes()) - before)
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)


def control(command: list[str], settings: dict[str, str], said: str = "") -> None:
    """Run MPS's program. Raises ``CannotLimit`` with what it says."""
    try:
        done = subprocess.run(
            command,
            input=said,
            capture_output=True,
            text=True,
            env={**os.environ, **settings},
            timeout=_WAIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotLimit(f"{' '.join(command)} does not answer") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise CannotLimit(f"{' '.join(command)} failed: {lines[0]}")


def wait_for_end(processes: set[int]) -> None:
    """Wait until ``processes`` have ended. Raises ``CannotLimit`` naming those that have not in time."""
    until = time.monotonic() + _WAIT_SECONDS
    while left := [pid for pid in processes if pid in mps_processes()]:
        if time.monotonic() > until:
            raise CannotLimit(
                f"processes of MPS have not ended: {', '.join(map(str, left))}; end them by hand"
            )
        time.sleep(0.1)


def run_probe(limit: dict[str, str]) -> dict[str, Any]:
    """``probe`` in a process with the environment ``limit``. Raises ``CannotLimit`` if it fails."""
    try:
        return run_worker("benchmarks.small_card", "--worker", timeout=_PROBE_SECONDS, **limit)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        last = str(error).strip().splitlines()[-1]
        raise CannotLimit(f"reading and multiplying on the card failed: {last}") from None


def probe() -> dict[str, Any]:
    """What this process gets of the card: multiprocessors, bytes/s read, FLOP/s of a bfloat16 product."""
    import torch

    from vlfit.tuning.bandwidth import measure_memory_bandwidth, median_seconds

    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device")
    device = torch.device("cuda", 0)
    left, right = (torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = median_seconds(lambda: left @ right, device)
    return {
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
        "read_bytes_per_second": measure_memory_bandwidth(device),
        "product_flops_per_second": 2 * _SIDE**3 / seconds,
    }


def run_llama(program: Path, model: Path, limit: dict[str, str]) -> dict[str, float]:
    """Tokens/s of llama-bench, by its own names of its tests: a prompt, and decoding behind one.

    Raises ``CannotLimit`` if it fails.
    """
    found: dict[str, float] = {}
    for test in (["-p", "808", "-n", "0"], ["-p", "0", "-n", "128", "-d", "808"]):
        command = [str(program), "-m", str(model), *test, "-fa", "1", "-o", "json"]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **limit}, check=False
        )
        try:
            tests = json.loads(done.stdout)
            found |= {f"p{each['n_prompt']} n{each['n_gen']}": float(each["avg_ts"]) for each in tests}
        except (ValueError, KeyError, TypeError):
            lines = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            raise CannotLimit(f"{program.name} ended with {done.returncode}: {lines[0]}") from None
    return found


def run_benchmark(name: str, arguments: Sequence[str], limit: dict[str, str]) -> int:
    """Run ``benchmarks.NAME`` on this terminal with the environment ``limit``; its exit code.

    If this process is to end before it, so does the benchmark, with all its processes: MPS waits for them.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment(**limit), start_new_session=True) as process:
        try:
            return process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The table of what each number of multiprocessors gives."""
    table = [["multiprocessors", "read, GB/s", "product in bfloat16, TFLOP/s"], ["---"] * 3]
    for row in rows:
        read, product = row["read_bytes_per_second"] / 1e9, row["product_flops_per_second"] / 1e12
        table.append([str(row["multiprocessors"]), f"{read:,.0f}", f"{product:,.1f}"])
    print_table(table)


if __name__ == "__main__":
    main()

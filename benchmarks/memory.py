"""What `vlfit serve` holds of a card with 7,200 MiB free, row by row, and what it serves there.

    python -m benchmarks.memory --json FILE                 the four of the table below: some minutes
    python -m benchmarks.memory --only 4B-fp8
    python -m benchmarks.memory --model mini --device cpu   the program itself, without a GPU

A second process holds the card's memory before the server starts, so that what is left is a small card
(``hold.py``). Weights are random, of the true shapes, in files that memory holds. Then, over HTTP: as many
requests at once as it is to serve, each with a picture of the largest size; one request that fills the
context, alone and beside the others. The card's memory is read with NVML all along. What must hold is in
``verdicts``; the exit code is 1 if any of it does not.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.facts import card, commit, cpu_name
from benchmarks.hold import Hold
from benchmarks.ledger_job import Meter
from benchmarks.measure import MIB, ROOT, environment, versions_of
from benchmarks.memory_load import ask_everything
from benchmarks.random_weights import room_in_memory, write_random
from benchmarks.report import print_rows
from benchmarks.served import DidNotStart, Served, held_beside, ledger_table, planned_for_process
from vlfit.checkpoint.source import locate, read_checkpoint
from vlfit.quantize.conversion import DEFAULT_GROUP_SIZE

FREE = 7200 * MIB
MOST_BESIDE = 900 * MIB
MOST_UNUSED = 0.03  # share of the plan
MOST_WHILE_LOADING = 300 * MIB
STARTED, MOST_OF_IT = 32 * MIB, 0.95  # of what is on the card when ready: how far a start has come
LEAST_SPEED = 1e9  # bytes of weights a second, from the command to the first 200


@dataclass(frozen=True, slots=True)
class Row:
    """``size``, ``weights``, ``int8`` and ``group_size`` of ``write_hollow``; without ``weights`` a name.

    ``context`` tokens are to be in the pool, pictures of ``image_tokens`` seen, ``sequences`` run at once.
    """

    size: str
    weights: str
    context: int
    image_tokens: int
    sequences: int
    int8: tuple[str, ...] = ()
    group_size: int = DEFAULT_GROUP_SIZE

    @property
    def name(self) -> str:
        return f"{self.size}-{self.weights}" if self.weights else self.size


ROWS = (
    Row("2B", "fp8", 16384, 2560, 8),
    Row("4B", "fp8", 6144, 1280, 4),
    Row("4B", "int4", 16384, 2560, 8),
    Row("8B", "int4", 4096, 1280, 2, ("head", "embedding", "vision"), 128),
)


def main() -> None:
    options = read_options()
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    if options.model:
        context, image_tokens, sequences = options.sizes
        rows = [Row(options.model, "", context, image_tokens, sequences)]
    if not rows:
        sys.exit(f"no such rows: {options.only}; there are {', '.join(row.name for row in ROWS)}")
    facts: dict[str, Any] = {"commit": commit(), "processor": cpu_name(), **versions_of("torch", "triton")}
    if options.device != "cpu":
        facts["card"] = card()
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    results: list[dict[str, Any]] = []
    with free_memory(options) as hold:
        if hold is not None:
            facts["bare_context"] = hold.context
            print(f"a CUDA context that does nothing holds {hold.context / MIB:.0f} MiB", flush=True)
        for row in rows:
            results.append(measured(row, options, hold))
            print_row(results[-1])
            if options.json:  # a run that is cut short leaves what it has
                options.json.write_text(json.dumps({"facts": facts, "rows": results}, indent=1), "utf-8")
    print()
    print_results(results)
    sys.exit(1 if any(result["wrong"] for result in results) else 0)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help=", ".join(row.name for row in ROWS))
    parser.add_argument("--model", help="instead of the table: mini or a folder, with --sizes")
    parser.add_argument(
        "--sizes", nargs=3, type=int, default=(2048, 144, 3), metavar="N",
        help="with --model: context, image tokens, sequences",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--free", type=int, default=FREE // MIB, metavar="MIB", help="of the card")
    parser.add_argument(
        "--serve",
        default="",
        metavar="WORDS",
        help="in one word, more options of vlfit serve than the plan's: '--kv auto' fills what is left",
    )
    parser.add_argument("--starts", type=int, default=2, help="times to start: the first may compile kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    return parser.parse_args()


@contextmanager
def free_memory(options: argparse.Namespace) -> Iterator[Hold | None]:
    if options.device == "cpu":
        yield None
    else:
        with Hold() as hold:
            yield hold


def measured(row: Row, options: argparse.Namespace, hold: Hold | None) -> dict[str, Any]:
    """All of one row: the checkpoint written, the server started and asked, and what was seen of it."""
    with tempfile.TemporaryDirectory(prefix="vlfit-memory-", dir=room_in_memory()) as folder:
        if row.weights:
            place = write_random(Path(folder) / row.name, row.size, row.weights, row.int8, row.group_size)
        else:
            _, place = locate(row.size)
        weights = read_checkpoint(row.name, place).weight_bytes
        free = None if hold is None else hold.leave(options.free * MIB)
        arguments = [*planned(row, place, on_gpu=hold is not None), *options.serve.split()]
        result = {"name": row.name, "row": asdict(row), "serve": arguments[1:], "weights_bytes": weights}
        starts: list[float] = []
        try:
            for left in reversed(range(options.starts)):
                free = None if hold is None else hold.leave(options.free * MIB)
                with Served(arguments, None if hold is None else Meter()) as served:
                    starts.append(served.ready_s)
                    if not left:
                        result |= {"free": free, **seen(row, served)}
        except DidNotStart as error:
            return result | {"starts_s": starts, "wrong": ["it did not start"], "why": str(error)}
        result |= {"starts_s": starts, "bytes_per_s": weights / min(starts)}
        return result | {"wrong": [words for words, holds in verdicts(row, result) if not holds]}


def planned(row: Row, place: Path, *, on_gpu: bool) -> list[str]:
    """What `vlfit plan` starts ``row`` with on the card as it is; its limits alone where nothing fits.

    A plan is for a GPU: on a CPU the limits are all.
    """
    limits = ["--context", str(row.context), "--sequences", str(row.sequences)]
    limits += ["--image-tokens", str(row.image_tokens)]
    if not on_gpu:
        return [str(place), *limits, "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "vlfit", "plan", str(place), *limits, "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    if done.returncode:
        print(f"\n{row.name}: no plan (exit code {done.returncode})\n{done.stdout}{done.stderr}")
        return [str(place), *limits]
    command: list[str] = json.loads(done.stdout)["command"]
    return command[2:]


def seen(row: Row, served: Served) -> dict[str, Any]:
    """What a running server holds before and after it is asked all there is to ask."""
    held = served.on_card()
    ready = {"process": held, "own": served.own(), "resident": served.memory("VmRSS")}
    at_ready = served.ask("/v1/vlfit/ledger")
    load = ask_everything(served.url, row.context, row.image_tokens, row.sequences)
    after = {"process": served.on_card(), "own": served.own(), "resident": served.memory("VmRSS")}
    ledger = served.ask("/v1/vlfit/ledger")
    watched = served.watched
    return {
        "ready": ready,
        "after": after,
        "peak": watched.peak,
        "stages_s": {
            "CUDA": watched.reached(STARTED),
            "weights and pool": watched.reached(round(MOST_OF_IT * held)),
            "ready": served.ready_s,
        },
        "peak_until_ready": watched.peak_until(served.ready_s),
        "peak_resident": watched.peak_resident,
        "peak_anonymous": watched.peak_anonymous,
        "curve": watched.curve,
        "ledger_at_ready": at_ready,
        "ledger": ledger,
        "planned": planned_for_process(ledger),
        "beside": held_beside(ledger, watched.peak),
        "load": load.facts(),
        "status": served.ask("/v1/vlfit/status")["requests"],
        "told": [f"{at:.2f} {line}" for at, line in served.told if " POST " not in line],
    }


def verdicts(row: Row, result: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """What must hold, in words that say how it does not."""
    load, pool = result["load"], result["ledger"]["settings"]["kv_tokens"]
    yield f"{len(load['failures'])} requests failed: {load['failures'][:2]}", not load["failures"]
    yield f"the pool holds {pool} tokens, not {row.context}", pool >= row.context
    yield (
        f"pictures of {load['image_tokens']} tokens were seen, not of {row.image_tokens}",
        load["image_tokens"] == row.image_tokens,
    )
    yield f"the longest request had {load['longest']} tokens", load["longest"] > 0.99 * row.context - 8
    if result["free"] is None:
        return  # on a CPU only what is served can be judged
    peak, planned, beside = result["peak"], result["planned"], result["beside"]
    yield f"it held {peak / MIB:.0f} MiB, of {planned / MIB:.0f} planned", peak <= planned
    yield (
        f"{planned / MIB:.0f} MiB were planned, over 3 % more than the {peak / MIB:.0f} held",
        planned <= (1 + MOST_UNUSED) * peak,
    )
    yield f"{beside / MIB:.0f} MiB beside weights and KV cache", beside <= MOST_BESIDE
    extra = result["peak_until_ready"] - result["ready"]["process"]
    yield f"{extra / MIB:.0f} MiB more while it loaded than then", extra <= MOST_WHILE_LOADING
    speed = result["bytes_per_s"]
    yield f"weights were ready at {speed / 1e9:.2f} GB/s", speed >= LEAST_SPEED


def print_row(result: dict[str, Any]) -> None:
    """At once: what was measured is not lost if a later row fails."""
    print(f"\n## {result['name']}: vlfit serve {' '.join(result['serve'])}\n")
    if "ledger" not in result:
        print(result["why"])
        return
    print_rows(ledger_table(result["ledger"]))
    starts = ", ".join(f"{seconds:.2f}" for seconds in result["starts_s"])
    print(
        f"\nfree before: {mib(result['free'])} MiB; ready after {starts} s; on the card "
        f"{mib(result['peak'])} MiB at most, {mib(result['ready']['process'])} when ready, "
        f"{mib(result['after']['process'])} after; RAM {mib(result['peak_resident'])} MiB at most, of which "
        f"{mib(result['peak_anonymous'])} no pages of files"
    )
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in result["stages_s"].items())
    print(f"the last start, in seconds: {stages}")
    print(result["load"]["words"])
    for words in result["wrong"]:
        print(f"WRONG: {words}")
    sys.stdout.flush()


def print_results(results: list[dict[str, Any]]) -> None:
    rows = [
        [
            "MiB",
            "context in pool",
            "image tokens",
            "at once",
            "planned",
            "held",
            "ratio",
            "beside",
            "GB/s",
            "",
        ]
    ]
    for result in results:
        row = result["row"]
        if "ledger" not in result:
            rows.append([result["name"], *["-"] * 8, "DID NOT START"])
            continue
        ratio = f"{result['planned'] / result['peak']:.3f}" if result["peak"] else "-"
        rows.append(
            [
                result["name"],
                str(result["ledger"]["settings"]["kv_tokens"]),
                str(result["load"]["image_tokens"]),
                str(row["sequences"]),
                mib(result["planned"]),
                mib(result["peak"]),
                ratio,
                mib(result["beside"]) if result["peak"] else "-",
                f"{result['bytes_per_s'] / 1e9:.2f}",
                f"{len(result['wrong'])} WRONG" if result["wrong"] else "ok",
            ]
        )
    print_rows(rows)


def mib(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:,.1f}"


if __name__ == "__main__":
    main()

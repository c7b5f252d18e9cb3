"""vLLM and the native engine in turn on a card with 7,200 MiB free: what each plans, holds and does a second.

    python -m benchmarks.vllm_beside 2B-fp8 2B-bf16 4B-fp8 --json FILE     two or three minutes for each
    python -m benchmarks.vllm_beside mini --device cpu --tokens 16         the program itself, without a GPU

`vlfit serve` and `vlfit serve --backend vllm` are asked the same over HTTP: one picture of 1024x768 and an
answer of ``--tokens``, alone and ``--at-once`` times; all pictures differ, answers do not end early. A second
process holds the rest of the card (``hold.py``). Weights are random, of the true shapes, in files that memory
holds. Each is started with as many requests at once as its plan can have; more wait. Where vLLM is, the
variable VLFIT_VLLM_PYTHON says. The card's memory is read with NVML all along.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.asking import Reply, ask, body, jpeg, new_client, url_of
from benchmarks.facts import card, commit, cpu_name, output_of
from benchmarks.ledger_job import Meter
from benchmarks.measure import MIB, ROOT, environment, versions_of
from benchmarks.memory import FREE, free_memory
from benchmarks.random_weights import room_in_memory, write_random
from benchmarks.report import print_rows
from benchmarks.served import DidNotStart, Served, ledger_table, planned_for_process
from vlfit.checkpoint.source import locate

NATIVE, VLLM = "native", "vllm"
SIZE = 1024, 768
CONTEXT, IMAGE_TOKENS = 2048, 768
QUESTION = "Describe the picture in detail."
_LOG = re.compile(r"its log: (\S+)")
# What vLLM says of its memory, of the kernels it took, and of how long parts of its start lasted.
_TELLING = re.compile(
    r"GiB|KV cache size|[Uu]sing .*(backend|ttention|[Kk]ernel)|Selected .*[Kk]ernel|took [\d.]+ s"
)
_MOST_LINES = 60
MOST_LEFT = 16 * MIB  # the driver's own, which comes and goes


def main() -> None:
    options = read_options()
    facts: dict[str, Any] = {"commit": commit(), "processor": cpu_name(), **versions_of("torch", "triton")}
    if options.device != "cpu":
        facts["card"] = card()
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    results: list[dict[str, Any]] = []

    def keep() -> None:  # a run that is cut short leaves what it has
        if options.json:
            options.json.write_text(json.dumps({"facts": facts, "results": results}, indent=1), "utf-8")

    with free_memory(options) as hold:
        for name in options.models:
            with tempfile.TemporaryDirectory(prefix="vlfit-beside-", dir=room_in_memory()) as folder:
                place = checkpoint(Path(folder), name)
                for backend in options.backends:
                    result: dict[str, Any] = {"model": name, "backend": backend}
                    results.append(result)
                    measure(result, place, backend, options, hold)
                    print_result(result)
                    keep()
    print()
    for name in options.models:
        print_rows(beside(name, [result for result in results if result["model"] == name]))
        print(flush=True)
    sys.exit(1 if any(result["wrong"] for result in results) else 0)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="2B-fp8, 4B-fp8, ...; mini or a folder")
    parser.add_argument("--backends", nargs="+", default=[NATIVE, VLLM], choices=[NATIVE, VLLM])
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument(
        "--rounds", type=int, default=5, help="of requests alone; of many at once, half of them"
    )
    parser.add_argument(
        "--starts", type=int, default=1, help="each but the last only to learn from, as vLLM does"
    )
    parser.add_argument(
        "--free", type=int, default=FREE // MIB, metavar="MIB", help="of the card; 0: all of it"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    return parser.parse_args()


def checkpoint(folder: Path, name: str) -> Path:
    size, _, weights = name.partition("-")
    if weights in ("bf16", "fp8", "int4"):
        return write_random(folder / name, size, weights)
    return locate(name)[1]


def measure(
    result: dict[str, Any], place: Path, backend: str, options: argparse.Namespace, hold: Any
) -> None:
    """All of one server into ``result``: started so many times, and at last asked."""
    meter = None if hold is None else Meter()
    result |= {"starts": [], "wrong": []}
    try:
        for left in reversed(range(options.starts)):
            if hold is not None and options.free:
                result["free"] = hold.leave(options.free * MIB)
            result["serve"] = arguments = words_for(place, backend, options)
            with Served(arguments, meter) as served:
                result["starts"].append(at_ready(served))
                print(f"{result['model']} {backend}: ready after {served.ready_s:.1f} s", flush=True)
                if not left:
                    asked(result, served, options)
                    result["told"] = [f"{at:.2f} {line}" for at, line in served.told if " POST " not in line]
                    result["vllm_log"] = telling_lines(served.words(400))
                result["family"] = family(served.pid)
            look_for_left(result, meter)
    except DidNotStart as error:
        result["wrong"].append("it did not start")
        result["why"] = str(error)


def look_for_left(result: dict[str, Any], meter: Meter | None) -> None:
    """What is still there once a server was told to end (SIGINT) and did: nothing should be."""
    result["left"] = [pid for pid in result["family"] if Path(f"/proc/{pid}/exe").exists()]
    result["left_on_card"] = 0 if meter is None else meter.process()
    if result["left"] or result["left_on_card"] > MOST_LEFT:
        result["wrong"].append(f"left behind: {result['left']}, {mib(result['left_on_card'])} MiB")


def family(pid: int) -> list[int]:
    """A process and all that it started whose parents still live."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it may end meanwhile
            parents[int(entry.parent.name)] = int(
                entry.read_text("ascii", "replace").rpartition(")")[2].split()[1]
            )
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def words_for(place: Path, backend: str, options: argparse.Namespace) -> list[str]:
    """What follows `vlfit serve`: with as many requests at once as fit, the most of ``--at-once`` halved."""
    words = [str(place), "--context", str(CONTEXT), "--image-tokens", str(IMAGE_TOKENS)]
    words += ["--device", options.device] if options.device == "cpu" else []
    # Random weights repeat themselves: guesses at what comes would nearly all be right, as with no real text.
    words += ["--backend", VLLM] if backend == VLLM else ["--no-speculate"]
    count = options.at_once
    while count > 1 and not fits([*words, "--sequences", str(count)], backend, options.device):
        count //= 2
    return [*words, "--sequences", str(count)]


def fits(words: list[str], backend: str, device: str) -> bool:
    """Whether there is a plan for these weights as they are; the native engine's is no question on a CPU."""
    if backend == NATIVE and device == "cpu":
        return True
    if backend == VLLM:
        command = ["serve", *words, "--dry-run"]
    else:
        command = ["plan", *(word for word in words if word != "--no-speculate"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "vlfit", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    if done.returncode or backend == VLLM:
        return done.returncode == 0
    # Where they do not fit it plans a smaller copy of them.
    return Path(json.loads(done.stdout)["model"]).name == Path(words[0]).name


def at_ready(served: Served) -> dict[str, Any]:
    return {
        "ready_s": served.ready_s,
        "held": served.on_card(),
        "peak": served.watched.peak,
        "ledger": served.ask("/v1/vlfit/ledger"),
    }


def asked(result: dict[str, Any], served: Served, options: argparse.Namespace) -> None:
    """Seconds of requests, and what is held after them. The first ones, which may compile, do not count."""
    url, whole, many = served.url, options.tokens, options.at_once
    first, replies = together(url, 1, 1, whole)
    _, more = together(url, 2, many, whole)
    replies += more
    alone: dict[int, list[float]] = {1: [], whole: []}
    for number in range(options.rounds):
        for tokens in (1, whole):
            seconds, more = together(url, 100 + 2 * number + (tokens > 1), 1, tokens)
            alone[tokens].append(seconds)
            replies += more
    at_once = []
    for number in range((options.rounds + 1) // 2):
        seconds, more = together(url, 200 + number, many, whole)
        at_once.append(seconds)
        replies += more
    failures = [
        f"{reply.status} {reply.ended} {reply.message[:200]}" for reply in replies if reply.status != 200
    ]
    result["wrong"] += failures[:3]
    if {reply.ended for reply in replies} != {"length"} and not failures:
        result["wrong"].append("answers ended early")
    ledger = served.ask("/v1/vlfit/ledger")
    result |= {
        "first_request_s": first,
        "first_token_s": alone[1],
        "request_s": alone[whole],
        "at_once_s": at_once,
        "tokens": whole,
        "at_once": many,
        "prompt_tokens": max((reply.prompt_tokens for reply in replies), default=0),
        "image_tokens": max((image["tokens"] for reply in replies for image in reply.seen), default=0),
        "held": served.on_card(),
        "by_process": None if options.device == "cpu" else compute_processes(),
        "peak": served.watched.peak,
        "planned": planned_for_process(ledger),
        "ledger": ledger,
    }


def compute_processes() -> list[str]:
    """A line of nvidia-smi for each process that holds memory of the card: number, MiB, name."""
    words = ["--query-compute-apps=pid,used_memory,process_name", "--format=csv,noheader,nounits"]
    return output_of("nvidia-smi", *words).splitlines()


def together(url: str, seed: int, count: int, tokens: int) -> tuple[float, list[Reply]]:
    """Seconds until ``count`` requests sent at the same moment are answered; pictures are there before."""
    wishes: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    requests = [
        body(QUESTION, [url_of(jpeg(*SIZE, 1000 * seed + number))], **wishes) for number in range(count)
    ]
    clients = [new_client() for _ in requests]
    with ThreadPoolExecutor(count) as pool:
        began = time.perf_counter()
        replies = list(pool.map(ask, clients, [url] * count, requests))
        seconds = time.perf_counter() - began
    for client in clients:
        client.close()
    return seconds, replies


def telling_lines(told: str) -> list[str]:
    """What vLLM's own log, whose place was ``told``, says of memory, kernels and time."""
    found = _LOG.search(told)
    if found is None:
        return []
    lines = Path(found[1]).read_text("utf-8", "replace").splitlines()
    return [line.strip()[:300] for line in lines if _TELLING.search(line)][:_MOST_LINES]


def print_result(result: dict[str, Any]) -> None:
    """At once: what was measured is not lost if a later one fails."""
    print(f"\n## {result['model']}, {result['backend']}: vlfit serve {' '.join(result.get('serve', []))}\n")
    if "ledger" not in result:
        print(result.get("why", ""), flush=True)
        return
    print_rows(ledger_table(result["ledger"]))
    starts = ", ".join(f"{start['ready_s']:.1f}" for start in result["starts"])
    print(
        f"\nready after {starts} s; on the card {mib(result['starts'][-1]['held'])} MiB when ready, "
        f"{mib(result['peak'])} at most, {mib(result['held'])} in the end, "
        f"of {mib(result['planned'])} planned; the first request took {result['first_request_s']:.2f} s"
    )
    for name in ("first_token_s", "request_s", "at_once_s"):
        print(f"{name}: {', '.join(f'{seconds:.4f}' for seconds in result[name])}")
    for line in result["by_process"] or []:
        print(f"  nvidia-smi: {line}")
    for line in result["vllm_log"]:
        print(f"  {line}")
    for words in result["wrong"]:
        print(f"WRONG: {words}")
    sys.stdout.flush()


def beside(name: str, results: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of a table, a column for each server; what vLLM is to the native engine in the last."""
    columns = [result for result in results if "ledger" in result]
    rows = [[name, *(result["backend"] for result in columns), "vllm / native"]]
    for label, form, value in (
        ("ready, s", ".1f", lambda result: result["starts"][-1]["ready_s"]),
        ("first token, ms", ".1f", lambda result: 1e3 * statistics.median(result["first_token_s"])),
        ("alone, tokens/s", ".1f", decoded_per_second),
        ("all at once, tokens/s", ".0f", all_per_second),
        ("run at once", ".0f", lambda result: float(result["serve"][-1])),
        ("planned, MiB", ",.0f", lambda result: result["planned"] / MIB),
        ("held at most, MiB", ",.0f", lambda result: result["peak"] / MIB),
    ):
        values = [float(value(result)) for result in columns]
        pair = len(values) == 2 and values[0] > 0
        rows.append(
            [label, *(format(each, form) for each in values), f"{values[1] / values[0]:.2f}" if pair else "-"]
        )
    return rows


def decoded_per_second(result: dict[str, Any]) -> float:
    """After the first token, of a request alone."""
    seconds: float = statistics.median(result["request_s"]) - statistics.median(result["first_token_s"])
    return (float(result["tokens"]) - 1) / seconds


def all_per_second(result: dict[str, Any]) -> float:
    """Of all requests at once from the moment they were sent, pictures and prompts included."""
    return float(result["at_once"] * result["tokens"]) / float(statistics.median(result["at_once_s"]))


def mib(count: int) -> str:
    return f"{count / MIB:,.0f}"


if __name__ == "__main__":
    main()

"""vLLM and the native engine in turn on a card with 7,200 MiB free: start, memory, first token, tokens/s.

    python -m benchmarks.vllm_beside 2B-fp8 2B-bf16 4B-fp8 --json FILE     two or three minutes for each
    python -m benchmarks.vllm_beside mini --device cpu --tokens 16         the program itself, without a GPU

`vlfit serve` and `vlfit serve --backend vllm` get the same requests over HTTP: one picture of 1024x768 and an
answer of ``--tokens``, alone and ``--at-once`` times; all pictures differ, answers do not end early. A second
process occupies the rest of the card (``gpu_memory.py``). Weights are random, of the true shapes, in files
that RAM holds. Each server runs as many requests at once as its plan can; more wait. The environment variable
VLFIT_VLLM_PYTHON says where vLLM is. GPU memory is sampled with NVML. Exit code 1 if a server did not start,
failed a request, or left processes or GPU memory behind.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import checkpoint_of, ram_folder
from benchmarks.gpu_memory import GpuMeter, MemoryHolder, memory_holder
from benchmarks.harness import (
    MIB,
    add_json_option,
    argument_parser,
    at_once,
    card,
    commit,
    cpu_name,
    in_mib,
    output_of,
    print_table,
    process_tree,
    run_module,
    versions_of,
    write_json,
)
from benchmarks.memory import FREE
from benchmarks.serving import (
    DidNotStart,
    Reply,
    ServerProcess,
    chat_body,
    data_url,
    ledger_table,
    new_client,
    planned_for_process,
    random_jpeg,
    send,
)

NATIVE, VLLM = "native", "vllm"
SIZE = 1024, 768
CONTEXT, IMAGE_TOKENS = 2048, 768
QUESTION = "Describe the picture in detail."
_LOG = re.compile(r"its log: (\S+)")
# Lines of vLLM's log about memory, kernels and phases of the start.
_INTERESTING = re.compile(
    r"GiB|KV cache size|[Uu]sing .*(backend|ttention|[Kk]ernel)|Selected .*[Kk]ernel|took [\d.]+ s"
)
_MAX_LINES = 60
MAX_LEFT = 16 * MIB  # the driver's own, which comes and goes


def main() -> None:
    options = read_options()
    facts: dict[str, Any] = {"commit": commit(), "processor": cpu_name(), **versions_of("torch", "triton")}
    if options.device != "cpu":
        facts["card"] = card()
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    results: list[dict[str, Any]] = []

    with memory_holder(options) as holder:
        for name in options.models:
            with tempfile.TemporaryDirectory(prefix="vlfit-beside-", dir=ram_folder()) as folder:
                checkpoint = checkpoint_of(name, Path(folder), random=True)
                for backend in options.backends:
                    result: dict[str, Any] = {"model": name, "backend": backend}
                    results.append(result)
                    measure(result, checkpoint, backend, options, holder)
                    print_result(result)
                    write_json(options.json, {"facts": facts, "results": results})
    print()
    for name in options.models:
        print_table(comparison(name, [result for result in results if result["model"] == name]))
        print(flush=True)
    sys.exit(1 if any(result["wrong"] for result in results) else 0)


def read_options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="2B-fp8, 4B-fp8, ...; mini or a folder")
    parser.add_argument("--backends", nargs="+", default=[NATIVE, VLLM], choices=[NATIVE, VLLM])
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument(
        "--rounds", type=int, default=5, help="of single requests; half as many of requests at once"
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="of the server; requests go to the last, which knows the earlier",
    )
    parser.add_argument(
        "--free", type=int, default=FREE // MIB, metavar="MIB", help="of the card; 0: all of it"
    )
    parser.add_argument("--device", default="cuda")
    add_json_option(parser)
    return parser.parse_args()


def measure(
    result: dict[str, Any],
    checkpoint: Path,
    backend: str,
    options: argparse.Namespace,
    holder: MemoryHolder | None,
) -> None:
    """Start one server ``options.starts`` times, send requests to the last; all of it into ``result``."""
    meter = None if holder is None else GpuMeter()
    result |= {"starts": [], "wrong": []}
    try:
        for remaining in reversed(range(options.starts)):
            if holder is not None and options.free:
                result["free"] = holder.leave_free(options.free * MIB)
            result["serve"] = arguments = serve_arguments(checkpoint, backend, options)
            with ServerProcess(arguments, meter) as server:
                result["starts"].append(state_when_ready(server))
                print(f"{result['model']} {backend}: ready after {server.ready_s:.1f} s", flush=True)
                if not remaining:
                    time_requests(result, server, options)
                    result["told"] = server.log_without_requests()
                    result["vllm_log"] = interesting_lines(server.log_tail(400))
                result["family"] = process_tree(server.pid)
            check_leftovers(result, meter)
    except DidNotStart as error:
        result["wrong"].append("it did not start")
        result["why"] = str(error)


def check_leftovers(result: dict[str, Any], meter: GpuMeter | None) -> None:
    """Processes and GPU memory that are left after a server has ended on SIGINT: there should be none."""
    result["left"] = [pid for pid in result["family"] if Path(f"/proc/{pid}/exe").exists()]
    result["left_on_card"] = 0 if meter is None else meter.growth()
    if result["left"] or result["left_on_card"] > MAX_LEFT:
        result["wrong"].append(f"left behind: {result['left']}, {in_mib(result['left_on_card'])} MiB")


def serve_arguments(checkpoint: Path, backend: str, options: argparse.Namespace) -> list[str]:
    """Arguments of `vlfit serve`, with ``--at-once`` requests at once or half as often as it takes to fit."""
    arguments = [str(checkpoint), "--context", str(CONTEXT), "--image-tokens", str(IMAGE_TOKENS)]
    arguments += ["--device", options.device] if options.device == "cpu" else []
    # Random weights repeat themselves: nearly all draft tokens would be accepted, as in no real text.
    arguments += ["--backend", VLLM] if backend == VLLM else ["--no-speculate"]
    count = options.at_once
    while count > 1 and not fits([*arguments, "--sequences", str(count)], backend, options.device):
        count //= 2
    return [*arguments, "--sequences", str(count)]


def fits(arguments: list[str], backend: str, device: str) -> bool:
    """Whether there is a plan for these weights as they are. A CPU needs none for the native engine."""
    if backend == NATIVE and device == "cpu":
        return True
    if backend == VLLM:
        command = ["serve", *arguments, "--dry-run"]
    else:
        command = ["plan", *(word for word in arguments if word != "--no-speculate"), "--json"]
    done = run_module("vlfit", *command)
    if done.returncode or backend == VLLM:
        return done.returncode == 0
    # If they do not fit, a smaller copy is planned.
    return Path(json.loads(done.stdout)["model"]).name == Path(arguments[0]).name


def state_when_ready(server: ServerProcess) -> dict[str, Any]:
    return {
        "ready_s": server.ready_s,
        "held": server.gpu_bytes(),
        "peak": server.memory.peak,
        "ledger": server.get("/v1/vlfit/ledger"),
    }


def time_requests(result: dict[str, Any], server: ServerProcess, options: argparse.Namespace) -> None:
    """Seconds of requests, and memory after them. The first ones, which may compile, do not count."""
    url, whole, count = server.url, options.tokens, options.at_once
    first, replies = time_at_once(url, 1, 1, whole)
    _, more = time_at_once(url, 2, count, whole)
    replies += more
    alone: dict[int, list[float]] = {1: [], whole: []}
    for number in range(options.rounds):
        for tokens in (1, whole):
            seconds, more = time_at_once(url, 100 + 2 * number + (tokens > 1), 1, tokens)
            alone[tokens].append(seconds)
            replies += more
    together: list[float] = []
    for number in range((options.rounds + 1) // 2):
        seconds, more = time_at_once(url, 200 + number, count, whole)
        together.append(seconds)
        replies += more
    failures = [
        f"{reply.status} {reply.ended} {reply.message[:200]}" for reply in replies if reply.status != 200
    ]
    result["wrong"] += failures[:3]
    if {reply.ended for reply in replies} != {"length"} and not failures:
        result["wrong"].append("answers ended early")
    ledger = server.get("/v1/vlfit/ledger")
    result |= {
        "first_request_s": first,
        "first_token_s": alone[1],
        "request_s": alone[whole],
        "at_once_s": together,
        "tokens": whole,
        "at_once": count,
        "prompt_tokens": max((reply.prompt_tokens for reply in replies), default=0),
        "image_tokens": max((image["tokens"] for reply in replies for image in reply.images), default=0),
        "held": server.gpu_bytes(),
        "by_process": None if options.device == "cpu" else compute_processes(),
        "peak": server.memory.peak,
        "planned": planned_for_process(ledger),
        "ledger": ledger,
    }


def compute_processes() -> list[str]:
    """A line of nvidia-smi for each process with GPU memory: PID, MiB, name."""
    words = ["--query-compute-apps=pid,used_memory,process_name", "--format=csv,noheader,nounits"]
    return output_of("nvidia-smi", *words).splitlines()


def time_at_once(url: str, seed: int, count: int, tokens: int) -> tuple[float, list[Reply]]:
    """Seconds until ``count`` requests that are sent at the same moment are answered."""
    params: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    requests = [
        chat_body(QUESTION, [data_url(random_jpeg(*SIZE, 1000 * seed + number))], **params)
        for number in range(count)
    ]
    clients = [new_client() for _ in requests]
    began = time.perf_counter()
    replies = at_once([partial(send, *each) for each in zip(clients, [url] * count, requests, strict=True)])
    seconds = time.perf_counter() - began
    for client in clients:
        client.close()
    return seconds, replies


def interesting_lines(log: str) -> list[str]:
    """Lines about memory, kernels and time in vLLM's own log, whose path the server's ``log`` names."""
    match = _LOG.search(log)
    if match is None:
        return []
    lines = Path(match[1]).read_text("utf-8", "replace").splitlines()
    return [line.strip()[:300] for line in lines if _INTERESTING.search(line)][:_MAX_LINES]


def print_result(result: dict[str, Any]) -> None:
    print(f"\n## {result['model']}, {result['backend']}: vlfit serve {' '.join(result.get('serve', []))}\n")
    if "ledger" not in result:
        print(result.get("why", ""), flush=True)
        return
    print_table(ledger_table(result["ledger"]))
    starts = ", ".join(f"{start['ready_s']:.1f}" for start in result["starts"])
    print(
        f"\nready after {starts} s; on the card {in_mib(result['starts'][-1]['held'])} MiB when ready, "
        f"{in_mib(result['peak'])} at most, {in_mib(result['held'])} in the end, "
        f"of {in_mib(result['planned'])} planned; the first request took {result['first_request_s']:.2f} s"
    )
    for name in ("first_token_s", "request_s", "at_once_s"):
        print(f"{name}: {', '.join(f'{seconds:.4f}' for seconds in result[name])}")
    for line in result["by_process"] or []:
        print(f"  nvidia-smi: {line}")
    for line in result["vllm_log"]:
        print(f"  {line}")
    for message in result["wrong"]:
        print(f"WRONG: {message}")
    sys.stdout.flush()


def comparison(name: str, results: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of a table: a column for each server, and the ratio of vLLM to the native engine."""
    columns = [result for result in results if "ledger" in result]
    rows = [[name, *(result["backend"] for result in columns), "vllm / native"]]
    for label, spec, value in (
        ("ready, s", ".1f", lambda result: result["starts"][-1]["ready_s"]),
        ("first token, ms", ".1f", lambda result: 1e3 * statistics.median(result["first_token_s"])),
        ("alone, tokens/s", ".1f", decode_speed),
        ("all at once, tokens/s", ".0f", total_speed),
        ("run at once", ".0f", lambda result: float(result["serve"][-1])),
        ("planned, MiB", ",.0f", lambda result: result["planned"] / MIB),
        ("held at most, MiB", ",.0f", lambda result: result["peak"] / MIB),
    ):
        values = [float(value(result)) for result in columns]
        pair = len(values) == 2 and values[0] > 0
        rows.append(
            [label, *(format(each, spec) for each in values), f"{values[1] / values[0]:.2f}" if pair else "-"]
        )
    return rows


def decode_speed(result: dict[str, Any]) -> float:
    """Tokens/s after the first token, of a request alone."""
    seconds: float = statistics.median(result["request_s"]) - statistics.median(result["first_token_s"])
    return (float(result["tokens"]) - 1) / seconds


def total_speed(result: dict[str, Any]) -> float:
    """Tokens/s of all requests at once from sending, pictures and prompts included."""
    return float(result["at_once"] * result["tokens"]) / float(statistics.median(result["at_once_s"]))


if __name__ == "__main__":
    main()

"""GPU memory of `vlfit serve` on a card with 7,200 MiB free, under the most that its plan admits.

    python -m benchmarks.memory --json FILE                 the models of the table: minutes on a GPU
    python -m benchmarks.memory --only 4B-fp8
    python -m benchmarks.memory --model mini --device cpu   the program itself, without a GPU: half a minute
    python -m benchmarks.memory --url http://127.0.0.1:8000 --sizes 6144 1280 4
                                                            only the requests, to a server that runs

A second process occupies the card's memory before the server starts, so that what is free is a small card
(``gpu_memory.py``). Weights are random, of the true shapes, in files that RAM holds. Over HTTP come as many
requests at once as the plan admits, each with a picture of the largest size, and one that fills the context,
alone and beside the others, while NVML is sampled. Limits are in ``verdicts``: never above the plan, at most
3 % below it, at most 900 MiB beside weights and KV cache. Exit code 1 if one is broken.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checkpoints import ram_folder, write_random_checkpoint
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
    print_table,
    require_gpu,
    run_module,
    versions_of,
    write_json,
)
from benchmarks.serving import (
    DidNotStart,
    Reply,
    ServerProcess,
    bytes_beside_pools,
    chat_body,
    data_url,
    ledger_table,
    new_client,
    planned_for_process,
    random_jpeg,
    send,
)
from vlfit.checkpoint.source import locate_or_download, read_checkpoint
from vlfit.quantize.conversion import DEFAULT_GROUP_SIZE

FREE = 7200 * MIB
MAX_BESIDE_POOLS = 900 * MIB
MAX_UNUSED = 0.03  # share of the plan
MAX_WHILE_LOADING = 300 * MIB
CUDA_STARTED, LOADED_SHARE = 32 * MIB, 0.95  # of the bytes on the GPU when ready: stages of a start
MIN_BYTES_PER_S = 1e9  # of weights, from the command to the first 200
ANSWER = 16  # tokens of each answer
PATCH = 32  # pixels of the side of an image token
SHORT, LONG = 10, 210  # repetitions of a word, to learn how many tokens it has
WORD = "picture "


@dataclass(frozen=True, slots=True)
class Row:
    """A model and what it must serve. Without ``weights``, ``size`` is a checkpoint's name.

    ``context`` tokens in the KV cache, pictures of ``image_tokens``, ``sequences`` at once; ``int8`` and
    ``group_size`` as ``write_random_checkpoint`` takes them.
    """

    size: str
    weights: str
    context: int
    image_tokens: int
    sequences: int
    int8: tuple[str, ...] = ()
    group_size: int = DEFAULT_GROUP_SIZE
    kv_dtype: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.size}-{self.weights}" if self.weights else self.size


ROWS = (
    Row("2B", "fp8", 16384, 2560, 8),
    Row("4B", "fp8", 6144, 1280, 4),
    Row("4B", "int4", 16384, 2560, 8),
    Row("8B", "int4", 4096, 1280, 2, ("head", "embedding", "vision"), 128),
    Row("Qwen3.5-9B", "int4", 65536, 2560, 1, ("head", "embedding", "vision"), 64, "fp8"),
)


def main() -> None:
    options = read_options()
    if options.url:
        load = send_worst_case(options.url, *options.sizes)
        print(load.facts()["words"])
        sys.exit("\n".join(load.failures) or 0)
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    if options.model:
        context, image_tokens, sequences = options.sizes
        rows = [Row(options.model, "", context, image_tokens, sequences)]
    if not rows:
        sys.exit(f"no such rows: {options.only}; there are {', '.join(row.name for row in ROWS)}")
    if options.device != "cpu":
        require_gpu("memory (without one: --model mini --device cpu)")
    facts: dict[str, Any] = {"commit": commit(), "processor": cpu_name(), **versions_of("torch", "triton")}
    if options.device != "cpu":
        facts["card"] = card()
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    results: list[dict[str, Any]] = []
    with memory_holder(options) as holder:
        if holder is not None:
            facts["bare_context"] = holder.context
            print(f"a bare CUDA context takes {in_mib(holder.context)} MiB", flush=True)
        for row in rows:
            results.append(measure(row, options, holder))
            print_result(results[-1])
            write_json(options.json, {"facts": facts, "rows": results})
    print()
    print_summary(results)
    sys.exit(1 if any(result["wrong"] for result in results) else 0)


def read_options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=", ".join(row.name for row in ROWS))
    parser.add_argument("--model", help="instead of the table: mini or a folder, with --sizes")
    parser.add_argument(
        "--sizes", nargs=3, type=int, default=(2048, 144, 3), metavar="N",
        help="with --model and --url: context, image tokens, sequences",
    )  # fmt: skip
    parser.add_argument("--url", help="of a running server, started with --sizes: send it the requests")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--free", type=int, default=FREE // MIB, metavar="MIB", help="of the card")
    parser.add_argument(
        "--serve",
        default="",
        metavar="OPTIONS",
        help="more options of vlfit serve, in one argument: '--kv auto' fills what is left",
    )
    parser.add_argument("--starts", type=int, default=2, help="of the server: the first may compile kernels")
    add_json_option(parser)
    return parser.parse_args()


def measure(row: Row, options: argparse.Namespace, holder: MemoryHolder | None) -> dict[str, Any]:
    """Write the row's checkpoint, start its server ``options.starts`` times, send requests to the last."""
    with tempfile.TemporaryDirectory(prefix="vlfit-memory-", dir=ram_folder()) as folder:
        if row.weights:
            checkpoint = Path(folder) / row.name
            write_random_checkpoint(checkpoint, row.size, row.weights, row.int8, row.group_size)
        else:
            _, checkpoint = locate_or_download(row.size)
        weights = read_checkpoint(row.name, checkpoint).weight_bytes
        free = None if holder is None else holder.leave_free(options.free * MIB)
        arguments = [*serve_arguments(row, checkpoint, on_gpu=holder is not None), *options.serve.split()]
        result = {"name": row.name, "row": asdict(row), "serve": arguments[1:], "weights_bytes": weights}
        starts: list[float] = []
        try:
            for remaining in reversed(range(options.starts)):
                free = None if holder is None else holder.leave_free(options.free * MIB)
                with ServerProcess(arguments, None if holder is None else GpuMeter()) as server:
                    starts.append(server.ready_s)
                    if not remaining:
                        result |= {"free": free, **measure_server(row, server)}
        except DidNotStart as error:
            return result | {"starts_s": starts, "wrong": ["it did not start"], "why": str(error)}
        result |= {"starts_s": starts, "bytes_per_s": weights / min(starts)}
        return result | {"wrong": [message for message, holds in verdicts(row, result) if not holds]}


def serve_arguments(row: Row, checkpoint: Path, *, on_gpu: bool) -> list[str]:
    """What `vlfit plan` starts ``row`` with on the card as it is.

    Only the row's limits, if nothing fits; or on a CPU, for which there is no plan.
    """
    limits = ["--context", str(row.context), "--sequences", str(row.sequences)]
    limits += ["--image-tokens", str(row.image_tokens), "--kv-dtype", row.kv_dtype]
    if not on_gpu:
        return [str(checkpoint), *limits, "--device", "cpu"]
    done = run_module("vlfit", "plan", str(checkpoint), *limits, "--json")
    if done.returncode:
        print(f"\n{row.name}: no plan (exit code {done.returncode})\n{done.stdout}{done.stderr}")
        return [str(checkpoint), *limits]
    command: list[str] = json.loads(done.stdout)["command"]
    return command[2:]


def measure_server(row: Row, server: ServerProcess) -> dict[str, Any]:
    """What a running server holds before, under and after the worst case."""
    at_ready = server.gpu_bytes()
    ready = {"process": at_ready, "own": server.gpu_bytes_listed(), "resident": server.host_bytes("VmRSS")}
    ledger_at_ready = server.get("/v1/vlfit/ledger")
    load = send_worst_case(server.url, row.context, row.image_tokens, row.sequences)
    after = {
        "process": server.gpu_bytes(),
        "own": server.gpu_bytes_listed(),
        "resident": server.host_bytes("VmRSS"),
    }
    ledger = server.get("/v1/vlfit/ledger")
    memory = server.memory
    return {
        "ready": ready,
        "after": after,
        "peak": memory.peak,
        "stages_s": {
            "CUDA": memory.time_to(CUDA_STARTED),
            "weights and pool": memory.time_to(round(LOADED_SHARE * at_ready)),
            "ready": server.ready_s,
        },
        "peak_until_ready": memory.peak_until(server.ready_s),
        "peak_resident": memory.peak_resident,
        "peak_anonymous": memory.peak_anonymous,
        "curve": memory.curve,
        "ledger_at_ready": ledger_at_ready,
        "ledger": ledger,
        "planned": planned_for_process(ledger),
        "beside": bytes_beside_pools(ledger, memory.peak),
        "load": load.facts(),
        "status": server.get("/v1/vlfit/status")["requests"],
        "told": server.log_without_requests(),
    }


# --- the worst case as requests ----------------------------------------------------------------------------


@dataclass
class WorstCaseLoad:
    """``replies`` in the order of sending, each with the name of its request."""

    replies: list[tuple[str, Reply]] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return [
            f"{name}: {reply.status} {reply.ended}, {reply.tokens} tokens; {reply.message[:300]}"
            for name, reply in self.replies
            if (reply.status, reply.ended, reply.tokens) != (200, "length", ANSWER)
        ]

    def facts(self) -> dict[str, Any]:
        longest = max((reply.prompt_tokens + reply.tokens for _, reply in self.replies), default=0)
        largest = max((image["tokens"] for _, reply in self.replies for image in reply.images), default=0)
        seconds = {name: round(reply.seconds, 3) for name, reply in self.replies}
        return {
            "requests": len(self.replies),
            "failures": self.failures,
            "longest": longest,
            "image_tokens": largest,
            "seconds": seconds,
            "words": f"{len(self.replies)} requests, {len(self.failures)} failed; the longest of {longest} "
            f"tokens, the largest picture of {largest}; seconds {seconds}",
        }


def send_worst_case(url: str, context: int, image_tokens: int, sequences: int) -> WorstCaseLoad:
    """The largest pictures at once, a full context alone, and a full context beside the largest pictures."""
    load = WorstCaseLoad()
    with new_client() as client:
        words = words_that_fill(client, url, context, image_tokens, load)
    pictures = [
        (f"picture {number} of {sequences} at once", picture_request(image_tokens, number, SHORT))
        for number in range(sequences)
    ]
    send_at_once(url, pictures, load)
    send_at_once(url, [("a whole context", picture_request(image_tokens, 1000, words))], load)
    others = [
        (f"{name}, beside a whole context", picture_request(image_tokens, 100 + number, SHORT))
        for number, (name, _) in enumerate(pictures[1:])
    ]
    full = ("a whole context beside others", picture_request(image_tokens, 2000, words))
    send_at_once(url, [full, *others], load)
    return load


def words_that_fill(
    client: httpx.Client, url: str, context: int, image_tokens: int, load: WorstCaseLoad
) -> int:
    """Repetitions of ``WORD`` that fill the context beside the largest picture and the answer."""
    short = send(client, url, picture_request(image_tokens, 3000, SHORT))
    long = send(client, url, picture_request(image_tokens, 3000, LONG))
    load.replies += [("few words", short), ("many words", long)]
    tokens_per_word = (long.prompt_tokens - short.prompt_tokens) / (LONG - SHORT)
    if tokens_per_word <= 0:
        return SHORT
    return SHORT + int((context - ANSWER - short.prompt_tokens) / tokens_per_word)


def picture_request(image_tokens: int, number: int, words: int) -> bytes:
    """A request about a picture of its own, which is scaled down to exactly ``image_tokens``.

    The picture has the most square shape with so many tokens, and 1.5 times its width and height.
    """
    rows = next(rows for rows in range(isqrt(image_tokens), 0, -1) if image_tokens % rows == 0)
    width, height = (3 * PATCH * side // 2 for side in (image_tokens // rows, rows))
    return chat_body(
        WORD * words,
        [data_url(random_jpeg(width, height, number))],
        max_tokens=ANSWER,
        ignore_eos=True,
        temperature=0,
    )


def send_at_once(url: str, requests: list[tuple[str, bytes]], load: WorstCaseLoad) -> None:
    """Send all ``requests`` (name, body) at the same moment, each from a client of its own."""

    def send_one(body: bytes) -> Reply:
        with new_client() as client:
            return send(client, url, body)

    replies = at_once([partial(send_one, body) for _, body in requests])
    load.replies += [(name, reply) for (name, _), reply in zip(requests, replies, strict=True)]


# --- what must hold, and the report -------------------------------------------------------------------------


def verdicts(row: Row, result: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Messages for what must hold, and whether it does."""
    load, pool = result["load"], result["ledger"]["settings"]["kv_tokens"]
    yield f"{len(load['failures'])} requests failed: {load['failures'][:2]}", not load["failures"]
    yield f"the KV cache has {pool} tokens, fewer than {row.context}", pool >= row.context
    yield (
        f"the largest picture had {load['image_tokens']} tokens, not {row.image_tokens}",
        load["image_tokens"] == row.image_tokens,
    )
    yield f"the longest request had {load['longest']} tokens", load["longest"] > 0.99 * row.context - 8
    if result["free"] is None:
        return  # on a CPU there is no GPU memory to judge
    peak, planned, beside = result["peak"], result["planned"], result["beside"]
    yield f"it held {peak / MIB:.0f} MiB, of {planned / MIB:.0f} planned", peak <= planned
    yield (
        f"{planned / MIB:.0f} MiB were planned, over 3 % more than the {peak / MIB:.0f} held",
        planned <= (1 + MAX_UNUSED) * peak,
    )
    yield f"{beside / MIB:.0f} MiB beside weights and KV cache", beside <= MAX_BESIDE_POOLS
    extra = result["peak_until_ready"] - result["ready"]["process"]
    yield f"{extra / MIB:.0f} MiB more while it loaded than when ready", extra <= MAX_WHILE_LOADING
    speed = result["bytes_per_s"]
    yield f"weights were ready at {speed / 1e9:.2f} GB/s", speed >= MIN_BYTES_PER_S


def print_result(result: dict[str, Any]) -> None:
    print(f"\n## {result['name']}: vlfit serve {' '.join(result['serve'])}\n")
    if "ledger" not in result:
        print(result["why"])
        return
    print_table(ledger_table(result["ledger"]))
    starts = ", ".join(f"{seconds:.2f}" for seconds in result["starts_s"])
    print(
        f"\nfree before: {in_mib(result['free'], 1)} MiB; ready after {starts} s; on the card "
        f"{in_mib(result['peak'], 1)} MiB at most, {in_mib(result['ready']['process'], 1)} when ready, "
        f"{in_mib(result['after']['process'], 1)} after; RAM {in_mib(result['peak_resident'], 1)} MiB "
        f"at most, {in_mib(result['peak_anonymous'], 1)} of them no pages of files"
    )
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in result["stages_s"].items())
    print(f"the last start, in seconds: {stages}")
    print(result["load"]["words"])
    for message in result["wrong"]:
        print(f"WRONG: {message}")
    sys.stdout.flush()


def print_summary(results: list[dict[str, Any]]) -> None:
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
                in_mib(result["planned"], 1),
                in_mib(result["peak"], 1),
                ratio,
                in_mib(result["beside"], 1) if result["peak"] else "-",
                f"{result['bytes_per_s'] / 1e9:.2f}",
                f"{len(result['wrong'])} WRONG" if result["wrong"] else "ok",
            ]
        )
    print_table(rows)


if __name__ == "__main__":
    main()

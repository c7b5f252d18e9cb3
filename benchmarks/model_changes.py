"""`vlfit serve` with two models that take turns on a card: seconds to the first token after a change.

    python -m benchmarks.model_changes --json FILE               2B FP8 and 4B FP8 at 7,200 MiB free: minutes
    python -m benchmarks.model_changes --device cpu --rounds 2   the program itself: mini and a copy of it

Weights are random, of the true shapes, in files that RAM holds; a second process occupies the card's memory,
so that what is free is a small card (``gpu_memory.py``). One client asks the models in turn about a picture
that is new each time. The first answer of each model includes loading it; later ones wake it from RAM, and
must have their first token within 2 s (median). Beside it: the same request to the model that is in memory,
the server's own seconds for each change, and memory of the process, which must not exceed the larger model's
plan.

On a CPU both models fit, and weights are read from files again: the other is put to sleep before each
request, and no limit holds. Exit code 1 if a limit is broken or a request fails.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.checkpoints import checkpoint_of, find_checkpoint, ram_folder
from benchmarks.gpu_memory import GpuMeter, memory_holder
from benchmarks.harness import (
    MIB,
    add_json_option,
    argument_parser,
    card,
    commit,
    cpu_name,
    in_mib,
    print_table,
    require_gpu,
    versions_of,
    write_json,
)
from benchmarks.serving import (
    DISCONNECTED,
    ServerProcess,
    chat_body,
    data_url,
    new_client,
    planned_for_process,
    random_jpeg,
    stream_and_disconnect,
)

MODELS = ("4B-fp8", "2B-fp8")  # the larger first: it is loaded at the start
FREE = 7200 * MIB
LIMITS = {True: "--context 6144 --sequences 4", False: "--context 1024 --sequences 2"}  # on a GPU, on a CPU
MAX_FIRST_S = 2.0
SLACK = 64 * MIB  # above the plan: NVML rounds, and counts the context a little differently each time
QUESTION = "What is in this picture?"


@dataclass(frozen=True, slots=True)
class Change:
    """A request to a model: ``kind`` is ``load`` (the first), ``wake`` or ``stay`` (no change).

    ``first_s``: to the first token. ``change_s``: of it, loading or waking alone, by the server; 0 for
    ``stay``. ``held``: bytes of the process on the GPU afterwards; 0 on a CPU. ``ram``: weights that wait in
    RAM.
    """

    model: str
    kind: str
    first_s: float
    change_s: float
    held: int
    ram: int
    planned: int


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs=2, metavar="NAME", help="SIZE-FORMAT, or names of checkpoints")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--free", type=int, default=FREE // MIB, metavar="MIB", help="of the card")
    parser.add_argument("--serve", default="", help="options of vlfit serve, in one argument")
    add_json_option(parser)
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    if on_gpu:
        require_gpu("model_changes (without one: --device cpu)")
    facts: dict[str, Any] = {"commit": commit(), "processor": cpu_name(), **versions_of("torch", "triton")}
    if on_gpu:
        facts["card"] = card()
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="vlfit-changes-", dir=ram_folder()) as folder,
        memory_holder(options) as holder,
    ):
        folders = checkpoints(options, Path(folder), on_gpu=on_gpu)
        free = None if holder is None else holder.leave_free(options.free * MIB)
        arguments = [
            *map(str, folders),
            "--device",
            options.device,
            *(options.serve or LIMITS[on_gpu]).split(),
        ]
        with ServerProcess(arguments, None if holder is None else GpuMeter()) as server:
            changes = list(measure(server, [each.name for each in folders], options))
            result = {
                "serve": arguments[len(folders) :],
                "free": free,
                "ready_s": server.ready_s,
                "peak": server.memory.peak,
                "peak_resident": server.memory.peak_resident,
                "status": server.get("/v1/vlfit/status")["models"],
            }
    print_changes(changes)
    wrong = problems_of(changes, result["peak"], on_gpu=on_gpu)
    rows = [asdict(change) for change in changes]
    write_json(options.json, {"facts": facts, **result, "changes": rows, "wrong": wrong})
    print("\n".join(wrong) or "all within the limits")
    sys.exit(1 if wrong else 0)


def checkpoints(options: argparse.Namespace, folder: Path, *, on_gpu: bool) -> list[Path]:
    """The folders of both models; on a CPU mini and a copy of it, unless others are named."""
    if options.models or on_gpu:
        return [checkpoint_of(name, folder, random=True) for name in options.models or MODELS]
    mini = find_checkpoint("mini")
    copy = folder / "mini-copy"
    shutil.copytree(mini, copy)
    shutil.copytree(mini, folder / "mini-first")
    return [folder / "mini-first", copy]


def measure(server: ServerProcess, names: list[str], options: argparse.Namespace) -> Iterator[Change]:
    """Ask the models in turn, ``options.rounds`` times, and each a second time while it is in memory."""
    number = 0
    with new_client() as client:
        for round_number in range(options.rounds + 1):
            for name in names:
                if options.device == "cpu":
                    sleep_others(client, server, names, name)
                for again in (False, True):
                    number += 1
                    yield ask(
                        client, server, name, number, "stay" if again else "wake" if round_number else "load"
                    )


def sleep_others(client: httpx.Client, server: ServerProcess, names: list[str], name: str) -> None:
    for other in (name, *names):  # the one to be asked, too: the first is in memory from the start
        client.post(f"{server.url}/v1/vlfit/sleep", json={"model": other}).raise_for_status()


def ask(client: httpx.Client, server: ServerProcess, name: str, number: int, kind: str) -> Change:
    before = server.get("/v1/vlfit/status")["model_changes"]["count"]
    picture = data_url(random_jpeg(640, 480, number))
    body = chat_body(
        QUESTION,
        [picture],
        model=name,
        max_tokens=16,
        temperature=0,
        stream=True,
        logprobs=True,
        ignore_eos=True,
    )
    reply = stream_and_disconnect(client, server.url, body, 1)
    if reply.ended != DISCONNECTED:
        sys.exit(f"{name}: {reply.status} {reply.ended}: {reply.message}")
    held = server.gpu_bytes()
    status = fresh_status(server)
    changes = status["model_changes"]
    changed = changes["count"] > before
    kind = kind if changed else "stay"
    ram = sum(row["ram"] for row in status["models"])
    planned = planned_for_process(status) if held else 0
    return Change(name, kind, reply.first_s, changes["last_s"] if changed else 0.0, held, ram, planned)


def fresh_status(server: ServerProcess) -> dict[str, Any]:
    """The status, which the server keeps for 0.2 s, as it is after a request."""
    time.sleep(0.25)
    return server.get("/v1/vlfit/status")


def print_changes(changes: list[Change]) -> None:
    head = [
        "model",
        "kind",
        "first token s",
        "of it change s",
        "on the GPU MiB",
        "planned MiB",
        "waits in RAM MiB",
    ]
    rows = [
        [
            change.model,
            change.kind,
            f"{change.first_s:.3f}",
            f"{change.change_s:.3f}",
            in_mib(change.held),
            in_mib(change.planned),
            in_mib(change.ram),
        ]
        for change in changes
    ]
    print_table([head, *rows])
    for kind in ("load", "wake", "stay"):
        times = [change.first_s for change in changes if change.kind == kind]
        if times:
            print(f"{kind}: median {median(times):.3f} s, most {max(times):.3f} s of {len(times)}")


def problems_of(changes: list[Change], peak: int, *, on_gpu: bool) -> list[str]:
    """What breaks a limit; on a CPU only that nothing was measured."""
    problems = []
    for model in dict.fromkeys(change.model for change in changes):
        times = [change.first_s for change in changes if (change.model, change.kind) == (model, "wake")]
        if not times:
            problems.append(f"{model} was never woken")
        elif on_gpu and median(times) > MAX_FIRST_S:
            problems.append(
                f"{model}: median {median(times):.2f} s to the first token, the limit is {MAX_FIRST_S}"
            )
    planned = max((change.planned for change in changes), default=0)
    if on_gpu and peak > planned + SLACK:
        problems.append(f"{in_mib(peak)} MiB at most on the GPU, {in_mib(planned)} MiB are planned")
    return problems


if __name__ == "__main__":
    main()

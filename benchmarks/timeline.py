"""The kernels of a decode step and of a first token on this GPU, by torch's profiler, and their time.

    python -m benchmarks.timeline 4B-int4 8B-int4-E8-H8-V8
    python -m benchmarks.timeline --at-once 8 4B-int4
    python -m benchmarks.small_card --multiprocessors 30 timeline 4B-int4

Requests with a picture of 1024x768; weights are zeros of the true shapes. Kernels overlap where one waits for
the one before, so a kernel's time is from the end of the one before to its own. Times of a step are medians
over steps. The profiler itself makes a step a few microseconds longer: compare shares, not steps.

A first token's kernels are those of one request from its first kernel to its first token, the picture's and
the prompt's; a second table has those of a prompt of as many tokens of text alone.
"""

import argparse
import json
import queue
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoints import checkpoint_of
from benchmarks.harness import (
    add_json_option,
    argument_parser,
    card,
    commit,
    print_row,
    require_gpu,
    run_worker,
    write_json,
)
from benchmarks.sizes import ALL

if TYPE_CHECKING:
    from vlfit.backends.native import NativeBackend

TOKENS = 24
WAITING = "(no kernel)"
_STEP_END = "advance_decode_inputs"  # the last kernel of a step
_FILLER = 100  # any ordinary token
_LONGEST, _NAME = 24, 100  # rows of a table of a first token, characters of a kernel's name
_TIMEOUT_SECONDS = 300.0
_WORKER = "--worker"


@dataclass(frozen=True, slots=True)
class KernelShare:
    """All launches of a kernel in a step, and their microseconds."""

    name: str
    launches: int
    microseconds: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that ran: its name, and when it began and ended in microseconds."""

    name: str
    begin: float
    end: float


def main() -> None:
    options = read_options()
    if options.worker:
        profile(Path(options.worker), options.at_once)
        return
    require_gpu("timeline")
    print(f"commit {commit()}; {card()}")
    runs, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        for name in options.checkpoints:
            path = checkpoint_of(name, Path(folder))
            try:
                worker = (_WORKER, str(path), "--at-once", str(options.at_once))
                found = run_worker("benchmarks.timeline", *worker, timeout=_TIMEOUT_SECONDS)
            except RuntimeError as error:  # the others are measured all the same
                print(error, file=sys.stderr)
                failed = True
                continue
            runs.append({"checkpoint": name, **found})
            print_run(name, found)
    write_json(options.json, {"commit": commit(), "card": card(), "runs": runs})
    sys.exit(1 if failed else 0)


def read_options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", default=ALL, metavar="SIZE-FORMAT")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="requests that decode together")
    parser.add_argument(_WORKER, metavar="PATH", help=argparse.SUPPRESS)
    add_json_option(parser)
    return parser.parse_args()


def profile(path: Path, at_once: int) -> None:
    """Load the checkpoint, answer requests under the profiler, and print what ran as JSON."""
    import torch

    from vlfit.api.sampling_params import SamplingParams
    from vlfit.backends.native import NativeBackend
    from vlfit.bench.measure import run_requests
    from vlfit.bench.workload import BenchOptions, make_requests
    from vlfit.checkpoint.source import open_checkpoint
    from vlfit.tuning.bandwidth import measure_memory_bandwidth
    from vlfit.tuning.timing import step_bytes

    checkpoint = open_checkpoint(path)
    tokens = TOKENS * at_once  # all decode together for a while, though prompts come one after the other
    options = BenchOptions(tokens=tokens, batches=(at_once,), device="cuda")
    requests = make_requests(checkpoint, options, at_once)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with NativeBackend.load(checkpoint, requests.engine_options(options), None) as backend:
        together = kernels_of(lambda: run_requests(backend, requests.conversations, sampling))
        alone = kernels_of(lambda: run_requests(backend, requests.conversations[:1], sampling))
        prompt = kernels_of(lambda: continue_text(backend, requests.prompt_tokens))
        counted = step_bytes(backend.engine)
        read = 0.0 if counted is None else counted.total(requests.prompt_tokens + tokens / 2)
    steps = split_steps(together)
    decoding = split_steps(alone)  # each with the last kernel before it
    before = alone[: alone.index(decoding[0][0]) + 1]
    result = {
        "step_us": statistics.median(step[-1].end - step[0].end for step in steps),
        "kernels": [asdict(share) for share in shares(steps)],
        "layer": layer_of(steps),
        "read_bytes": read,
        "read_bytes_per_second": measure_memory_bandwidth(torch.device("cuda", 0)),
        "first_token": [asdict(share) for share in sums(before)],
        "first_token_us": before[-1].end - before[0].begin,
        "prompt": [asdict(share) for share in sums(prompt)],
        "prompt_us": prompt[-1].end - prompt[0].begin,
    }
    print(json.dumps(result))


def continue_text(backend: "NativeBackend", tokens: int) -> None:
    """Wait for one token behind a prompt of as many ``tokens`` of text. Raises the request's error."""
    from vlfit.api.sampling_params import SamplingParams

    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
    backend.start(backend.prepare_text((_FILLER,) * tokens, sampling), sampling, arrivals.put)
    while not getattr(arrival := arrivals.get(), "finish_reason", None):
        if isinstance(arrival, Exception):
            raise arrival


def kernels_of(call: Callable[[], object]) -> list[Kernel]:
    """The kernels that ``call`` runs, in order of their ends, the fourth time that it is called."""
    import torch
    from torch._C._autograd import DeviceType

    for _ in range(3):  # a prompt is captured when its length comes again
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    ran = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return sorted(ran, key=lambda kernel: kernel.end)


def split_steps(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The longest run of equal decode steps in ``kernels``, in order; each step with the last kernel before.

    Of several requests those steps that all of them share. Raises ``RuntimeError`` for
    fewer than three.
    """
    names = [kernel.name for kernel in kernels]
    ends = [index + 1 for index, name in enumerate(names) if _STEP_END in name]
    runs: list[tuple[int, int, int]] = []  # equal steps, the begin of the first, kernels of each
    for begin, end in pairwise(ends):
        length = end - begin
        if not runs or runs[-1][2] != length or names[begin - length : begin] != names[begin:end]:
            follows = begin > length and names[begin - length : begin] == names[begin:end]  # after a prompt
            runs.append((int(follows), begin - length * follows, length))
        runs[-1] = runs[-1][0] + 1, runs[-1][1], length
    count, begin, length = max(runs, default=(0, 0, 0))
    if count < 3:
        raise RuntimeError("the profiler saw no three equal steps")
    return [list(kernels[at - 1 : at + length]) for at in range(begin, begin + count * length, length)]


def shares(steps: Sequence[Sequence[Kernel]]) -> list[KernelShare]:
    """Each kernel's part of a step, the longest first."""
    times: dict[str, list[float]] = {}
    for index in range(1, len(steps[0])):
        each = statistics.median(step[index].end - step[index - 1].end for step in steps)
        times.setdefault(steps[0][index].name, []).append(each)
    found = [KernelShare(name, len(each), sum(each)) for name, each in times.items()]
    return sorted(found, key=lambda share: -share.microseconds)


def sums(kernels: Sequence[Kernel]) -> list[KernelShare]:
    """Each kernel's part of ``kernels``, which ran once, the longest first; what the card waits is a part."""
    times: dict[str, list[float]] = {}
    ends = kernels[0].begin
    for kernel in kernels:
        times.setdefault(WAITING, []).append(max(kernel.begin - ends, 0.0))
        times.setdefault(kernel.name, []).append(kernel.end - max(kernel.begin, ends))
        ends = kernel.end
    found = [KernelShare(name, len(each), sum(each)) for name, each in times.items()]
    return sorted(found, key=lambda share: -share.microseconds)


def layer_of(steps: Sequence[Sequence[Kernel]]) -> list[tuple[str, float]]:
    """The kernels of a layer in the middle of the model, in order, with their microseconds.

    From one attention to the next: the product of q, k and v is the next layer's.
    """
    names = [kernel.name for kernel in steps[0]]
    attention = [index for index, name in enumerate(names) if "decode_kernel" in name]
    if len(attention) < 3:
        return []
    middle = len(attention) // 2
    return [
        (names[index], statistics.median(step[index].end - step[index - 1].end for step in steps))
        for index in range(attention[middle], attention[middle + 1])
    ]


def print_run(name: str, found: dict[str, Any]) -> None:
    """A table of one checkpoint."""
    least = found["read_bytes"] / found["read_bytes_per_second"] * 1e6
    print(f"\n{name}: {found['step_us']:,.0f} us a step; reading its bytes takes {least:,.0f}")
    print_row(["kernel", "launches", "us", "share"])
    print_row(["---"] * 4)
    for share in found["kernels"]:
        part = share["microseconds"] / found["step_us"]
        print_row([share["name"], str(share["launches"]), f"{share['microseconds']:,.1f}", f"{part:.1%}"])
    print("one layer: " + ", ".join(f"{kernel} {time:.1f}" for kernel, time in found["layer"]))
    for part in ("first_token", "prompt"):
        print(f"\n{name}, {part.replace('_', ' ')}: {found[f'{part}_us'] / 1e3:,.2f} ms on the card")
        print_row(["kernel", "launches", "ms"])
        print_row(["---"] * 3)
        for share in found[part][:_LONGEST]:
            print_row([share["name"][:_NAME], str(share["launches"]), f"{share['microseconds'] / 1e3:.2f}"])


if __name__ == "__main__":
    main()

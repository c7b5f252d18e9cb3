"""The kernels of linear attention (gated delta rule) on this GPU, at the shapes of Qwen3.5.

    python -m benchmarks.recurrent --json FILE           about two minutes
    python -m benchmarks.recurrent --only 4B --sweep     candidates for the tile sizes
    python -m benchmarks.recurrent --tiny                on a CPU too: sees that everything runs; no speeds

A decoding step reads and writes each sequence's state once, and its time is compared with reading as many
bytes (``tuning/bandwidth.py``'s kernel, at its best in the same run). Prompts are compared by TFLOP/s,
counting the products of 64-token chunks. Launches are not included: calls are captured in one CUDA graph,
over as many states as no cache holds. The kernels within a prompt's call are timed by torch's profiler.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import (
    add_json_option,
    argument_parser,
    card,
    commit,
    print_table,
    require_gpu,
    write_json,
)
from vlfit.kernels.recurrent.delta_rule import (
    DeltaRows,
    DeltaState,
    DeltaWeights,
    OutputGate,
    StateTiles,
    gated_delta_chunks,
    gated_delta_steps,
    gated_rms_norm,
)
from vlfit.kernels.rows.row_ops import gate_rows
from vlfit.models.cache_spec import MAX_PENDING_TOKENS

KERNEL, ROOM = 4, MAX_PENDING_TOKENS
BEYOND_CACHES = 384 * 1024**2
STEP_TILES = [StateTiles(values, warps) for values in (8, 16, 32, 64) for warps in (1, 2, 4, 8)]
SCAN_TILES = [
    StateTiles(values, warps, stages)
    for values in (16, 32, 64, 128)
    for warps in (4, 8)
    for stages in (1, 2, 3)
]


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer; heads of attention for the output gate."""

    key_heads: int
    value_heads: int
    dim: int = 128
    attention_heads: int = 8

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.dim


SHAPES = {
    "0.8B": Shape(16, 16),
    "2B": Shape(16, 16),
    "4B": Shape(16, 32, attention_heads=16),
    "9B": Shape(16, 32, attention_heads=16),
}


@dataclass(frozen=True)
class Result:
    """One kernel, or all of a call, timed. ``bytes`` that must be read or written, ``flops``, seconds."""

    what: str
    size: str
    sequences: int
    tokens: int
    tiles: str
    bytes: int
    flops: float
    seconds: float


@dataclass(frozen=True)
class Work:
    """Inputs of one layer, for calls one after another with states that no cache holds."""

    shape: Shape
    rows: DeltaRows
    weights: DeltaWeights
    states: list[DeltaState]
    spans: Tensor
    gate: OutputGate
    longest: int

    @property
    def sequences(self) -> int:
        return len(self.spans)


def main() -> None:
    parser = argument_parser(__doc__)
    add_json_option(parser)
    parser.add_argument("--only", choices=SHAPES, help="only the layers of this size")
    parser.add_argument("--sweep", action="store_true", help="measure candidates for tile sizes")
    parser.add_argument("--tiny", action="store_true", help="one small layer, and no speeds")
    options = parser.parse_args()
    if options.tiny:
        run_tiny()
        return
    require_gpu("recurrent")
    with torch.inference_mode():
        read = read_bandwidth()
        print(f"commit {commit()}; {card()}; torch {torch.__version__}; reads at {read / 1e9:.0f} GB/s")
        sizes = [options.only] if options.only else ["0.8B", "4B"] if options.sweep else list(SHAPES)
        results = []
        for size in sizes:
            measured = sweep(size) if options.sweep else measure(size)
            results += list(measured)
        print_results(results, read)
    facts = {"commit": commit(), "card": card(), "torch": torch.__version__, "read_bytes_per_s": read}
    write_json(options.json, {**facts, "results": [asdict(result) for result in results]})


def measure(size: str) -> Iterator[Result]:
    """Decoding, verifying drafts, prompts, and the row kernels, with the engine's tiles."""
    shape = SHAPES[size]
    for sequences in (1, 8):
        yield steps(size, shape, sequences, 1, 0)
        yield steps(size, shape, sequences, 1, ROOM)
        yield steps(size, shape, sequences, ROOM, ROOM, verify=True)
        for tokens in (787, 8000):
            yield from prompt(size, shape, sequences, tokens)
        yield from row_kernels(size, shape, sequences)


def steps(
    size: str,
    shape: Shape,
    sequences: int,
    tokens: int,
    room: int,
    *,
    verify: bool = False,
    tiles: StateTiles | None = None,
) -> Result:
    """``tokens`` of each sequence; after drafts, of which half are accepted, if there is ``room`` for any."""
    work = make_work(shape, sequences, tokens, room, pending=room // 2)
    calls = [
        partial(
            gated_delta_steps,
            work.rows,
            work.weights,
            state,
            work.spans,
            max_length=tokens,
            commit=not verify,
            gate=work.gate,
            tiles=tiles,
        )
        for state in work.states
    ]
    what = "verify" if verify else "decode after drafts" if room else "decode"
    size_of_state = 2 * sequences * state_bytes(shape)
    return Result(what, size, sequences, tokens, named(tiles), size_of_state, 0.0, seconds_of(calls))


def prompt(
    size: str, shape: Shape, sequences: int, tokens: int, tiles: StateTiles | None = None
) -> Iterator[Result]:
    """New sequences of ``tokens`` each: all launches of a layer together, then each kernel of them."""
    work = make_work(shape, sequences, tokens, 0, is_new=1)
    call = partial(
        gated_delta_chunks,
        work.rows,
        work.weights,
        work.states[0],
        work.spans,
        max_length=tokens,
        gate=work.gate,
        tiles=tiles,
    )
    rows, chunk = sequences * tokens, 64
    # Keys and queries with keys, two merges and the solved system; keys, queries, keys again with the state.
    products = 2 * chunk * shape.dim + 2 * chunk * shape.dim + 3 * shape.dim * shape.dim
    flops = 2.0 * rows * shape.value_heads * products
    moved = rows * 2 * (2 * shape.channels + 2 * shape.value_heads * shape.dim)
    yield Result("prompt", size, sequences, tokens, named(tiles), moved, flops, seconds_of([call] * 2))
    if tiles is None:
        for kernel, seconds in kernel_seconds(call).items():
            yield Result(f"  {kernel}", size, sequences, tokens, "", 0, 0.0, seconds)


def row_kernels(size: str, shape: Shape, sequences: int) -> Iterator[Result]:
    """The gated norm and the output gate by themselves, for one row of each sequence."""
    work = make_work(shape, sequences, 1, 0)
    x = random_half(work.spans.device, sequences, shape.value_heads, shape.dim)
    norm = partial(gated_rms_norm, x, work.gate.z, work.gate.weight, 1e-6)
    yield Result("gated norm", size, sequences, 1, "", 3 * x.nbytes, 0.0, seconds_of([norm] * 50))
    doubled = random_half(work.spans.device, sequences, shape.attention_heads, 2 * 256)
    attended = random_half(work.spans.device, sequences, shape.attention_heads * 256)
    gate = partial(gate_rows, attended, doubled[:, :, 256:])
    yield Result("output gate", size, sequences, 1, "", 3 * attended.nbytes, 0.0, seconds_of([gate] * 50))


def sweep(size: str) -> Iterator[Result]:
    """Every candidate for the tiles of states; those that need more than the card has are left out."""
    shape = SHAPES[size]
    for sequences in (1, 8):
        for tiles in STEP_TILES:
            with suppress(Exception):  # too much shared memory, or too many registers
                yield steps(size, shape, sequences, 1, 0, tiles=tiles)
            with suppress(Exception):
                yield steps(size, shape, sequences, ROOM, ROOM, verify=True, tiles=tiles)
    for tokens in (787, 8000):
        for tiles in SCAN_TILES:
            with suppress(Exception):
                yield from prompt(size, shape, 1, tokens, tiles)


# --- inputs ------------------------------------------------------------------------------------------------


def make_work(
    shape: Shape, sequences: int, tokens: int, room: int, *, pending: int = 0, is_new: int = 0
) -> Work:
    """Random inputs on the GPU, or on the CPU where Triton interprets."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, values = sequences * tokens, shape.value_heads * shape.dim
    inputs = DeltaRows(
        random_half(device, rows, shape.channels),
        random_half(device, rows, shape.value_heads),
        random_half(device, rows, shape.value_heads),
    )
    random = partial(torch.randn, device=device)
    weights = DeltaWeights(
        random(shape.channels, KERNEL), random(shape.value_heads), random(shape.value_heads)
    )
    copies = 1 if is_new else max(1, min(64, -(-BEYOND_CACHES // (sequences * state_bytes(shape)))))
    copies = copies if device.type == "cuda" else 1
    states = [
        DeltaState(
            random(sequences, shape.channels, KERNEL - 1),
            random(sequences, shape.value_heads, shape.dim, shape.dim),
            random(sequences, room, shape.channels),
            -random(sequences, room, shape.value_heads).abs(),
            random(sequences, room, shape.value_heads).sigmoid(),
        )
        for _ in range(copies)
    ]
    spans = [(index * tokens, tokens, index, is_new, pending) for index in range(sequences)]
    gate = OutputGate(random_half(device, rows, values), random(shape.dim), 1e-6)
    table = torch.tensor(spans, dtype=torch.int32, device=device)
    return Work(shape, inputs, weights, states, table, gate, tokens)


def random_half(device: torch.device, *shape: int) -> Tensor:
    """In bfloat16 on a GPU; Triton's interpreter cannot multiply that."""
    return torch.randn(shape, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float16)


def state_bytes(shape: Shape) -> int:
    """Bytes of a sequence's state in one layer."""
    return 4 * (shape.value_heads * shape.dim * shape.dim + shape.channels * (KERNEL - 1))


def named(tiles: StateTiles | None) -> str:
    return f"{tiles.values} x {tiles.warps}, {tiles.stages}" if tiles else "-"


# --- timing ------------------------------------------------------------------------------------------------


def seconds_of(calls: Sequence[Callable[[], Tensor]]) -> float:
    """As ``benchmarks.kernels`` times; 0 on a CPU, where each is only called."""
    if torch.cuda.is_available():
        from benchmarks import kernels

        return kernels.seconds_of(calls)
    for call in calls[:1]:
        if not torch.isfinite(call()).all():
            raise RuntimeError("a kernel's output is not finite")
    return 0.0


def kernel_seconds(call: Callable[[], Tensor], repeats: int = 5) -> dict[str, float]:
    """Seconds of each kernel in ``call``, by torch's profiler, once compiled."""
    if not torch.cuda.is_available():
        return {}
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    times = {event.key: event.device_time_total / repeats / 1e6 for event in profile.key_averages()}
    return {name: seconds for name, seconds in times.items() if name.endswith("_kernel")}


def read_bandwidth() -> float:
    """Bytes per second of the read kernel, the best of its blocks and some runs."""
    from benchmarks import kernels
    from vlfit.tuning.bandwidth import launch_read_kernel

    words = torch.ones(256 * 1024**2, dtype=torch.int32, device="cuda")
    sums = torch.empty(len(words) // 2048, dtype=torch.int32, device="cuda")

    def read(block: int) -> Tensor:
        launch_read_kernel(words, sums, block)
        return sums

    return words.nbytes / min(kernels.seconds_of([partial(read, block)] * 4) for block in (2048, 4096))


# --- output ------------------------------------------------------------------------------------------------


def print_results(results: list[Result], read: float) -> None:
    """One row a result; ``of reading``: the time that reading its bytes would take, over its own."""
    rows = [["what", "of", "sequences", "tokens", "tile", "ms", "GB/s", "of reading", "TFLOP/s"]]
    for each in results:
        speed = each.bytes / each.seconds if each.seconds else 0.0
        rows.append(
            [
                each.what,
                each.size,
                str(each.sequences),
                str(each.tokens),
                each.tiles,
                f"{each.seconds * 1e3:.4f}",
                f"{speed / 1e9:.0f}" if speed else "-",
                f"{speed / read:.0%}" if speed else "-",
                f"{each.flops / each.seconds / 1e12:.1f}" if each.flops and each.seconds else "-",
            ]
        )
    print_table(rows)


def run_tiny() -> None:
    """Everything once, with heads of 16; interpreted where there is no GPU."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    shape = Shape(1, 2, dim=16, attention_heads=1)
    with torch.inference_mode():
        results = [
            steps("tiny", shape, 2, 1, 0),
            steps("tiny", shape, 2, 1, ROOM),
            steps("tiny", shape, 2, ROOM, ROOM, verify=True),
            *prompt("tiny", shape, 2, 70),
            *row_kernels("tiny", shape, 2),
        ]
    print_results(results, 1.0)


if __name__ == "__main__":
    main()

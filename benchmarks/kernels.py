"""vlfit's Triton kernels on this GPU, at the true shapes of Qwen3-VL, against torch's in bf16 in the same
run.

    python -m benchmarks.kernels --json FILE       about two minutes
    python -m benchmarks.kernels --only 4B --rows 1 --formats "int4 of 32" Q4_0 Q4_K Q6_K Q8_0
    python -m benchmarks.kernels --sweep           candidates for the tables of tile sizes, 32 and 128 rows;
                                                   benchmarks.decode_step sweeps those of up to 16

GB/s are bytes that must be read (weights and scales, or keys and values) over time, beside the speed at which
this GPU copies memory, measured in the same run. Launches are not included: calls are captured in one CUDA
graph.
"""

import contextlib
import io
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
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
from vlfit.checkpoint.gguf.stored_blocks import EXACT_FORMS
from vlfit.checkpoint.quantization import packed_words
from vlfit.kernels.attention.paged import BlockAttentionMetadata, block_attention
from vlfit.kernels.gemm.quantized import quantized_linear
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.kernels.rows.row_ops import PackedQKV
from vlfit.loading.readers import TORCH_DTYPES
from vlfit.plan.native.tiles import GemmTiles

ROWS = (1, 8, 256, 512, 1024)
HEADS = {"2B": 16, "4B": 32, "8B": 32}
KEY_HEADS, HEAD_DIM, BLOCK = 8, 128, 16
FORMATS = ("fp8", "int8", "int4 of 32", "int4 of 128")
# GGUF's block types whose products are timed. They are loaded as ``EXACT_FORMS`` says.
BLOCK_TYPES = (
    *("Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_0", "Q5_K", "Q6_K"),
    *("IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"),
)
# Outputs and inputs of the matrices of a layer; those that share an input are one. Then the output heads.
LAYERS = {
    "2B": {"qkv": (4096, 2048), "o": (2048, 2048), "gate_up": (12288, 2048), "down": (2048, 6144)},
    "4B": {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)},
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    "4B's head": {"head": (151936, 2560)},
    "8B's head": {"head": (151936, 4096)},
}
BEYOND_CACHES = 384 * 1024**2  # bytes to read before any is read again: several times any L2
REPLAYS = 12


@dataclass(frozen=True)
class Result:
    """One kernel timed: ``bytes`` that must be read, ``flops``, seconds of it and of torch in bf16."""

    what: str
    size: str
    form: str  # of the weights
    rows: int
    detail: str
    bytes: int
    flops: float
    seconds: float
    torch_bytes: int
    torch_seconds: float


def main() -> None:
    parser = argument_parser(__doc__)
    add_json_option(parser)
    parser.add_argument("--only", choices=LAYERS, help="only the linear layers of this size")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=[*FORMATS, *BLOCK_TYPES])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--sweep", action="store_true", help="measure candidates for the tile tables")
    options = parser.parse_args()
    require_gpu("kernels")
    with torch.inference_mode():
        copy = copy_bandwidth()
        print(f"commit {commit()}; {card()}; torch {torch.__version__}; copies at {copy / 1e9:.0f} GB/s")
        if options.sweep:
            report: dict[str, Any] = {"sweep": sweep(copy)}
        else:
            sizes = [options.only] if options.only else list(LAYERS)
            results = [*linear_results(sizes, options.formats, options.rows)]
            print_linears(results, copy)
            if not options.only:
                others = [*decode_results(), *prefill_results()]
                print_attention(others, copy)
                results += others
            report = {"results": [asdict(result) for result in results]}
    facts = {"commit": commit(), "card": card(), "torch": torch.__version__, "copy_bytes_per_s": copy}
    write_json(options.json, {**facts, **report})


def linear_results(sizes: list[str], formats: Sequence[str], all_rows: Sequence[int]) -> Iterator[Result]:
    """Every matrix of a text layer and output heads, in each format, for each number of rows."""
    for size in sizes:
        for name, (outputs, inputs) in LAYERS[size].items():
            dense = random_dense_weights(outputs, inputs)
            inputs_by_rows = {
                rows: torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda") for rows in all_rows
            }
            by_torch = {
                rows: seconds_of([_call(F.linear, x, each) for each in dense])
                for rows, x in inputs_by_rows.items()
            }
            for weights_format in formats:
                weights = random_quantized_weights(weights_format, outputs, inputs)
                supers = weights[0].super_scale
                read = weights[0].codes.nbytes + weights[0].scale.nbytes
                read += 0 if supers is None else supers.nbytes
                for rows, x in inputs_by_rows.items():
                    seconds = seconds_of([_call(quantized_linear, x, each, None) for each in weights])
                    flops = 2.0 * rows * outputs * inputs
                    both = (seconds, dense[0].nbytes, by_torch[rows])
                    yield Result("linear", size, weights_format, rows, name, read, flops, *both)


def decode_results() -> Iterator[Result]:
    """One new token of each sequence over its context; ours includes RoPE and the write to the KV cache."""
    for size in ("2B", "4B"):
        for sequences in (1, 8):
            for context in (1024, 8192):
                read = 2 * sequences * context * KEY_HEADS * HEAD_DIM * 2
                layers = copies_beyond_caches(read)
                keys, values = _cache(layers, sequences * context)
                fresh = _packed_qkv(sequences, HEADS[size])
                query = fresh.qkv[:, : HEADS[size]]
                plan = _metadata(sequences, context, [(index, 1, context - 1) for index in range(sequences)])
                ours = seconds_of(
                    [_call(block_attention, fresh, keys[i], values[i], plan) for i in range(layers)]
                )
                calls = []
                for i in range(layers):
                    split = (part[i].view(sequences, context, KEY_HEADS, HEAD_DIM) for part in (keys, values))
                    key, value = (part.transpose(1, 2) for part in split)
                    calls.append(_sdpa(query[:, :, None], key, value, causal=False))
                flops = 4.0 * sequences * context * HEADS[size] * HEAD_DIM
                detail = f"context {context}"
                yield Result(
                    "decode", size, "bf16", sequences, detail, read, flops, ours, read, seconds_of(calls)
                )


def prefill_results() -> Iterator[Result]:
    """A chunk of 1024 tokens over its past; without a past also torch's causal flash attention."""
    for size in ("2B", "4B"):
        for past in (0, 3072, 7168):
            tokens, context = 1024, 1024 + past
            keys, values = _cache(4, context)
            fresh = _packed_qkv(tokens, HEADS[size])
            query = fresh.qkv[:, : HEADS[size]]
            plan = _metadata(1, context, [(0, tokens, past)])
            ours = seconds_of([_call(block_attention, fresh, keys[i], values[i], plan) for i in range(4)])
            by_torch = 0.0
            if not past:
                key, value = (part[0].transpose(0, 1)[None] for part in (keys, values))
                by_torch = seconds_of([_sdpa(query.transpose(0, 1)[None], key, value, causal=True)] * 4)
            pairs = tokens * past + tokens * (tokens + 1) / 2
            read = 2 * context * KEY_HEADS * HEAD_DIM * 2
            flops = 4.0 * pairs * HEADS[size] * HEAD_DIM
            yield Result("prefill", size, "bf16", tokens, f"past {past}", read, flops, ours, read, by_torch)


def _cache(layers: int, tokens: int) -> tuple[Tensor, Tensor]:
    shape = (layers, tokens, KEY_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return keys, values


def _metadata(sequences: int, context: int, spans: list[tuple[int, int, int]]) -> BlockAttentionMetadata:
    """Metadata with blocks in the order of tokens, so that torch can read the same keys and values."""
    table = torch.arange(sequences * context // BLOCK, dtype=torch.int32, device="cuda").view(sequences, -1)
    decoding = sum(tokens == 1 for _, tokens, _ in spans)
    longest = max(tokens if tokens > 1 else 0 for _, tokens, _ in spans)
    numbers = torch.tensor(spans, dtype=torch.int32, device="cuda")
    begins = [index * context + past for index, (_, _, past) in enumerate(spans)]
    ranges = [torch.arange(begin, begin + span[1]) for begin, span in zip(begins, spans, strict=True)]
    return BlockAttentionMetadata(torch.cat(ranges).cuda(), table, numbers, BLOCK, decoding, longest)


def _packed_qkv(rows: int, heads: int) -> PackedQKV:
    """Queries, keys and values of ``rows`` tokens, with norm weights, cosines and sines."""
    joined = torch.randn(rows, heads + 2 * KEY_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(heads + KEY_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    cosines, sines = torch.randn(2, rows, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    return PackedQKV(joined, weight, cosines, sines, 1e-6)


def _call(function: Callable[..., Tensor], *arguments: Any) -> Callable[[], Tensor]:
    return lambda: function(*arguments)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Callable[[], Tensor]:
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)


def print_linears(results: list[Result], copy: float) -> None:
    """A row for all matrices of a layer together."""
    heading = [
        "layer",
        "rows",
        "format",
        "us",
        "GB/s",
        "of copying",
        "TFLOP/s",
        "bf16 us",
        "bf16 GB/s",
        "times",
    ]
    rows = [heading]
    for size in dict.fromkeys(each.size for each in results):
        for count in dict.fromkeys(each.rows for each in results if each.size == size):
            for weights_format in dict.fromkeys(each.form for each in results if each.size == size):
                some = [
                    each
                    for each in results
                    if (each.size, each.rows, each.form) == (size, count, weights_format)
                ]
                seconds, by_torch = sum(r.seconds for r in some), sum(r.torch_seconds for r in some)
                speed = sum(r.bytes for r in some) / seconds
                torch_speed = sum(r.torch_bytes for r in some) / by_torch
                flops = sum(r.flops for r in some) / seconds / 1e12
                rows.append(
                    [
                        size,
                        str(count),
                        weights_format,
                        f"{seconds * 1e6:.1f}",
                        f"{speed / 1e9:.0f}",
                        f"{speed / copy:.0%}",
                        f"{flops:.1f}",
                        f"{by_torch * 1e6:.1f}",
                        f"{torch_speed / 1e9:.0f}",
                        f"{by_torch / seconds:.2f}",
                    ]
                )
    print("\n## Linear layers of one text layer (qkv, o, gate and up, down), and output heads\n")
    print_table(rows)


def print_attention(results: list[Result], copy: float) -> None:
    rows = [["attention", "of", "rows", "over", "us", "GB/s", "of copying", "TFLOP/s", "torch us"]]
    for each in results:
        speed = each.bytes / each.seconds
        by_torch = f"{each.torch_seconds * 1e6:.1f}" if each.torch_seconds else "-"
        rows.append(
            [
                each.what,
                each.size,
                str(each.rows),
                each.detail,
                f"{each.seconds * 1e6:.1f}",
                f"{speed / 1e9:.0f}",
                f"{speed / copy:.0%}",
                f"{each.flops / each.seconds / 1e12:.1f}",
                by_torch,
            ]
        )
    print("\n## Attention of one layer\n")
    print_table(rows)


# --- timing ------------------------------------------------------------------------------------------------


def seconds_of(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Seconds of one of ``calls``, captured one after another in one CUDA graph; median of replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        seconds = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(seconds)) / len(calls)


def copies_beyond_caches(size: int) -> int:
    """How many tensors of ``size`` bytes, read in turn, no cache holds."""
    return max(1, min(64, -(-BEYOND_CACHES // size)))


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.ones(1024**3, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of([lambda: target.copy_(source)] * 4)


# --- weights -----------------------------------------------------------------------------------------------


def random_quantized_weights(weights_format: str, outputs: int, inputs: int) -> list[QuantizedWeight]:
    if weights_format == "fp8":
        count = copies_beyond_caches(outputs * inputs)
        codes = torch.randint(0, 256, (count, outputs, inputs), dtype=torch.uint8, device="cuda")
        codes &= 0xF7  # no NaN
        scale = torch.rand(count, -(-outputs // 128), -(-inputs // 128), device="cuda")
        return [
            QuantizedWeight(codes[i].view(torch.float8_e4m3fn), scale[i], None, (128, 128))
            for i in range(count)
        ]
    if weights_format == "int8":
        count = copies_beyond_caches(outputs * inputs)
        signed = torch.randint(-128, 128, (count, outputs, inputs), dtype=torch.int8, device="cuda")
        scale = torch.rand(count, outputs, 1, dtype=torch.bfloat16, device="cuda")
        return [QuantizedWeight(signed[i], scale[i], None, (1, inputs)) for i in range(count)]
    if weights_format in BLOCK_TYPES:
        return random_block_weights(weights_format, outputs, inputs)
    group = int(weights_format.split()[-1])
    count = copies_beyond_caches(outputs * inputs // 2)
    words = torch.randint(-(2**31), 2**31, (count, outputs, inputs // 8), device="cuda", dtype=torch.int32)
    scale = torch.rand(count, outputs, inputs // group, dtype=torch.bfloat16, device="cuda")
    return [QuantizedWeight(words[i], scale[i], None, (1, group)) for i in range(count)]


def random_block_weights(block_type: str, outputs: int, inputs: int) -> list[QuantizedWeight]:
    form = EXACT_FORMS[block_type]
    count = copies_beyond_caches(outputs * inputs * form.bits // 8)
    if form.bits < 8:
        shape = (count, outputs, packed_words(inputs, form.bits))
        codes = torch.randint(-(2**31), 2**31, shape, device="cuda", dtype=torch.int32)
    else:
        codes = torch.randint(-128, 128, (count, outputs, inputs), device="cuda", dtype=torch.int8)
    shape = (count, outputs, inputs // form.group)
    supers: Tensor | None = None
    if form.super_group is None:
        scale = torch.rand(shape, device="cuda").to(TORCH_DTYPES[form.scale_dtype])
    else:
        supers = torch.rand(count, outputs, inputs // form.super_group, device="cuda").half()
        if form.scale_dtype == "I16":
            scale = torch.randint(-(2**15), 2**15, shape, device="cuda", dtype=torch.int16)
            supers = torch.stack((supers, supers), dim=3).view(torch.int32).squeeze(3)
        else:
            scale = torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8)
    return [
        QuantizedWeight(
            codes[i],
            scale[i],
            None,
            (1, form.group),
            None if supers is None else supers[i],
            form.bits,
            form.codebook,
        )
        for i in range(count)
    ]


def zero_quantized_weights(
    weights_format: str, outputs: int, inputs: int, count: int, device: torch.device
) -> list[QuantizedWeight]:
    """As many matrices of zeros: ``fp8`` in blocks of 128 by 128, or ``int4 of`` so many inputs."""
    if weights_format == "fp8":
        codes = torch.zeros(count, outputs, inputs, dtype=torch.uint8, device=device)
        codes = codes.view(torch.float8_e4m3fn)
        scale = torch.ones(count, outputs // 128, inputs // 128, device=device)
        block = (128, 128)
    else:
        group = int(weights_format.split()[-1])
        codes = torch.zeros(count, outputs, inputs // 8, dtype=torch.int32, device=device)
        scale = torch.ones(count, outputs, inputs // group, dtype=torch.bfloat16, device=device)
        block = (1, group)
    return [QuantizedWeight(codes[i], scale[i], None, block) for i in range(count)]


def random_dense_weights(outputs: int, inputs: int) -> list[Tensor]:
    count = copies_beyond_caches(2 * outputs * inputs)
    weights = torch.randn(count, outputs, inputs, dtype=torch.bfloat16, device="cuda")
    return list(weights.unbind(0))


# --- candidates for the tables of tile sizes ---------------------------------------------------------------

SWEEP_SIZE, SWEEP_FORMATS = "4B", ("fp8", "int4 of 32")
COMPILERS = 12  # processes
BEST = 6  # printed of each


@dataclass(frozen=True)
class Candidate:
    """Tiles to try. ``splits`` None: the engine's choice."""

    form: str  # of the weights
    rows: int
    tiles: GemmTiles
    splits: int | None = None

    def multiply(self, x: Tensor, weights: QuantizedWeight) -> Tensor:
        """``x`` @ ``weights``.T with these tiles."""
        return quantized_linear(x, weights, None, self.tiles, self.splits)

    @property
    def tile(self) -> str:
        """Rows, outputs and inputs of a program."""
        return f"{self.tiles.rows} x {self.tiles.outputs} x {self.tiles.inputs}"


def candidates() -> list[Candidate]:
    tried = []
    for weights_format in SWEEP_FORMATS:
        for rows, tiles in ((32, CANDIDATES_32_ROWS), (128, CANDIDATES_128_ROWS)):
            for outputs, inputs, warps, stages in tiles:
                tried.append(Candidate(weights_format, rows, GemmTiles(rows, outputs, inputs, warps, stages)))
    return tried


CANDIDATES_32_ROWS = ((64, 128, 4, 3), (64, 64, 4, 4), (32, 128, 4, 3))
CANDIDATES_128_ROWS = ((64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 2))


def sweep(copy: float) -> list[dict[str, Any]]:
    """Time every candidate on all matrices of a layer and print the best; ``copy`` in bytes per second.

    Candidates are compiled first, by several processes, into Triton's cache on disk: alone that takes longer
    than all measurements.
    """
    every = candidates()
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_candidate, every, chunksize=-(-len(every) // COMPILERS)))
    weights = {
        weights_format: [
            random_quantized_weights(weights_format, *shape) for shape in LAYERS[SWEEP_SIZE].values()
        ]
        for weights_format in SWEEP_FORMATS
    }
    timed = []
    for candidate in every:
        with contextlib.suppress(Exception):  # needs more registers or shared memory than there is
            timed.append((layer_seconds(candidate, weights[candidate.form]), candidate))
    rows = [["format", "rows", "tile", "warps", "stages", "splits", "us a layer", "GB/s", "of copying"]]
    for weights_format in SWEEP_FORMATS:
        read = sum(each[0].codes.nbytes + each[0].scale.nbytes for each in weights[weights_format])
        for count in sorted({candidate.rows for _, candidate in timed}):
            best = sorted(
                ((s, c) for s, c in timed if (c.form, c.rows) == (weights_format, count)),
                key=lambda pair: pair[0],
            )
            for seconds, candidate in best[:BEST]:
                tiles = candidate.tiles
                rows.append(
                    [
                        weights_format,
                        str(count),
                        candidate.tile,
                        str(tiles.warps),
                        str(tiles.stages),
                        str(candidate.splits or "-"),
                        f"{seconds * 1e6:.1f}",
                        f"{read / seconds / 1e9:.0f}",
                        f"{read / seconds / copy:.0%}",
                    ]
                )
    print(f"\n## The best {BEST} of {len(timed)} (of {len(every)}) on a layer of {SWEEP_SIZE}\n")
    print_table(rows)
    return [{**asdict(candidate), "seconds": seconds} for seconds, candidate in timed]


def layer_seconds(candidate: Candidate, weights: list[list[QuantizedWeight]]) -> float:
    total = 0.0
    for copies in weights:
        x = torch.randn(candidate.rows, copies[0].in_features, dtype=torch.bfloat16, device="cuda")
        total += seconds_of(
            [
                lambda each=each, x=x: candidate.multiply(x, each)  # type: ignore[misc]
                for each in copies
            ]
        )
    return total


def compile_candidate(candidate: Candidate) -> bool:
    """Run ``candidate`` once on every matrix of a layer, so that its kernels are in the cache."""
    for outputs, inputs in LAYERS[SWEEP_SIZE].values():
        [weights] = zero_quantized_weights(candidate.form, outputs, inputs, 1, torch.device("cuda", 0))
        x = torch.zeros(candidate.rows, inputs, dtype=torch.bfloat16, device="cuda")
        with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
            candidate.multiply(x, weights)
            torch.cuda.synchronize()
    return True


if __name__ == "__main__":
    main()

"""A decode step's products and attention on this GPU, in one CUDA graph, by chosen tiles.

    python -m benchmarks.decode_step                          four checkpoints, half a minute
    python -m benchmarks.decode_step --sweep 2B-fp8           candidates for one_row.row_tiles: two minutes
    python -m benchmarks.decode_step --at-once 8 --sweep 2B-fp8     for tables of tiles and splits of inputs
    python -m benchmarks.small_card --multiprocessors 30 --limited-only decode_step --sweep 2B-fp8

Requests behind 815 tokens, at the true shapes of Qwen3-VL; weights are zeros. Times are beside the time in
which this GPU reads as many bytes. Embedding, RoPE's tables and sampling are left out: 12 us on an H200.

A product timed alone does not show what the kernel behind it waits for, so tiles are swept in the whole step,
one product at a time; the best of two products may not be the best of both together.
"""

import contextlib
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from multiprocessing import get_context
from typing import Any

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
from benchmarks.kernels import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    KEY_HEADS,
    LAYERS,
    seconds_of,
    zero_quantized_weights,
)
from vlfit.kernels.attention.paged import BlockAttentionMetadata, block_attention
from vlfit.kernels.gemm.dense import DENSE_MAX_ROWS, DenseTiles, dense_linear, dense_linear_add
from vlfit.kernels.gemm.epilogue import PreNormRows, ResidualEpilogue, unwrap_rows
from vlfit.kernels.gemm.one_row import RowForm, RowTiles, dense_row_form, launch_row, row_form
from vlfit.kernels.gemm.quantized import quantized_linear, quantized_linear_add
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.kernels.rows.row_ops import PackedQKV, add_rms_norm
from vlfit.plan.native.tiles import GemmTiles
from vlfit.tuning.bandwidth import measure_memory_bandwidth

CHECKPOINTS = ("2B-bf16", "2B-fp8", "4B-fp8", "4B-int4")
DEPTH = {"2B": 28, "4B": 36, "8B": 36}  # layers
FORMATS = ("bf16", "fp8", "int4")
VOCABULARY = 151_936
CONTEXT = 816  # tokens, the new one among them
PRODUCTS = ("qkv", "o", "gate_up", "down")
EPS = 1e-6
COMPILERS = 14  # processes
BEST = 6  # candidates printed of each product

# Warps of a program, and programs of a multiprocessor that multiply tiles in turn (0: a tile each).
_PROGRAMS = ((4, 0), (4, 3), (4, 4), (8, 0), (8, 2), (8, 3), (16, 1))
_LANE_OUTPUTS_AND_AHEAD = ((1, 8), (2, 2), (2, 4), (2, 8), (4, 4))

# Outputs and inputs of a tile, warps, and how many of these take inputs of their own.
_TILES = (
    (16, 256, 2, 2), (16, 256, 4, 4), (16, 512, 4, 4), (16, 512, 8, 8), (32, 128, 2, 1), (32, 128, 4, 4),
    (32, 256, 2, 1), (32, 256, 4, 4), (32, 512, 4, 4), (64, 128, 2, 1), (64, 128, 4, 1), (64, 256, 4, 1),
    (64, 256, 4, 4),
)  # fmt: skip
_STAGES, _SPLITS = 3, (1, 2, 4, 8)

Weights = Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a product of several rows, whose inputs are split among so many programs."""

    outputs: int
    inputs: int
    warps: int
    parts: int
    stages: int
    splits: int

    def of(self, rows: int, weights: Weights) -> dict[str, Any]:
        """Arguments of a product of ``rows`` rows by ``weights``."""
        tiles: DenseTiles | GemmTiles
        if isinstance(weights, Tensor):
            tiles = DenseTiles(self.outputs, self.inputs, self.warps, self.stages, self.parts)
        else:
            rows = 8 if rows <= 8 else 16
            tiles = GemmTiles(rows, self.outputs, self.inputs, self.warps, self.stages, self.parts)
        return {"tiles": tiles, "splits": self.splits}


_COLUMNS: dict[type, tuple[str, ...]] = {
    RowTiles: ("warps", "for an output", "outputs a lane", "ahead", "programs"),
    Tiles: ("outputs", "inputs", "warps", "parts", "stages", "splits"),
}
AnyTiles = RowTiles | Tiles  # of one row, or of several
TilesOf = Mapping[str, AnyTiles]  # by product; without: those that the engine chooses


@dataclass(frozen=True, slots=True)
class Timed:
    """A step's ``seconds`` with ``tiles`` in ``product``; None for both: as the engine has it."""

    product: str | None
    tiles: AnyTiles | None
    seconds: float


class DecodeStep:
    """Layers and output head of a ``checkpoint``, such as 4B-int4, and the tensors of requests."""

    def __init__(
        self,
        checkpoint: str,
        device: torch.device,
        layers: int | None = None,
        at_once: int = 1,
        *,
        head: bool = True,
    ) -> None:
        """``layers``: None for as many as the model has. ``at_once``: requests. ``head``: it has one."""
        size, _, form = checkpoint.partition("-")
        self.shapes, self.heads = LAYERS[size], HEADS[size]
        self.layers = layers or DEPTH[size]
        self.weights = {
            name: zero_weights(form, *shape, self.layers, device) for name, shape in self.shapes.items()
        }
        width = self.shapes["qkv"][1]
        kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self.head = torch.zeros(VOCABULARY if head else 0, width, **kind)
        self.hidden, self.norm = torch.ones(at_once, width, **kind), torch.ones(width, **kind)
        self.head_norms = torch.ones(self.heads + KEY_HEADS, HEAD_DIM, **kind)
        self.table = torch.ones(at_once, 1, HEAD_DIM, **kind)
        slots = at_once * CONTEXT
        self.cache = torch.ones(2, self.layers, slots, KEY_HEADS, HEAD_DIM, **kind)
        spans = [(row, 1, CONTEXT - 1) for row in range(at_once)]
        self.metadata = BlockAttentionMetadata(
            slot_mapping=torch.arange(CONTEXT - 1, slots, CONTEXT, device=device),
            block_tables=torch.arange(slots // BLOCK, dtype=torch.int32, device=device).view(at_once, -1),
            query_spans=torch.tensor(spans, dtype=torch.int32, device=device),
            block_size=BLOCK,
            num_decodes=at_once,
            max_query_len=0,
        )

    @property
    def read_bytes(self) -> int:
        """Bytes of weights, scales, keys and values."""
        every = [each for copies in self.weights.values() for each in copies]
        return sum(map(bytes_of, every)) + self.head.nbytes + self.cache.nbytes

    def run(self, tiles: TilesOf) -> Tensor:
        """Launch the kernels of one step; returns the logits [requests, vocabulary], or hidden states."""
        rows: Tensor | PreNormRows = add_rms_norm(self.hidden, None, self.norm, EPS)
        for layer in range(self.layers):
            qkv, output, gate_up, down = (self.weights[name][layer] for name in PRODUCTS)
            heads = multiply(rows, qkv, tiles.get("qkv")).view(len(self.hidden), -1, HEAD_DIM)
            packed = PackedQKV(heads, self.head_norms, self.table, self.table, EPS)
            mixed = block_attention(packed, self.cache[0, layer], self.cache[1, layer], self.metadata)
            rows = self._multiply_and_add(mixed, output, tiles.get("o"))
            inner = multiply(rows, gate_up, tiles.get("gate_up"), swiglu=True)
            rows = self._multiply_and_add(inner, down, tiles.get("down"))
        return multiply(rows, self.head, tiles.get("head")) if len(self.head) else self.hidden

    def _multiply_and_add(self, x: Tensor, weights: Weights, tiles: AnyTiles | None) -> PreNormRows:
        residual = ResidualEpilogue(self.hidden, self.norm, EPS)
        if len(x) > 1:
            chosen = arguments_of(tiles, len(x), weights)
            if isinstance(weights, Tensor):
                return dense_linear_add(x, weights, None, residual, **chosen)
            return quantized_linear_add(x, weights, None, residual, **chosen)
        form = form_of(x, weights, tiles)
        prenorm = residual.allocate_prenorm(form.tiles.outputs, form.tiles.warps_n)
        launch_row(x, weights, None, self.hidden, form, residual=residual, prenorm=prenorm)
        return prenorm


def arguments_of(tiles: AnyTiles | None, rows: int, weights: Weights) -> dict[str, Any]:
    """What a product of several rows is called with. Raises ``ValueError`` for tiles of one row."""
    if isinstance(tiles, RowTiles):
        raise ValueError("tiles of one row for several")
    return {} if tiles is None else tiles.of(rows, weights)


def form_of(x: Tensor, weights: Weights, tiles: AnyTiles | None, *, swiglu: bool = False) -> RowForm:
    """How one row ``x`` is multiplied. Raises ``ValueError`` where the kernel for one row does not."""
    if isinstance(tiles, Tiles):
        raise ValueError("tiles of several rows for one")
    if isinstance(weights, Tensor):
        form = dense_row_form(x, weights, None, tiles, swiglu)
    else:
        form = row_form(x, weights, None, tiles, swiglu)
    if form is None:
        raise ValueError("no kernel for one row on this card")
    return form


def multiply(
    x: Tensor | PreNormRows, weights: Weights, tiles: AnyTiles | None, *, swiglu: bool = False
) -> Tensor:
    """``x`` [rows, inputs] by ``weights``: [rows, outputs], with ``swiglu`` half as many."""
    rows, _ = unwrap_rows(x)
    if len(rows) > 1:
        chosen = arguments_of(tiles, len(rows), weights)
        if isinstance(weights, Tensor):
            return dense_linear(x, weights, None, swiglu=swiglu, **chosen)
        return quantized_linear(x, weights, None, swiglu=swiglu, **chosen)
    form = form_of(rows, weights, tiles, swiglu=swiglu)
    outputs = len(weights) if isinstance(weights, Tensor) else weights.out_features
    out = torch.empty(1, outputs // 2 if swiglu else outputs, dtype=rows.dtype, device=rows.device)
    launch_row(x, weights, None, out, form, swiglu=swiglu)
    return out


def zero_weights(form: str, outputs: int, inputs: int, count: int, device: torch.device) -> Sequence[Weights]:
    """As many matrices of zeros in ``bf16``, ``fp8`` or ``int4``."""
    if form == "bf16":
        return torch.zeros(count, outputs, inputs, dtype=torch.bfloat16, device=device).unbind(0)
    named = {"int4": "int4 of 32"}.get(form, form)
    return zero_quantized_weights(named, outputs, inputs, count, device)


def bytes_of(weights: Weights) -> int:
    return weights.nbytes if isinstance(weights, Tensor) else weights.codes.nbytes + weights.scale.nbytes


def candidates(at_once: int = 1) -> Iterator[tuple[str, AnyTiles]]:
    """Products and tiles to try in them, alone in the step, for so many requests."""
    if at_once > 1:
        for product, shape, splits in itertools.product(PRODUCTS, _TILES, _SPLITS):
            yield product, Tiles(*shape, _STAGES, splits)
        return
    for product, (warps, programs), warps_k, (lane_outputs, ahead) in itertools.product(
        PRODUCTS, _PROGRAMS, (1, 2, 4), _LANE_OUTPUTS_AND_AHEAD
    ):
        if product == "gate_up" and lane_outputs < 2:  # SwiGLU takes two outputs of a lane
            continue
        yield product, RowTiles(warps, warps_k, lane_outputs, ahead, programs)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", default=CHECKPOINTS, metavar="SIZE-FORMAT")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="requests that decode together")
    parser.add_argument("--sweep", action="store_true", help="try candidates in each product")
    add_json_option(parser)
    options = parser.parse_args()
    known = [f"{size}-{form}" for size in DEPTH for form in FORMATS]
    if unknown := set(options.checkpoints) - set(known):
        parser.error(f"not among {', '.join(known)}: {', '.join(sorted(unknown))}")
    if not 1 <= options.at_once <= DENSE_MAX_ROWS:
        parser.error(f"--at-once {options.at_once}: 1 to {DENSE_MAX_ROWS}")
    require_gpu("decode_step")
    device = torch.device("cuda", 0)
    roof = measure_memory_bandwidth(device)
    print(f"commit {commit()}; {card()}; torch {torch.__version__}; reads {roof / 1e9:,.0f} GB/s")
    runs: dict[str, list[Timed]] = {}
    with torch.inference_mode():
        for checkpoint in options.checkpoints:
            tried = list(candidates(options.at_once)) if options.sweep else []
            compile_all(checkpoint, options.at_once, tried)
            step = DecodeStep(checkpoint, device, at_once=options.at_once)
            runs[checkpoint] = time_all(step, tried)
            print_times(checkpoint, runs[checkpoint], step.read_bytes / roof)
            del step
            torch.cuda.empty_cache()
    found = {
        name: [{**asdict(each), "tiles": each.tiles and asdict(each.tiles)} for each in run]
        for name, run in runs.items()
    }
    facts = {"commit": commit(), "card": card(), "read_bytes_per_s": roof, "at_once": options.at_once}
    write_json(options.json, {**facts, "steps": found})


def time_all(step: DecodeStep, tried: Sequence[tuple[str, AnyTiles]]) -> list[Timed]:
    """The step as it is, each candidate, and the step as it is once more: what the card drifts by."""
    timed = [Timed(None, None, seconds_of([lambda: step.run({})] * 2))]
    for product, tiles in tried:
        chosen = {product: tiles}
        with contextlib.suppress(Exception):  # needs more registers or shared memory than there is
            seconds = seconds_of([lambda chosen=chosen: step.run(chosen)] * 2)  # type: ignore[misc]
            timed.append(Timed(product, tiles, seconds))
    timed.append(Timed(None, None, seconds_of([lambda: step.run({})] * 2)))
    return timed


def compile_all(checkpoint: str, at_once: int, tried: Sequence[tuple[str, AnyTiles]]) -> None:
    """Compile all that ``tried`` needs into Triton's cache on disk, by several processes."""
    if not tried:
        return
    parts = [(checkpoint, at_once, tried[start::COMPILERS]) for start in range(COMPILERS)]
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile_part, parts))


def _compile_part(part: tuple[str, int, Sequence[tuple[str, AnyTiles]]]) -> None:
    checkpoint, at_once, tried = part
    # The second layer takes sums of the first.
    step = DecodeStep(checkpoint, torch.device("cuda", 0), 2, at_once, head=False)
    with torch.inference_mode():
        for product, tiles in tried:
            with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
                step.run({product: tiles})
                torch.cuda.synchronize()


def print_times(checkpoint: str, timed: Sequence[Timed], least: float) -> None:
    """``least``: seconds in which the card reads the step's bytes."""
    first, last = timed[0].seconds, timed[-1].seconds
    share = f"its bytes {least * 1e6:.0f} us ({least / first:.0%})"
    print(f"\n## {checkpoint}: {first * 1e6:.0f} us, at the end {last * 1e6:.0f}; {share}\n")
    several = any(isinstance(each.tiles, Tiles) for each in timed)
    rows = [["product", *_COLUMNS[Tiles if several else RowTiles], "us a step", "us less"]]
    for product in PRODUCTS:
        tried = sorted((each for each in timed if each.product == product), key=lambda each: each.seconds)
        for each in tried[:BEST]:
            facts = map(str, astuple(each.tiles) if each.tiles else ())
            less = min(first, last) - each.seconds
            rows.append([product, *facts, f"{each.seconds * 1e6:.0f}", f"{less * 1e6:.0f}"])
    if len(rows) > 1:
        print_table(rows)


if __name__ == "__main__":
    main()

"""The kernels on this GPU, at the true shapes of Qwen3-VL, beside torch's own bf16 in the same run.

    python -m benchmarks.kernels [--json FILE]     about two minutes
    python -m benchmarks.kernels --sweep           candidates for the tables of tile sizes, two minutes

GB/s are bytes that must be read (weights and scales, or keys and values) over time; their share is of the
speed at which this card copies memory, measured in the same run. Launches are not in it: what is timed is
captured as one CUDA graph.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.facts import card, commit
from benchmarks.kernel_sweep import sweep
from benchmarks.kernel_timing import copies_beyond_caches, copy_bandwidth, seconds_of
from benchmarks.kernel_weights import FORMS, LAYERS, random_dense_weights, random_quantized_weights
from benchmarks.report import print_rows
from vlfit.kernels.attention.paged import BlockAttentionMetadata, block_attention
from vlfit.kernels.gemm.quantized import quantized_linear
from vlfit.kernels.rows.row_ops import PackedQKV

ROWS = (1, 8, 256, 512, 1024)
HEADS = {"2B": 16, "4B": 32, "8B": 32}
KEY_HEADS, HEAD_DIM, BLOCK = 8, 128, 16


@dataclass(frozen=True)
class Result:
    """One thing timed. ``bytes`` must be read, ``flops`` computed; seconds of ours and of torch in bf16."""

    what: str
    size: str
    form: str
    rows: int
    detail: str
    bytes: int
    flops: float
    seconds: float
    torch_bytes: int
    torch_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    parser.add_argument("--only", choices=LAYERS, help="the linear layers of this size, and no attention")
    parser.add_argument("--sweep", action="store_true", help="measure candidates for the tile tables")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels needs a CUDA device")
    with torch.inference_mode():
        copy = copy_bandwidth()
        print(f"commit {commit()}; {card()}; torch {torch.__version__}; copies at {copy / 1e9:.0f} GB/s")
        if arguments.sweep:
            report: dict[str, Any] = {"sweep": sweep(copy)}
        else:
            sizes = [arguments.only] if arguments.only else list(LAYERS)
            results = [*linear_results(sizes)]
            print_linears(results, copy)
            if not arguments.only:
                others = [*decoding(), *prefill_results()]
                print_attention(others, copy)
                results += others
            report = {"results": [asdict(result) for result in results]}
    facts = {"commit": commit(), "card": card(), "torch": torch.__version__, "copy_bytes_per_s": copy}
    if arguments.json:
        arguments.json.write_text(json.dumps({**facts, **report}, indent=1), encoding="utf-8")


def linear_results(sizes: list[str]) -> Iterator[Result]:
    """Every matrix of a text layer and output heads, in every form, for each number of rows."""
    for size in sizes:
        for name, (outputs, inputs) in LAYERS[size].items():
            dense = random_dense_weights(outputs, inputs)
            asked = {rows: torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda") for rows in ROWS}
            by_torch = {
                rows: seconds_of([_call(F.linear, x, each) for each in dense]) for rows, x in asked.items()
            }
            for form in FORMS:
                weights = random_quantized_weights(form, outputs, inputs)
                read = weights[0].codes.nbytes + weights[0].scale.nbytes
                for rows, x in asked.items():
                    seconds = seconds_of([_call(quantized_linear, x, each, None) for each in weights])
                    flops = 2.0 * rows * outputs * inputs
                    both = (seconds, dense[0].nbytes, by_torch[rows])
                    yield Result("linear", size, form, rows, name, read, flops, *both)


def decoding() -> Iterator[Result]:
    """One new token of each sequence over its context; ours with what turns and stores it."""
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
    """A chunk of 1024 tokens over its past; torch's causal flash attention where there is none."""
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
    """Blocks in the order of the tokens, so that torch can be given the same keys and values."""
    table = torch.arange(sequences * context // BLOCK, dtype=torch.int32, device="cuda").view(sequences, -1)
    decoding = sum(tokens == 1 for _, tokens, _ in spans)
    longest = max(tokens if tokens > 1 else 0 for _, tokens, _ in spans)
    numbers = torch.tensor(spans, dtype=torch.int32, device="cuda")
    begins = [index * context + past for index, (_, _, past) in enumerate(spans)]
    ranges = [torch.arange(begin, begin + span[1]) for begin, span in zip(begins, spans, strict=True)]
    return BlockAttentionMetadata(torch.cat(ranges).cuda(), table, numbers, BLOCK, decoding, longest)


def _packed_qkv(rows: int, heads: int) -> PackedQKV:
    """Queries, keys and values of ``rows`` tokens, and what they are normalized and turned by."""
    joined = torch.randn(rows, heads + 2 * KEY_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(heads + KEY_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    cosines, sines = torch.randn(2, rows, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    return PackedQKV(joined, weight, cosines, sines, 1e-6)


def _call(function: Callable[..., Tensor], *arguments: Any) -> Callable[[], Tensor]:
    return lambda: function(*arguments)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Callable[[], Tensor]:
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)


def print_linears(results: list[Result], copy: float) -> None:
    """One row for all matrices of a layer together; GB/s where reading is what takes the time."""
    heading = [
        "layer",
        "rows",
        "form",
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
        for count in ROWS:
            for form in FORMS:
                some = [each for each in results if (each.size, each.rows, each.form) == (size, count, form)]
                seconds, by_torch = sum(r.seconds for r in some), sum(r.torch_seconds for r in some)
                speed = sum(r.bytes for r in some) / seconds
                torch_speed = sum(r.torch_bytes for r in some) / by_torch
                flops = sum(r.flops for r in some) / seconds / 1e12
                rows.append(
                    [
                        size,
                        str(count),
                        form,
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
    print_rows(rows)


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
    print_rows(rows)


if __name__ == "__main__":
    main()

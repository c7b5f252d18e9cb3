"""Weights as stored on a CPU (`kernels/cpu/`) beside weights widened at load, and beside llama.cpp.

    python -m benchmarks.cpu_beside 2B-int4 2B-fp8                       minutes each
    python -m benchmarks.cpu_beside 2B-int4 --no-widened --llama Q4_K_M  also llama.cpp (llama-cpp-python)
    python -m benchmarks.cpu_beside --products                  only GB/s of the products and of plain reads

Checkpoints have Qwen3-VL's true shapes and no content (`checkpoints.py`); each variant runs in processes of
its own, in turn, and the best run counts, as other programs only ever take time away. Of decoding, by vlfit
and llama.cpp alike, `tokens/s` is the first quartile of all steps and `answer` the best answer as a whole.
llama.cpp gets a GGUF file of the same shapes for each checkpoint; so does vlfit with names such as
`2B-Q4_K_M`. `2B-int4-E8` has its embedding, and so the head, in int8 (Q4_K_M's has 6 bits). `--products`:
matrices of 400 MB, times one row and four, for each format, on one thread and on all.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import checkpoint_of, write_picture
from benchmarks.harness import (
    add_json_option,
    alternate,
    argument_parser,
    commit,
    cpu_name,
    in_mib,
    print_table,
    process_memory,
    run_worker,
    write_json,
)

VARIANTS = {"widened": "0", "stored": ""}
SWITCH = "VLFIT_CPU_KERNELS"
QUESTION_TOKENS = 256  # of llama.cpp's prompt
PICTURES = ("512x512", "480x512", "512x480")  # different ones, as a known one is not computed again


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="*", metavar="SIZE-FORMAT")
    parser.add_argument("--folder", type=Path, help="of checkpoints, kept; default: a temporary one")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--llama", metavar="MIX", help="also llama.cpp, with a GGUF file of this type")
    parser.add_argument("--no-widened", action="store_true", help="without weights widened at load")
    parser.add_argument("--products", action="store_true", help="only the products")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(WORKERS[(job := json.loads(options.worker)).pop("kind")](**job)))
        return
    print(f"commit {commit()}; {cpu_name()}, load {os.getloadavg()[0]:.1f}")
    if options.products:
        results: Any = _work("products")
        print_table(_product_rows(results))
        write_json(options.json, results)
        return
    with tempfile.TemporaryDirectory() as place:
        results = compare(options, options.folder or Path(place))
    write_json(options.json, results)


def compare(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Print a table; every measurement."""
    rows, results = [["checkpoint", "weights", *_COLUMNS]], []
    variants = [each for each in VARIANTS if each != "widened" or not options.no_widened]
    for name in options.checkpoints:
        model, mix = str(checkpoint_of(name, folder)), options.llama
        rival = str(checkpoint_of(f"{name.partition('-')[0]}-{mix}", folder)) if mix else ""
        runs: dict[str, list[dict[str, Any]]] = {each: [] for each in [*variants, *["llama.cpp"] * bool(mix)]}
        for _, variant in alternate(options.rounds, list(runs)):
            if variant == "llama.cpp":
                run = _work("llama", model=rival, tokens=options.tokens)
            else:
                settings = {SWITCH: VARIANTS[variant]} if VARIANTS[variant] else {}
                run = _work("vlfit", settings, model=model, tokens=options.tokens)
            runs[variant].append(run)
            print(f"  {name}, {variant}: {run}", file=sys.stderr)
        for variant, each in runs.items():
            rows.append([mix if variant == "llama.cpp" else name, variant, *_cells(each)])
        results.append({"checkpoint": name, "llama.cpp": mix, "runs": runs})
    print_table(rows)
    return results


_COLUMNS = [
    "ready, s",
    "prompt tokens/s",
    "tokens/s",
    "answer",
    "first token of 512x512, s",
    "RAM beside file pages, MiB",
    "weights, MiB",
    "load",
]


def _cells(runs: list[dict[str, Any]]) -> list[str]:
    pictures = [run["picture"] for run in runs if "picture" in run]
    return [
        f"{min(run['ready'] for run in runs):.1f}",
        f"{max(run['prompt'] for run in runs):.1f}",
        f"{max(run['decode'] for run in runs):.2f}",
        f"{max(run['answer'] for run in runs):.2f}",
        f"{min(pictures):.2f}" if pictures else "",
        in_mib(min(run["anonymous"] for run in runs)),
        in_mib(runs[0]["weights"]),
        " ".join(f"{run['load']:.1f}" for run in runs),
    ]


def _work(kind: str, settings: dict[str, str] | None = None, **job: Any) -> Any:
    given = json.dumps({"kind": kind, **job})
    return run_worker("benchmarks.cpu_beside", "--worker", given, timeout=1200, **(settings or {}))


# --- in a process of its own -------------------------------------------------------------------------------


def run_vlfit(model: str, tokens: int) -> dict[str, Any]:
    """Load ``model``; the best prompt of 256 tokens, picture, and times between tokens of three."""
    began = time.perf_counter()
    from vlfit.api.conversation import ImagePart, single_turn
    from vlfit.api.engine_options import EngineOptions
    from vlfit.api.sampling_params import SamplingParams
    from vlfit.backends.native import NativeBackend

    options = EngineOptions(device="cpu", max_model_len=1024, max_num_seqs=1, speculate=False)
    with NativeBackend.load(model, options) as backend:
        ready = time.perf_counter() - began
        first: list[float] = []
        answers: list[list[float]] = []
        count = 0
        for number in range(3):
            asked = single_turn(f"{number} " + "word and " * 120)
            times = [time.perf_counter()]
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
            stream = backend.stream(asked, sampling)
            for _ in stream:
                times.append(time.perf_counter())
            count = stream.answer().usage.prompt_tokens
            first.append(times[1] - times[0])
            answers.append([after - before for before, after in pairwise(times[1:])])
        pictures: list[float] = []
        for side in PICTURES if backend.account().memory.weights.get("weights.vision", 0) else ():
            picture = ImagePart(write_picture(side).read_bytes())
            start = time.perf_counter()
            for _ in backend.stream(single_turn("What is this?", picture), SamplingParams(max_tokens=1)):
                pass
            pictures.append(time.perf_counter() - start)
        weights = sum(backend.account().memory.weights.values())
        return {
            "ready": ready,
            "prompt": count / min(first),
            "prompt_tokens": count,
            **_decoding(answers),
            **({"picture": min(pictures)} if pictures else {}),
            "anonymous": process_memory("RssAnon"),
            "weights": weights,
            "load": os.getloadavg()[0],
        }


def run_llama(model: str, tokens: int) -> dict[str, Any]:
    """The same of llama.cpp, with as many threads as cores."""
    began = time.perf_counter()
    import ctypes
    import importlib

    llama = importlib.import_module("llama_cpp")  # not among the packages of vlfit's development
    llama.llama_backend_init()
    loaded = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, 512, 512
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    context = llama.llama_init_from_model(loaded, params)
    ready = time.perf_counter() - began
    prompts, answers = [], []
    for _ in range(3):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        prompts.append(_llama_pass(llama, ctypes, context, QUESTION_TOKENS))
        answers.append([_llama_pass(llama, ctypes, context, 1) for _ in range(tokens)])
    return {
        "ready": ready,
        "prompt": QUESTION_TOKENS / min(prompts),
        **_decoding(answers),
        "anonymous": process_memory("RssAnon"),
        "weights": Path(model).stat().st_size,
        "load": os.getloadavg()[0],
    }


def _decoding(answers: list[list[float]]) -> dict[str, float]:
    """Tokens/s from the seconds of steps: ``decode`` of the first quartile, ``answer`` of the best answer."""
    steps = sorted(step for answer in answers for step in answer)
    return {"decode": 1 / steps[len(steps) // 4], "answer": max(len(each) / sum(each) for each in answers)}


def _llama_pass(llama: Any, ctypes: Any, context: Any, count: int) -> float:
    tokens = (llama.llama_token * count)(*(100 + number % 1000 for number in range(count)))
    began = time.perf_counter()
    if llama.llama_decode(context, llama.llama_batch_get_one(tokens, count)):
        raise RuntimeError("llama_decode failed")
    llama.llama_synchronize(context)
    return time.perf_counter() - began


def measure_products() -> dict[str, Any]:
    """GB/s of plain reads and of products with one row and with four, by threads and format."""
    import torch

    from vlfit.kernels.cpu import products
    from vlfit.kernels.cpu.library import vector_level
    from vlfit.kernels.gemm.weights import QuantizedWeight

    inputs, outputs = 6144, 65536

    def quantized(codes: Any, group: int, supers: bool = False) -> QuantizedWeight:
        if supers:
            scale = torch.ones(outputs, inputs // group, dtype=torch.int16)
            above = torch.full((outputs, inputs // 256), 0x3C003C00, dtype=torch.int32)
            return QuantizedWeight(codes, scale, None, (1, group), above)
        scale = torch.ones(len(codes), inputs // group, dtype=torch.bfloat16)
        return QuantizedWeight(codes, scale, None, (1, group))

    four = torch.ones(outputs, inputs // 8, dtype=torch.int32)
    byte = torch.ones(outputs, inputs, dtype=torch.int8)
    scale = torch.ones(outputs // 128, inputs // 128, dtype=torch.bfloat16)
    forms: dict[str, Any] = {
        "int4, groups of 128": quantized(four, 128),
        "int4, groups of 32": quantized(four, 32),
        "int4, two levels, minima": quantized(four, 32, supers=True),
        "int8, groups of 32": quantized(byte, 32),
        "int8, rows": quantized(byte, inputs),
        "fp8, blocks of 128": QuantizedWeight(byte.view(torch.float8_e4m3fn), scale, None, (128, 128)),
        "bfloat16": torch.ones(outputs // 2, inputs, dtype=torch.bfloat16),
    }
    cores = torch.get_num_threads()
    speeds: dict[str, dict[str, float]] = {}
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        for _ in range(2):  # in turn: others' work comes and goes
            _keep_best(
                speeds, "plain read", f"{threads}", byte.nbytes, partial(products.read_memory, byte, threads)
            )
            for name, form in forms.items():
                stored = products.StoredWeight(form)
                for rows in (1, 4):
                    x = torch.ones(rows, inputs)
                    _keep_best(speeds, name, f"{threads}, {rows} rows", stored.nbytes(), partial(stored, x))
    return {"level": vector_level(), "speeds": speeds, "load": os.getloadavg()[0]}


def _keep_best(
    speeds: dict[str, dict[str, float]], name: str, column: str, size: int, call: Callable[[], object]
) -> None:
    for _ in range(5):
        began = time.perf_counter()
        call()
        speed = size / (time.perf_counter() - began) / 1e9
        speeds.setdefault(name, {})[column] = max(speed, speeds.get(name, {}).get(column, 0.0))


def _product_rows(results: dict[str, Any]) -> list[list[str]]:
    speeds = results["speeds"]
    columns = list(dict.fromkeys(column for row in speeds.values() for column in row))
    head = [f"GB/s, {results['level']}", *(f"threads: {column}" for column in columns)]
    return [head, *([name, *(f"{row.get(each, 0):.1f}" for each in columns)] for name, row in speeds.items())]


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "vlfit": run_vlfit,
    "llama": run_llama,
    "products": measure_products,
}

if __name__ == "__main__":
    main()

"""Launches on a simulated card, compiled in other processes, then asked for with real tensors; prints JSON.

    TRITON_CACHE_DIR=FOLDER python -m tests.kernels.compile_ahead
    python -m tests.kernels.compile_ahead --without-compiler    a dry run alone, without torch.compile

For a process of its own, and not for Triton's interpreter.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from triton import knobs

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.execution.dry_run import engine_launches
from vlfit.engine.execution.precompile import Compilers
from vlfit.kernels.launch import LaunchCache
from vlfit.kernels.launches import compile_for, record_launches
from vlfit.kernels.rows.row_ops import add_rms_norm, rope_cos_sin, silu_and_mul
from vlfit.kernels.target import TargetCard, simulate_card
from vlfit.loading.preload import leave_out_compiler

CAPABILITY = (8, 6)


def call_all(device: str) -> None:
    """Host functions with tensors, integers and floats among their arguments, aligned and not."""
    half = partial(torch.empty, dtype=torch.bfloat16, device=device)
    hidden, weight = half(5, 96), half(97)
    add_rms_norm(hidden, None, weight[:96], 1e-6)
    add_rms_norm(hidden, torch.empty_like(hidden), weight[1:], 1e-6)
    for rows in (1, 5, 16):
        silu_and_mul(half(rows, 64))
    positions = torch.zeros(3, 5, dtype=torch.int32, device=device)
    rope_cos_sin(positions, half(24).float(), None, 1.5, torch.bfloat16)


@contextmanager
def asked_for() -> Iterator[list[str]]:
    """Let launches go as far as Triton's cache; yields the hash of each kernel that is asked for."""
    hashes: list[str] = []
    original = LaunchCache._launch

    def ask(cache: LaunchCache, grid: tuple[int, ...], arguments: Any, constants: Any) -> None:
        hashes.append(cache.kernel.run(*arguments, grid=grid, warmup=True, **constants).hash)

    setattr(LaunchCache, "_launch", ask)  # noqa: B010
    try:
        yield hashes
    finally:
        setattr(LaunchCache, "_launch", original)  # noqa: B010


def dry_run(capability: tuple[int, int]) -> dict[str, Any]:
    """What mini's engine launches, in order and how often, and whether torch.compile was imported for it."""
    options = EngineOptions(kv_dtype="fp8", dtype="bfloat16")
    launches = engine_launches(open_checkpoint("mini"), options, TargetCard(capability))
    return {
        "torch_compile": "torch._dynamo.convert_frame" in sys.modules,
        "launches": [
            (each.name, *map(dict(each.constants).get, ("USE_PDL", "NATIVE_FP8")), count)
            for each, count in launches.items()
        ],
    }


def main() -> None:
    torch.set_num_threads(1)
    with Compilers(CAPABILITY, processes=2) as compilers:
        with simulate_card(TargetCard(CAPABILITY)), record_launches(compilers.add):
            call_all("meta")
        compiled = compilers.hashes()
    hits: list[bool] = []
    knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
    with compile_for(CAPABILITY), asked_for() as hashes:
        call_all("cpu")
    found = {
        "compiled": compiled,
        "asked_for": hashes,
        "hits": hits,
        "engines": {"8.6": dry_run((8, 6)), "12.0": dry_run((12, 0))},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:] == ["--without-compiler"]:
        leave_out_compiler()
        print(json.dumps(dry_run(CAPABILITY)))
    else:
        main()

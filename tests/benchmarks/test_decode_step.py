"""The decode step that is timed: which kernels it launches, by which tiles, and what a sweep tries."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.decode_step import CHECKPOINTS, PRODUCTS, DecodeStep, candidates

# Run apart from these tests, in which Triton interprets kernels and so has no launches to record.
LAUNCHES = """
import json
import torch
from benchmarks.decode_step import CHECKPOINTS, PRODUCTS, DecodeStep
from vlfit.kernels.gemm.one_row import RowTiles
from vlfit.kernels.launches import record_launches
from vlfit.kernels.target import TargetCard, simulate_card

chosen = RowTiles(16, 4, 2, 2, 1)

def launches(checkpoint, tiles, layers):
    with simulate_card(TargetCard((9, 0), "", 30)), record_launches() as found:
        DecodeStep(checkpoint, torch.device("meta"), layers).run(tiles)
    return found

counted = {}
for checkpoint in CHECKPOINTS:
    kernels = counted[checkpoint] = {}
    for launch, times in launches(checkpoint, {}, 3).items():
        kernels[launch.name] = kernels.get(launch.name, 0) + times
by_tiles = {}
for product in PRODUCTS:
    forms = [dict(launch.constants).get("FORM") for launch in launches("4B-fp8", {product: chosen}, 1)]
    by_tiles[product] = sum(getattr(form, "tiles", None) == chosen for form in forms)
print(json.dumps([counted, by_tiles]))
"""


@pytest.fixture(scope="module")
def launches() -> list[Any]:
    """Launches of three layers by checkpoint and kernel; of one layer by the tiles asked for in a product."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_layer_is_four_products_and_attention(checkpoint: str, launches: list[Any]) -> None:
    expected = {"add_rms_norm_kernel": 1, "one_row_kernel": 3 * 4 + 1, "paged_decode_kernel": 3}
    assert launches[0][checkpoint] == expected


@pytest.mark.parametrize("product", PRODUCTS)
def test_tiles_are_those_asked_for(product: str, launches: list[Any]) -> None:
    assert launches[1][product] == 1


def test_what_is_read_is_weights_scales_and_cache() -> None:
    fp8, bf16 = (DecodeStep(name, torch.device("meta"), 1).read_bytes for name in ("2B-fp8", "2B-bf16"))
    weights = 2048 * (4096 + 2048 + 12288 + 6144)
    assert bf16 - fp8 == weights - weights // 128**2 * 4


def test_a_sweep_tries_no_tiles_that_swiglu_refuses() -> None:
    tried = list(candidates())
    assert len(set(tried)) == len(tried)
    assert all(tiles.lane_outputs > 1 for product, tiles in tried if product == "gate_up")
    assert any(tiles.lane_outputs == 1 for product, tiles in tried if product == "down")

"""The decode step that is timed: which kernels it launches, by which tiles, and what a sweep tries."""

import json
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.decode_step import CHECKPOINTS, PRODUCTS, DecodeStep, Tiles, candidates
from tests.kernels.uninterpreted import output_of
from vlfit.kernels.gemm.one_row import RowTiles

# Run apart from these tests, in which Triton interprets kernels and so has no launches to record.
LAUNCHES = """
import json
import torch
from benchmarks.decode_step import CHECKPOINTS, PRODUCTS, DecodeStep, Tiles
from vlfit.kernels.gemm.one_row import RowTiles
from vlfit.kernels.launches import record_launches
from vlfit.kernels.target import TargetCard, simulate_card

chosen = RowTiles(16, 4, 2, 2, 1)

def launches(checkpoint, tiles, layers, at_once=1):
    with simulate_card(TargetCard((9, 0), "", 30)), record_launches() as found:
        DecodeStep(checkpoint, torch.device("meta"), layers, at_once).run(tiles)
    return found

counted = {}
for at_once in (1, 8):
    for checkpoint in CHECKPOINTS:
        kernels = counted[f"{checkpoint} {at_once}"] = {}
        for launch, times in launches(checkpoint, {}, 3, at_once).items():
            kernels[launch.name] = kernels.get(launch.name, 0) + times
by_tiles = {}
several = Tiles(16, 512, 4, 4, 3, 2)
for product in PRODUCTS:
    forms = [dict(launch.constants).get("FORM") for launch in launches("4B-fp8", {product: chosen}, 1)]
    by_tiles[product, 1] = sum(getattr(form, "tiles", None) == chosen for form in forms)
    forms = [dict(launch.constants).get("FORM") for launch in launches("4B-fp8", {product: several}, 1, 8)]
    by_tiles[product, 8] = sum(
        (form.block_m, form.block_n, form.block_k, form.slices, form.splits) == (8, 16, 512, 4, 2)
        for form in forms if hasattr(form, "splits")
    )
print(json.dumps([counted, [[*key, times] for key, times in by_tiles.items()]]))
"""


@pytest.fixture(scope="module")
def launches() -> list[Any]:
    """Launches of three layers by checkpoint, requests and kernel; of one layer with the tiles asked for."""
    found: list[Any] = json.loads(output_of("-c", LAUNCHES))
    return found


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_layer_is_four_products_and_attention(checkpoint: str, launches: list[Any]) -> None:
    others = {"add_rms_norm_kernel": 1, "paged_decode_kernel": 3}
    assert launches[0][f"{checkpoint} 1"] == {**others, "one_row_kernel": 3 * 4 + 1}
    dense = 3 * 4 + 1 if checkpoint == "2B-bf16" else 1
    products = {"dense_matmul_kernel": dense, "quantized_matmul_kernel": 3 * 4 + 1 - dense}
    assert launches[0][f"{checkpoint} 8"] == {**others, **{name: n for name, n in products.items() if n}}


def test_tiles_are_those_asked_for(launches: list[Any]) -> None:
    assert sorted(launches[1]) == sorted([product, rows, 1] for product in PRODUCTS for rows in (1, 8))


def test_what_is_read_is_weights_scales_and_cache() -> None:
    fp8, bf16 = (DecodeStep(name, torch.device("meta"), 1).read_bytes for name in ("2B-fp8", "2B-bf16"))
    weights = 2048 * (4096 + 2048 + 12288 + 6144)
    assert bf16 - fp8 == weights - weights // 128**2 * 4


def test_a_sweep_tries_no_tiles_that_swiglu_refuses() -> None:
    tried = [(product, tiles) for product, tiles in candidates() if isinstance(tiles, RowTiles)]
    assert len(set(tried)) == len(tried) == len(list(candidates()))
    assert all(tiles.lane_outputs > 1 for product, tiles in tried if product == "gate_up")
    assert any(tiles.lane_outputs == 1 for product, tiles in tried if product == "down")


def test_a_sweep_of_several_requests_tries_tiles_of_several_rows() -> None:
    tried = [(product, tiles) for product, tiles in candidates(8) if isinstance(tiles, Tiles)]
    assert len(set(tried)) == len(tried) == len(list(candidates(8)))
    assert {product for product, _ in tried} == set(PRODUCTS)
    assert all(tiles.parts in (1, tiles.warps) for _, tiles in tried)

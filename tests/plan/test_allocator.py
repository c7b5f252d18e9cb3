"""torch's allocator: its rules by hand, and against numbers that torch reported on a GPU."""

import pytest

from vlfit.plan.allocator import (
    ARENA_MIN_BYTES,
    PARTIAL_SEGMENTS,
    AllocatorPool,
    arena_allocation_sizes,
    engine_tensor_sizes,
    reserved_bytes,
    rounding_bytes,
    separate_tensor_sizes,
)
from vlfit.plan.model_lookup import find_exact_models
from vlfit.units import MIB


@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        ([1], 2),  # the smallest piece that is taken
        ([1, MIB, 1000], 2),  # small ones share it
        ([MIB, MIB, 1], 4),
        ([MIB + 1], 20),  # larger ones share 20 MiB
        ([4 * MIB] * 5, 20),
        ([8 * MIB] * 3, 40),  # two to a piece, 4 MiB of which are left over
        ([8 * MIB] * 2 + [4 * MIB], 20),  # where smaller ones find room
        ([6 * MIB, 9 * MIB, 4 * MIB], 20),
        ([19 * MIB + 1, 600_000], 22),  # less than 1 MiB is left over: nothing that shares is found there
        ([10 * MIB], 10),  # from 10 MiB on a piece of its own, in steps of 2 MiB
        ([15 * MIB], 16),
        ([15 * MIB - 4096, MIB + 4096], 16),  # over 1 MiB is left over, and used
        ([15 * MIB - 4096, MIB + 4608], 36),
    ],
)
def test_segment_rules(sizes: list[int], held: int) -> None:
    assert reserved_bytes(sizes) == held * MIB


def test_smallest_free_block_is_used() -> None:
    pool = AllocatorPool()
    for size in (9, 9, 9, 6):  # leave 2 and 5 MiB of two shared pieces
        pool.allocate(size * MIB)
    for size in (2, 5):
        pool.allocate(size * MIB)
    assert pool.reserved == 40 * MIB


def test_large_tensors_have_their_own_segments() -> None:
    assert [rounding_bytes(size * MIB) for size in (14, 15)] == [0, MIB]
    assert PARTIAL_SEGMENTS == 22 * MIB


def test_matrices_that_share_their_input_are_joined() -> None:
    layer = "model.language_model.layers.{}.{}.weight"
    names = [
        *("mlp.up_proj", "self_attn.k_proj", "self_attn.q_proj"),
        *("mlp.gate_proj", "self_attn.v_proj", "self_attn.o_proj"),
    ]
    loaded = {"model.visual.merger.norm.weight": 1, "lm_head.weight": 2}
    loaded |= {layer.format(index, name): 10 + index for index in (10, 2) for name in names}
    assert list(engine_tensor_sizes(loaded).items()) == [
        (layer.format(2, "self_attn.q_proj"), 36),
        (layer.format(2, "self_attn.o_proj"), 12),
        (layer.format(2, "mlp.gate_proj"), 24),
        (layer.format(10, "self_attn.q_proj"), 60),
        (layer.format(10, "self_attn.o_proj"), 20),
        (layer.format(10, "mlp.gate_proj"), 40),
        ("lm_head.weight", 2),
        ("model.visual.merger.norm.weight", 1),
    ]
    alone = list(separate_tensor_sizes(loaded))
    assert alone[0] == "model.visual.merger.norm.weight"
    assert [name.split(".")[-2] for name in alone[1:7]] == [
        *("q_proj", "k_proj", "v_proj"),
        *("o_proj", "gate_proj", "up_proj"),
    ]
    assert alone[-1] == "lm_head.weight"


def test_arena_per_text_model_and_tower() -> None:
    layer = "model.language_model.layers.{}.{}"
    sizes = {
        layer.format(0, "mlp.gate_proj.weight"): 5 * MIB + 100,
        layer.format(0, "input_layernorm.weight"): ARENA_MIN_BYTES - 1,
        layer.format(1, "mlp.gate_proj.weight"): ARENA_MIN_BYTES,
        "model.language_model.norm.weight": ARENA_MIN_BYTES,
        "lm_head.weight": 30 * MIB,
        "model.visual.pos_embed.weight": MIB,
        "model.visual.blocks.0.norm1.weight": 2048,
        "model.visual.merger.linear_fc1.weight": 2 * MIB,
    }
    assert arena_allocation_sizes(sizes) == [
        5 * MIB + 512 + ARENA_MIN_BYTES,
        ARENA_MIN_BYTES - 1,
        ARENA_MIN_BYTES,
        30 * MIB,
        3 * MIB,
        2048,
    ]


# benchmarks/ledger.py on one H200, torch 2.11.0, 2026-11-21: torch's pool after loading less weights, KV
# cache and the workspace of matrix products, in MiB.
@pytest.mark.parametrize(
    ("size", "weights", "measured"),
    [
        *(("2B", "bf16", 93.9), ("2B", "fp8", 45.6), ("2B", "int4", 51.9)),
        *(("4B", "bf16", 91.2), ("4B", "fp8", 101.4), ("4B", "int4", 66.1)),
        *(("8B", "bf16", 35.7), ("8B", "fp8", 36.1), ("8B", "int4", 53.7)),
    ],
)
def test_reserved_bytes_match_torch(size: str, weights: str, measured: float) -> None:
    """Of an earlier engine: each matrix had its own allocation."""
    model = find_exact_models(size, weights)[0]
    alone = reserved_bytes(model.sizes.values()) - model.weight_bytes
    assert alone / MIB == pytest.approx(measured, abs=0.1)
    assert 0 <= model.pool <= alone


@pytest.mark.parametrize(("size", "measured"), [("2B", 6.1), ("4B", 91.5), ("8B", 180.0)])
def test_transformers_pool_matches_torch(size: str, measured: float) -> None:
    """It also has some tables of its own, 0.3 MiB."""
    assert find_exact_models(size, "bf16")[0].separate_pool / MIB == pytest.approx(measured, abs=0.4)

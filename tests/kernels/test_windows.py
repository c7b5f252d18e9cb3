"""Sliding-window attention by the kernels, against masked attention in float64."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.conftest import ON_GPU
from tests.kernels.test_attention import BATCHES, SHAPES, batch
from vlfit.kernels.attention.paged import AttentionTiles, block_attention, reference_attention
from vlfit.kernels.rows.row_ops import rope_store_kv

# Of a window of one token, of less than a tile, of a tile and of more. Every split is of decoding sequences.
DECODING = [("decoding alone", window, splits) for window in (1, 5, 16, 40) for splits in (1, 2, 3)]
CHUNKS = [
    (work, window, 1) for work in ("a chunk with a past", "several chunks") for window in (1, 5, 16, 40)
]
FAST = {(work, window, splits) for work, window, splits in DECODING if splits < 3 or window == 5}
FAST |= {
    ("a chunk with a past", 16, 1),
    *(each for each in CHUNKS if each[0] == "several chunks" and each[1] != 16),
}


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize(
    ("work", "window", "splits"),
    [
        pytest.param(*each, marks=() if ON_GPU or each in FAST else pytest.mark.slow)
        for each in (*DECODING, *CHUNKS)
    ],
)
def test_the_kernels(work: str, window: int, splits: int, device: torch.device) -> None:
    torch.manual_seed(0)
    works = BATCHES[work]
    decoding = next((index for index, (tokens, _) in enumerate(works) if tokens > 1), len(works))
    fresh, keys, values, plan = batch(SHAPES["tiny"], works, decoding, torch.float32, device)
    known_keys, known_values = keys.clone(), values.clone()
    query = rope_store_kv(fresh, plan.slot_mapping, known_keys, known_values)
    exact = reference_attention(
        query.double(), known_keys.double(), known_values.double(), plan, window=window
    )
    tiles = AttentionTiles(16, 16, 4, 1)
    out = block_attention(fresh, keys, values, plan, window=window, splits=splits, tiles=tiles)
    torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=2e-5)


@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_rows_of_one_sequence_that_are_verified_together(device: torch.device) -> None:
    """Draft tokens: each row's own token is part of its past, and the window ends with it."""
    torch.manual_seed(0)
    fresh, keys, values, plan = batch(SHAPES["tiny"], [(3, 9)], 0, torch.float32, device)
    known_keys, known_values = keys.clone(), values.clone()
    query = rope_store_kv(fresh, plan.slot_mapping, known_keys, known_values)
    exact = reference_attention(query.double(), known_keys.double(), known_values.double(), plan, window=5)
    past = torch.tensor([[0, 1, 10], [1, 1, 11], [2, 1, 12]], dtype=torch.int32, device=device)
    rows = replace(
        plan,
        block_tables=plan.block_tables.expand(3, -1).contiguous(),
        query_spans=past,
        num_decodes=3,
        max_query_len=0,
        no_store_slots=torch.full((3,), -1, dtype=torch.int32, device=device),
    )
    out = block_attention(fresh, keys, values, rows, window=5, splits=2, tiles=AttentionTiles(16, 16, 4, 1))
    torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=2e-5)

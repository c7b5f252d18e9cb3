"""Start and end of a decode step: RoPE tables, and the next inputs, against plain PyTorch."""

import pytest
import torch

from tests.kernels.conftest import DTYPES, TOLERANCES, relative_error
from vlfit.kernels.rows import row_ops as row_ops

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_axis", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.19])
def test_rope_cos_sin(has_axis: bool, factor: float, dtype: torch.dtype, device: torch.device) -> None:
    """Up to the positions of the longest contexts: the cosine of 262,143 is exact to the last bits, too."""
    positions = torch.tensor([[0, 5, 262143], [0, 9, 262143], [0, 2, 262143]], device=device)
    frequencies = 5e6 ** (-torch.arange(24, device=device) / 24)
    axis = torch.arange(24, device=device) % 3 if has_axis else None
    rows = positions[axis].T if axis is not None else positions[0, :, None].expand(3, 24)
    angles = (rows.float() * frequencies).double()
    cos, sin = row_ops.rope_cos_sin(positions, frequencies, axis, factor, dtype)
    assert cos.shape == sin.shape == (3, 1, 48)
    cos_sin = angles.cos() * factor, angles.sin() * factor
    assert relative_error(cos[:, 0], torch.cat((cos_sin[0], cos_sin[0]), 1)) < TOLERANCES[dtype]
    assert relative_error(sin[:, 0], torch.cat((-cos_sin[1], cos_sin[1]), 1)) < TOLERANCES[dtype]


def test_advance_decode_inputs(device: torch.device) -> None:
    """Within a block, into the next one, past the end of the table, and a padding row."""
    sampled = torch.tensor([11, 12, 13, 14], device=device)
    token_ids, positions = (torch.arange(4, dtype=torch.int32, device=device) for _ in range(2))
    slot_mapping = torch.tensor([4 * 7 + 1, 4 * 8 + 3, 4 * 2 + 3, -1], dtype=torch.int32, device=device)
    query_spans = torch.tensor(
        [[0, 1, 1], [1, 1, 3], [2, 1, 7], [3, 1, -1]], dtype=torch.int32, device=device
    )
    block_tables = torch.tensor([[7, 0], [8, 5], [9, 2], [0, 0]], dtype=torch.int32, device=device)
    row_ops.advance_decode_inputs(sampled, token_ids, positions, slot_mapping, query_spans, block_tables, 4)
    assert token_ids.tolist() == [11, 12, 13, 3]
    assert positions.tolist() == [1, 2, 3, 3]
    assert slot_mapping.tolist() == [4 * 7 + 2, 4 * 5, -1, -1]
    assert query_spans.tolist() == [[0, 1, 2], [1, 1, 4], [2, 1, 8], [3, 1, -1]]

"""M-RoPE positions of prompts equal those of the reference (``get_rope_index``)."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from vlfit.models.qwen3_vl.mrope import merge_order_indices, mrope_positions

IMAGE, VIDEO, START, END = 901, 902, 903, 904

# Each prompt is pieces: a number is that many text tokens, a grid is a picture or (time > 1) a clip.
PROMPTS: dict[str, list[int | tuple[int, int, int]]] = {
    "text": [7],
    "one picture": [3, (1, 4, 6), 2],
    "pictures side by side": [1, (1, 2, 8), (1, 6, 2), 5],
    "a clip": [2, (3, 4, 4), 4],
    "a clip between pictures": [2, (1, 4, 4), 1, (2, 2, 6), 1, (1, 8, 2), 3],
}


@pytest.fixture(scope="module")
def reference() -> Any:
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "vocab_size": 1000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        },
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                       "out_hidden_size": 16, "deepstack_visual_indexes": [0]},
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    return Qwen3VLModel(config)


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_equal_the_reference(reference: Any, name: str) -> None:
    ids: list[int] = []
    grids: list[tuple[int, int, int]] = []
    for piece in PROMPTS[name]:
        if isinstance(piece, int):
            ids += range(1, piece + 1)
            continue
        time, rows, columns = piece
        grids.append(piece)
        for _ in range(time):
            ids += [START, *[VIDEO if time > 1 else IMAGE] * (rows * columns // 4), END]
    token_types = [[1 if i == IMAGE else 2 if i == VIDEO else 0 for i in ids]]
    images, videos = ([g for g in grids if g[0] == 1], [g for g in grids if g[0] > 1])
    expected, delta = reference.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=torch.tensor(token_types),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
    )
    positions, following = mrope_positions(np.isin(ids, (IMAGE, VIDEO)), grids, merge=2)
    assert positions.tolist() == expected[:, 0].tolist()
    assert following == len(ids) + int(delta)


def test_merge_order_keeps_each_block_together() -> None:
    rows, columns = merge_order_indices(4, 6, 2)
    pairs = list(zip(rows.tolist(), columns.tolist(), strict=True))
    assert pairs[:8] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert sorted(pairs) == [(row, column) for row in range(4) for column in range(6)]

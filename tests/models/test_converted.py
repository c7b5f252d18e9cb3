"""Text-only models in few bits: what ``vlfit convert`` writes of them says what transformers says of the same
weights, widened.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.engine.test_parity import NEW_TOKENS, run
from tests.models.test_parity import CONVERSATIONS, expected_tokens
from tests.quantize.reference import dequantized_copy
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.plan.shapes import model_of
from vlfit.quantize.conversion import convert

CONVERTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp8, joined matrices": ("phi3", "fp8", {}),
    "int4, joined matrices": ("phi3", "int4", {}),
    "int4, biases, tied": ("qwen2", "int4", {}),
    "int4 from fp8": ("qwen3_fp8", "int4", {}),
    "int4, head and embedding in int8": ("qwen3_biased", "int4", {"head": "int8", "embedding": "int8"}),
}


@pytest.mark.parametrize("case", CONVERTED)
def test_greedy_tokens_equal_the_reference(
    tiny_decoder: Callable[[str], Path], tmp_path: Path, case: str
) -> None:
    name, weights, options = CONVERTED[case]
    convert(open_checkpoint(tiny_decoder(name)), weights, tmp_path / "new", **options)
    checkpoint = open_checkpoint(tmp_path / "new")
    assert checkpoint.weights_format == weights
    reference: Any = AutoModelForCausalLM.from_pretrained(
        dequantized_copy(tmp_path / "new", tmp_path / "wide"), dtype=torch.float32
    ).eval()
    reference.generation_config = GenerationConfig()
    engine = NativeEngine(
        checkpoint, EngineOptions(device="cpu", max_model_len=512, max_num_batched_tokens=48)
    )
    conversation = CONVERSATIONS["question"]
    expected = expected_tokens(engine, reference, conversation, NEW_TOKENS)
    assert run(engine, conversation) == [expected]
    assert len(set(expected)) > 5, "the reference says the same few tokens over and over: a weak test"


def test_fused_projections_are_planned_as_their_parts(tiny_decoder: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(tiny_decoder("phi3"))
    planned = model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "")
    sizes = {part: (matrix.rows, matrix.columns) for part, matrix in planned.layer.items()}
    assert sizes == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (64, 64)),
        **dict.fromkeys(("gate_proj", "up_proj"), (96, 64)),
        "down_proj": (64, 96),
    }
    in_files = sum(info.bytes for info in checkpoint.tensors.values())
    assert planned.weight_bytes == in_files // 2  # the files are in float32, a GPU computes in 16 bits

"""int8 parts beside quantized text layers on a GPU: they stay int8 and give the same tokens as a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_gpu import engine
from tests.engine.test_parity import CONVERSATIONS, run
from vlfit.checkpoint.source import open_checkpoint
from vlfit.layers.linear import Int8Linear
from vlfit.models.qwen3_vl.vision import VisionTower
from vlfit.quantize.conversion import convert

pytestmark = pytest.mark.gpu

REST = {"embedding": "int8", "vision": "int8"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "int4": ("untied_sharded", "int4", {"head": "int8", **REST}),
    "int4, a tied head": ("tied", "int4", REST),
    "int4 of fp8": ("fp8", "int4", REST),
    "fp8": ("fp8_untied_sharded", "fp8", {"head": "int8", **REST}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_tokens_as_on_a_cpu(tiny: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    name, weights, options = CASES[case]
    convert(open_checkpoint(tiny(name)), weights, tmp_path / "new", **options)
    conversations = list(CONVERSATIONS.values())
    on_gpu = engine(tmp_path / "new", "cuda")
    assert isinstance(on_gpu.runner.vision, VisionTower)
    assert isinstance(on_gpu.runner.vision.blocks[0].qkv, Int8Linear)
    assert run(on_gpu, *conversations) == run(engine(tmp_path / "new", "cpu"), *conversations)

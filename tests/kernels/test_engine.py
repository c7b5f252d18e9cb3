"""The engine as on a GPU (kernels, block tables, quantized weights), interpreted on the CPU.

``tests/engine/test_gpu.py`` is the same on a real GPU.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.awq_gptq import as_awq, as_gptq
from tests.compressed import EMBEDDING, Group, compress
from tests.engine.test_parity import CONVERSATIONS, run
from tests.engine.test_pooling import vectors_beside_answers
from tests.gguf_files import as_blocks
from tests.kernels.conftest import ON_GPU
from vlfit import kernels
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.kernels.attention import paged as attention
from vlfit.layers.embedding import Int8Embedding, PackedEmbedding
from vlfit.layers.linear import Fp8Linear, Int8Linear, PackedLinear, ReorderedLinear
from vlfit.plan.native.tiles import GemmTiles
from vlfit.quantize.conversion import convert

pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu.py runs it on the GPU"),
    pytest.mark.usefixtures("device"),
]
SPOKEN = [CONVERSATIONS["picture"], CONVERSATIONS["text"]]
TOKENS = 3
# Large tiles: the interpreter takes time for each program and step.
LARGE = GemmTiles(32, 128, 128, 4, 1)
LARGE_ATTENTION = attention.AttentionTiles(64, 64, 4, 1)


def engine(folder: Path) -> NativeEngine:
    """Chunks of 24 tokens: the image's prompt has a past, and the shorter prompt decodes beside it."""
    return NativeEngine(
        open_checkpoint(folder),
        EngineOptions(device="cpu", max_model_len=256, max_num_batched_tokens=24, max_num_seqs=2),
    )


def group_of_module(module: str) -> str | None:
    """Every linear layer, including those of the vision tower, and the embedding, which is the head."""
    return None if module.endswith("pos_embed") else "group_0"


@pytest.mark.parametrize(
    "weights",
    [
        "int4",
        "Q5_0",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("fp8", "int8", "awq", "gptq", "Q4_1")),
    ],
)
def test_the_same_answers_with_kernels(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    folder = tmp_path / "new"
    if weights == "int8":
        groups = {"group_0": Group(targets=("Linear", EMBEDDING))}
        folder, _ = compress(tiny("tied"), tmp_path, groups, group_of_module)
    elif weights == "awq":
        folder, _ = as_awq(tiny("odd_vocab_one_kv_head"), tmp_path, 16)
    elif weights == "gptq":
        folder, _ = as_gptq(tiny("tied"), tmp_path, ordered=True, symmetric=False)
    elif weights.startswith("Q"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        folder, _ = as_blocks(tiny("tied"), folder, weights)
    else:
        convert(open_checkpoint(tiny("odd_vocab_one_kv_head")), weights, folder)
    expected = run(engine(folder), *SPOKEN, tokens=TOKENS)
    vectors, answers = vectors_beside_answers(engine(folder), SPOKEN[1:], 2)
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    monkeypatch.setattr(kernels.gemm.quantized, "tiles_for", lambda *_: LARGE)
    monkeypatch.setattr(
        kernels.gemm.quantized, "MAX_FUSED_ROWS", 16
    )  # chunks are dequantized in slices, decode steps are not
    monkeypatch.setattr(kernels.gemm.quantized, "DEQUANT_BLOCK_N", 128)
    monkeypatch.setattr(kernels.attention.paged, "prefill_tiles", lambda *_, **__: LARGE_ATTENTION)
    monkeypatch.setattr(kernels.attention.paged, "num_decode_splits", lambda *_: 2)
    by_kernels = engine(folder)
    text = by_kernels.runner.text
    layer_classes = {"fp8": Fp8Linear, "int8": Int8Linear, "int4": PackedLinear, "awq": PackedLinear}
    blocks = dict.fromkeys(("Q5_0", "Q4_1"), PackedLinear)
    classes = {**layer_classes, **blocks, "gptq": ReorderedLinear}
    assert isinstance(text.layers[0].down, classes[weights])
    assert isinstance(text.embedding, Int8Embedding) == (weights == "int8")
    assert isinstance(text.head, Int8Linear) == (weights == "int8")
    assert isinstance(text.embedding, PackedEmbedding) == isinstance(text.head, PackedLinear)
    assert isinstance(text.head, PackedLinear) == (weights in blocks)
    assert run(by_kernels, *SPOKEN, tokens=TOKENS) == expected
    same_vectors, same_answers = vectors_beside_answers(by_kernels, SPOKEN[1:], 2)
    assert same_answers == answers
    np.testing.assert_allclose(same_vectors, vectors, atol=1e-3)

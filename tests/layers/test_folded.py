"""Layers whose products do what stands between them, against the same layers without that."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import ON_GPU, device, relative_error
from vlfit import kernels
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.kernels.attention import paged
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.kernels.rows import row_ops as fused
from vlfit.layers.fused import FUSED_MAX_ROWS, FUSED_MAX_WIDTH, fuse_layer, uses_fused_decode
from vlfit.layers.linear import DenseLinear
from vlfit.quantize.conversion import convert

__all__ = ["device"]  # a fixture


def test_few_rows_are_those_of_a_gpu_whose_dtype_can_wait_for_its_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not uses_fused_decode(torch.zeros(1, 8))
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    assert uses_fused_decode(torch.zeros(1, 8, dtype=torch.bfloat16))
    assert not uses_fused_decode(torch.zeros(FUSED_MAX_ROWS + 1, 8))
    assert not uses_fused_decode(torch.zeros(1, 8, dtype=torch.float16))


def test_wide_rows_in_16_bits_are_computed_as_ever() -> None:
    narrow, wide = (DenseLinear(torch.zeros(width, 8)) for width in (FUSED_MAX_WIDTH, FUSED_MAX_WIDTH + 8))
    assert fuse_layer(narrow, narrow, narrow, narrow) is not None
    assert fuse_layer(wide, wide, wide, wide) is None


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu.py runs it on the GPU")
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("weights", ["bf16", pytest.param("int4", marks=pytest.mark.slow)])
def test_the_same_logits_with_one_norm_for_itself(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    folder = tiny("odd_vocab_one_kv_head")
    if weights == "int4":
        convert(open_checkpoint(folder), weights, tmp_path / "new")
        folder = tmp_path / "new"
    engine = NativeEngine(
        open_checkpoint(folder), EngineOptions(device="cpu", max_model_len=64, max_num_seqs=FUSED_MAX_ROWS)
    )
    text, cache = engine.runner.text, engine.runner.cache
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    monkeypatch.setattr(paged, "num_decode_splits", lambda _: 1)
    norms = []
    counted = fused.add_rms_norm

    def count(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        norms.append(weight)
        return counted(hidden, delta, weight, eps)

    monkeypatch.setattr(fused, "add_rms_norm", count)
    size = cache.block_size
    table = torch.arange(FUSED_MAX_ROWS, dtype=torch.int32).view(FUSED_MAX_ROWS, 1)
    spans = torch.tensor([(row, 1, 0) for row in range(FUSED_MAX_ROWS)], dtype=torch.int32)
    plan = BlockAttentionMetadata(
        torch.arange(FUSED_MAX_ROWS, dtype=torch.int32) * size, table, spans, size, FUSED_MAX_ROWS, 0
    )
    ids, positions = torch.full((FUSED_MAX_ROWS,), 5), torch.zeros(3, FUSED_MAX_ROWS, dtype=torch.int32)

    def logits() -> Tensor:
        norms.clear()
        with torch.inference_mode():
            return text(ids, positions, None, cache, plan, None)

    folded = logits()
    assert len(norms) == 1
    monkeypatch.setattr(type(text), "_fused_layers", lambda _: [])
    apart = logits()
    assert len(norms) == 2 * len(text.layers) + 1
    assert relative_error(folded, apart.double()) < 1e-5

"""The fused decode path against separate norms."""

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
from vlfit.kernels.gemm.epilogue import ResidualEpilogue
from vlfit.kernels.rows import row_ops
from vlfit.layers.fused import (
    FUSED_MAX_ROWS,
    FUSED_MAX_WIDTH,
    fuse_layer,
    fused_linear,
    linear_add_residual,
    uses_fused_decode,
)
from vlfit.layers.linear import DenseLinear, Int8Linear, ReorderedLinear, StackedLinear
from vlfit.quantize.conversion import convert

__all__ = ["device"]  # a fixture


def test_fused_decode_is_for_few_rows_on_a_gpu_not_in_float16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not uses_fused_decode(torch.zeros(1, 8))
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    assert uses_fused_decode(torch.zeros(1, 8, dtype=torch.bfloat16))
    assert not uses_fused_decode(torch.zeros(FUSED_MAX_ROWS + 1, 8))
    assert not uses_fused_decode(torch.zeros(1, 8, dtype=torch.float16))


def test_wide_layers_in_16_bits_are_not_fused() -> None:
    narrow, wide = (DenseLinear(torch.zeros(width, 8)) for width in (FUSED_MAX_WIDTH, FUSED_MAX_WIDTH + 8))
    assert fuse_layer(narrow, narrow, narrow, narrow) is not None
    assert fuse_layer(wide, wide, wide, wide) is None


def test_projections_in_different_formats_share_the_norm(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    dense = DenseLinear(randn(24, 64))
    codes = torch.randint(-127, 128, (40, 64), generator=generator, dtype=torch.int8).to(device)
    narrow = Int8Linear(codes, randn(40, 2).abs() / 127)
    stacked = StackedLinear([dense, narrow])
    output, hidden, norm = DenseLinear(randn(64, 32)), randn(1, 64), randn(64)
    assert fuse_layer(stacked, output, dense, output) is not None
    rows = linear_add_residual(output, randn(1, 32), ResidualEpilogue(hidden, norm, 1e-6))
    expected = torch.cat([fused_linear(part, rows) for part in (dense, narrow)], dim=1)
    assert torch.equal(fused_linear(stacked, rows), expected)
    normed = hidden * torch.rsqrt(hidden.square().mean() + 1e-6) * norm
    assert relative_error(dense(normed), fused_linear(stacked, rows)[:, :24]) < 1e-5
    order = torch.arange(64, dtype=torch.int32)
    assert fuse_layer(StackedLinear([dense, ReorderedLinear(dense, order)]), output, dense, output) is None


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu.py runs it on the GPU")
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("weights", ["bf16", pytest.param("int4", marks=pytest.mark.slow)])
def test_fused_logits_equal_unfused_with_a_single_norm_kernel(
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
    monkeypatch.setattr(paged, "num_decode_splits", lambda *_: 1)
    norms = []
    add_rms_norm = row_ops.add_rms_norm

    def counted(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        norms.append(weight)
        return add_rms_norm(hidden, delta, weight, eps)

    monkeypatch.setattr(row_ops, "add_rms_norm", counted)
    size = cache.block_size
    table = torch.arange(FUSED_MAX_ROWS, dtype=torch.int32).view(FUSED_MAX_ROWS, 1)
    spans = torch.tensor([(row, 1, 0) for row in range(FUSED_MAX_ROWS)], dtype=torch.int32)
    metadata = BlockAttentionMetadata(
        torch.arange(FUSED_MAX_ROWS, dtype=torch.int32) * size, table, spans, size, FUSED_MAX_ROWS, 0
    )
    ids, positions = torch.full((FUSED_MAX_ROWS,), 5), torch.zeros(3, FUSED_MAX_ROWS, dtype=torch.int32)

    def logits() -> Tensor:
        norms.clear()
        with torch.inference_mode():
            return text(ids, positions, None, cache, metadata, None)

    fused = logits()
    assert len(norms) == 1
    monkeypatch.setattr(type(text), "_fused_layers", lambda _: [])
    unfused = logits()
    assert len(norms) == 2 * len(text.layers) + 1
    assert relative_error(fused, unfused.double()) < 1e-5

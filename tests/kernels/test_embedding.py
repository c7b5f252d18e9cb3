"""Quantized embeddings: rows by the kernel are those of plain PyTorch bit for bit; the tied head."""

from collections.abc import Callable

import pytest
import torch

from tests.kernels.conftest import DTYPES, two_level
from tests.kernels.test_linear import int4, int8, packed, to_device
from vlfit import kernels
from vlfit.kernels.gemm import quantized
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.layers.embedding import Int8Embedding, PackedEmbedding
from vlfit.layers.linear import Int8Linear, PackedLinear, dequantize_int8, dequantize_packed, first_outputs

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

# As wide as a part of a row that a program looks up, narrower, and wider by less than another part.
FORMS: dict[str, Callable[[], QuantizedWeight]] = {
    "int8, a scale a row": lambda: int8(30, 96),
    "int8, groups": lambda: int8(30, 384, 4),
    "int8, groups of no power of two": lambda: int8(30, 144, 4),
    "int8, wide": lambda: int8(30, 1284),
    "int4": lambda: int4(30, 512, 32),
    "int4, two levels": lambda: two_level(4, 30, 768, 16, 256, affine=False),
    "int4, minima": lambda: two_level(4, 30, 1280, 32, 256, affine=True),
    "int4, minima, groups of 16": lambda: two_level(4, 30, 256, 16, 256, affine=True),
    "int4, minima of each group": lambda: two_level(4, 30, 96, 32, 32, affine=True),
    "int5": lambda: packed(5, 30, 800),
    "int5, minima": lambda: two_level(5, 30, 768, 32, 256, affine=True),
    "int5, minima of each group": lambda: two_level(5, 30, 160, 32, 32, affine=True),
    "int6": lambda: packed(6, 30, 608),
    "int6, two levels": lambda: two_level(6, 30, 1280, 16, 256, affine=False),
    "iq4nl": lambda: packed(4, 30, 544, 32, "iq4nl"),
    "iq4nl, two levels": lambda: two_level(4, 30, 768, 32, 256, affine=False, codebook="iq4nl"),
    "e2m1, groups of 16": lambda: packed(4, 30, 576, 16, "e2m1"),
    "e2m1, powers of two": lambda: packed(4, 30, 96, 32, "e2m1", torch.bfloat16),
    "odd": lambda: two_level(4, 30, 768, 32, 256, affine=False, codebook="odd"),
}
IDS = [29, 0, 7, 7]


def embedding(weights: QuantizedWeight, dtype: torch.dtype) -> Int8Embedding | PackedEmbedding:
    if weights.format == "int8":
        return Int8Embedding(weights.codes, weights.scale, dtype)
    return PackedEmbedding(weights, dtype)


def with_short_scales(weights: QuantizedWeight) -> QuantizedWeight:
    """``weights`` whose sub-scales have six bits, as those of files: products are exact in float32."""
    if weights.is_affine:
        return QuantizedWeight(
            weights.codes,
            weights.scale & 0x3F3F,
            None,
            weights.block_shape,
            weights.super_scale,
            weights.bits,
        )
    return weights


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_rows(
    name: str,
    dtype: torch.dtype,
    ids_dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    weights = with_short_scales(FORMS[name]())
    if weights.format == "int8":
        expected = dequantize_int8(weights.codes, weights.scale, dtype)[IDS]
    else:
        expected = dequantize_packed(weights, dtype)[IDS]
    ids = torch.tensor(IDS, dtype=ids_dtype)
    plain = embedding(weights, dtype)
    assert torch.equal(plain(ids), expected)
    assert plain(ids[:0]).shape == (0, weights.in_features)
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    by_kernel = embedding(to_device(weights, device), dtype)
    rows = by_kernel(ids.to(device))
    assert rows.dtype == dtype
    assert torch.equal(rows.cpu(), expected)
    assert by_kernel(ids[:0].to(device)).shape == (0, weights.in_features)


def test_a_large_vocabulary(device: torch.device) -> None:
    """The last row, and rows around those that 16 bits can number."""
    torch.manual_seed(0)
    weights = packed(6, 70_000, 32)
    ids = torch.tensor([69_999, 65_536, 32_768])
    rows = quantized.lookup_rows(ids.to(device), to_device(weights, device), torch.float32)
    assert torch.equal(rows.cpu(), dequantize_packed(weights, torch.float32)[ids])


@pytest.mark.parametrize("name", FORMS)
def test_the_tied_head_has_the_same_memory(name: str) -> None:
    """So have its first outputs."""
    torch.manual_seed(0)
    weights = FORMS[name]()
    table = embedding(weights, torch.float32)
    head = table.head()
    assert isinstance(head, Int8Linear | PackedLinear)
    few = first_outputs(head, 8)
    assert isinstance(few, Int8Linear | PackedLinear)
    for part in (head, few):
        assert part.weights.codes.data_ptr() == weights.codes.data_ptr()
        assert part.weights.scale.data_ptr() == weights.scale.data_ptr()
    x = torch.randn(2, weights.in_features)
    values = table(torch.arange(30))
    assert torch.equal(head(x), x @ values.T)
    assert torch.allclose(few(x), head(x)[:, :8], rtol=1e-5, atol=1e-5)


def test_zero_points_are_refused() -> None:
    with pytest.raises(ValueError, match="zero points"):
        PackedEmbedding(int4(16, 64, 32, symmetric=False), torch.float32)

"""Row operations and dense GEMMs against plain PyTorch: bit-equal where both round alike."""

import pytest
import torch

from tests.kernels.conftest import DTYPES, ON_GPU, TOLERANCES, relative_error
from vlfit.kernels.gemm import dense as dense
from vlfit.kernels.gemm import quantized as quantized
from vlfit.kernels.gemm.dense import DenseTiles
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.kernels.launch import tile_counters
from vlfit.kernels.rows import row_ops as row_ops
from vlfit.kernels.target import TargetCard
from vlfit.layers.norm import rms_norm
from vlfit.layers.rope import apply_rope
from vlfit.plan.native import tiles

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (5, 2048)])
@pytest.mark.parametrize("has_delta", [True, False])
def test_add_rms_norm(
    rows: int, width: int, has_delta: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    hidden, delta = (torch.randn(2, rows, width) * 3).to(device, dtype)
    weight = torch.randn(width).to(device, dtype)
    summed = hidden + delta if has_delta else hidden.clone()
    out = row_ops.add_rms_norm(hidden, delta if has_delta else None, weight, EPS)
    assert torch.equal(hidden, summed)
    expected = (
        summed.double() / (summed.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    )
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCES[dtype]
    assert relative_error(out, rms_norm(summed, weight, EPS).double()) < TOLERANCES[dtype] / 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim", "rotated"), [(4, 2, 16, 16), (3, 1, 24, 24), (2, 2, 20, 12)]
)
@pytest.mark.parametrize("has_norm", [True, False])
def test_rope_store_kv(
    heads: int,
    key_heads: int,
    head_dim: int,
    rotated: int,
    has_norm: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    rows = 5
    packed = torch.randn(rows, heads + 2 * key_heads, head_dim).to(device, dtype)
    weight = torch.randn(heads + key_heads, head_dim).to(device, dtype) if has_norm else None
    cos, sin = torch.randn(2, rows, 1, rotated).to(device, dtype)
    slot_mapping = torch.tensor([7, 2, -1, 0, 9], device=device)
    k_cache, v_cache = torch.full((2, 11, key_heads, head_dim), 77.0).to(device, dtype)
    qkv = row_ops.PackedQKV(packed, weight, cos, sin, EPS)
    query = row_ops.rope_store_kv(qkv, slot_mapping, k_cache, v_cache)
    qk = packed[:, : heads + key_heads].double()
    if weight is not None:
        qk = rms_norm(packed[:, : heads + key_heads], weight, EPS).double()
    rotated_qk = apply_rope(qk[..., :rotated], cos.double(), sin.double())
    qk = torch.cat((rotated_qk, qk[..., rotated:]), -1)
    assert relative_error(query, qk[:, :heads]) < TOLERANCES[dtype]
    written = slot_mapping >= 0
    assert relative_error(k_cache[slot_mapping[written]], qk[written, heads:]) < TOLERANCES[dtype]
    assert torch.equal(v_cache[slot_mapping[written]], packed[written, heads + key_heads :])
    others = torch.tensor([slot for slot in range(11) if slot not in slot_mapping.tolist()], device=device)
    assert (k_cache[others] == 77).all()
    assert (v_cache[others] == 77).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(5, 2 * 300).to(device, dtype)
    gate, up = gate_up.double().chunk(2, -1)
    out = row_ops.silu_and_mul(gate_up)
    assert relative_error(out, torch.nn.functional.silu(gate) * up) < TOLERANCES[dtype] * 1.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate_rows(dtype: torch.dtype, device: torch.device) -> None:
    """The gate of each head lies behind its query, as a doubled projection leaves them."""
    torch.manual_seed(0)
    x = torch.randn(5, 3 * 24).to(device, dtype)
    gate = torch.randn(5, 3, 48).to(device, dtype)[:, :, 24:]
    expected = x.double() * gate.double().sigmoid().reshape(5, 72)
    out = row_ops.gate_rows(x, gate)
    assert out is x
    assert relative_error(out, expected) < TOLERANCES[dtype] * 1.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 300), (3, 70, 512), (16, 33, 128)])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_dense_linear(
    rows: int,
    outputs: int,
    inputs: int,
    splits: int,
    parts: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Twice, because the second call starts with the counters that the first leaves."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs).to(device, dtype), torch.randn(outputs, inputs).to(device, dtype)
    bias = torch.randn(outputs).to(device, dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for _ in range(2):
        out = dense.dense_linear(x, weight, bias, DenseTiles(32, 128, 4, 2, parts), splits)
        assert out.dtype == dtype
        assert relative_error(out, expected) < TOLERANCES[dtype]
    assert not tile_counters(device).any()


@pytest.mark.parametrize(
    ("outputs", "inputs", "many", "few"), [(2048, 2048, 4, 2), (2048, 6144, 4, 2), (1024, 4096, 8, 4)]
)
def test_few_multiprocessors_split_less(outputs: int, inputs: int, many: int, few: int) -> None:
    default = dense.dense_tiles(torch.bfloat16)
    cards = [None, TargetCard((9, 0)), TargetCard((9, 0), multiprocessors=132)]
    assert [dense.dense_splits(outputs, inputs, default, card) for card in cards] == [many] * 3
    assert dense.dense_splits(outputs, inputs, default, TargetCard((9, 0), multiprocessors=30)) == few


@pytest.mark.parametrize("inner", [40, 64])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("form", ["dense", "fp8", "int4"])
def test_swiglu_epilogue(form: str, splits: int, inner: int, device: torch.device) -> None:
    """Equal to the GEMM followed by ``silu_and_mul``, up to the order of additions."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    rows, inputs = (1 if form == "int4" else 3), 768
    x = torch.randn(rows, inputs).to(device, dtype)
    bias = torch.randn(2 * inner).to(device, dtype)

    def product(gated: bool) -> torch.Tensor:
        if form == "dense":
            return dense.dense_linear(x, weight, bias, DenseTiles(32, 128, 4, 2), splits, gated)
        return quantized.quantized_linear(
            x, quantized_weight, bias, tiles.GemmTiles(8, 32, 128, 4, 2), splits, swiglu=gated
        )

    weight = torch.randn(2 * inner, inputs).to(device, dtype)
    scale = torch.rand(-(-2 * inner // 128), inputs // 128).to(device)
    codes = torch.randn(2 * inner, inputs).to(torch.float8_e4m3fn).to(device)
    quantized_weight = QuantizedWeight(codes, scale, None, (128, 128))
    if form == "int4":
        words = torch.randint(-(2**31), 2**31, (2 * inner, inputs // 8)).to(torch.int32).to(device)
        scale = (torch.rand(2 * inner, inputs // 32) * 0.01).to(device, dtype)
        quantized_weight = QuantizedWeight(words, scale, None, (1, 32))
    assert relative_error(product(gated=True), row_ops.silu_and_mul(product(gated=False))) < TOLERANCES[dtype]

"""Steps between products, by the kernels, against plain PyTorch: bit for bit where it rounds alike."""

import pytest
import torch

from tests.kernels.conftest import DTYPES, ON_GPU, TOLERANCES, relative_error
from vlfit.kernels.gemm import dense as few_rows
from vlfit.kernels.gemm import quantized as linear
from vlfit.kernels.gemm.dense import Tiles
from vlfit.kernels.launch import arrivals
from vlfit.kernels.rows import row_ops as fused
from vlfit.layers.norm import rms_norm
from vlfit.layers.rope import rotate
from vlfit.plan.native import tiles

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (5, 2048)])
@pytest.mark.parametrize("has_delta", [True, False])
def test_residual_and_norm(
    rows: int, width: int, has_delta: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    hidden, delta = (torch.randn(2, rows, width) * 3).to(device, dtype)
    weight = torch.randn(width).to(device, dtype)
    summed = hidden + delta if has_delta else hidden.clone()
    out = fused.add_norm(hidden, delta if has_delta else None, weight, EPS)
    assert torch.equal(hidden, summed)
    exact = summed.double() / (summed.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert out.dtype == dtype
    assert relative_error(out, exact) < TOLERANCES[dtype]
    assert relative_error(out, rms_norm(summed, weight, EPS).double()) < TOLERANCES[dtype] / 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim", "rotated"), [(4, 2, 16, 16), (3, 1, 24, 24), (2, 2, 20, 12)]
)
@pytest.mark.parametrize("has_norm", [True, False])
def test_rotation_into_the_cache(
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
    joined = torch.randn(rows, heads + 2 * key_heads, head_dim).to(device, dtype)
    weight = torch.randn(heads + key_heads, head_dim).to(device, dtype) if has_norm else None
    cosines, sines = torch.randn(2, rows, 1, rotated).to(device, dtype)
    slots = torch.tensor([7, 2, -1, 0, 9], device=device)
    keys, values = torch.full((2, 11, key_heads, head_dim), 77.0).to(device, dtype)
    fresh = fused.Fresh(joined, weight, cosines, sines, EPS)
    query = fused.rotate_and_store(fresh, slots, keys, values)
    both = joined[:, : heads + key_heads].double()
    if weight is not None:
        both = rms_norm(joined[:, : heads + key_heads], weight, EPS).double()
    turned = rotate(both[..., :rotated], cosines.double(), sines.double())
    both = torch.cat((turned, both[..., rotated:]), -1)
    assert relative_error(query, both[:, :heads]) < TOLERANCES[dtype]
    written = slots >= 0
    assert relative_error(keys[slots[written]], both[written, heads:]) < TOLERANCES[dtype]
    assert torch.equal(values[slots[written]], joined[written, heads + key_heads :])
    others = torch.tensor([slot for slot in range(11) if slot not in slots.tolist()], device=device)
    assert (keys[others] == 77).all()
    assert (values[others] == 77).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(5, 2 * 300).to(device, dtype)
    gate, up = gate_up.double().chunk(2, -1)
    out = fused.silu_and_multiply(gate_up)
    assert relative_error(out, torch.nn.functional.silu(gate) * up) < TOLERANCES[dtype] * 1.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 300), (3, 70, 512), (16, 33, 128)])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_few_rows(
    rows: int,
    outputs: int,
    inputs: int,
    splits: int,
    parts: int,
    has_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Twice, as what the first leaves behind is what the second begins with."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs).to(device, dtype), torch.randn(outputs, inputs).to(device, dtype)
    bias = torch.randn(outputs).to(device, dtype) if has_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for _ in range(2):
        out = few_rows.multiply(x, weight, bias, Tiles(32, 128, 4, 2, parts), splits)
        assert out.dtype == dtype
        assert relative_error(out, exact) < TOLERANCES[dtype]
    assert not arrivals(device).any()


@pytest.mark.parametrize("inner", [40, 64])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("form", ["dense", "fp8", "int4"])
def test_gates_within_a_product(form: str, splits: int, inner: int, device: torch.device) -> None:
    """As the product and then the step: both round where PyTorch does. To the bit but for the order in which
    a matrix unit, or the library that stands for it here, adds up.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    rows, inputs = (1 if form == "int4" else 3), 768
    x = torch.randn(rows, inputs).to(device, dtype)
    bias = torch.randn(2 * inner).to(device, dtype)

    def product(gated: bool) -> torch.Tensor:
        if form == "dense":
            return few_rows.multiply(x, weight, bias, Tiles(32, 128, 4, 2), splits, gated)
        return linear.linear(x, narrow, bias, tiles.Tiles(8, 32, 128, 4, 2), splits, gated=gated)

    weight = torch.randn(2 * inner, inputs).to(device, dtype)
    scale = torch.rand(-(-2 * inner // 128), inputs // 128).to(device)
    codes = torch.randn(2 * inner, inputs).to(torch.float8_e4m3fn).to(device)
    narrow = linear.NarrowWeights(codes, scale, None, (128, 128))
    if form == "int4":
        words = torch.randint(-(2**31), 2**31, (2 * inner, inputs // 8)).to(torch.int32).to(device)
        scale = (torch.rand(2 * inner, inputs // 32) * 0.01).to(device, dtype)
        narrow = linear.NarrowWeights(words, scale, None, (1, 32))
    assert (
        relative_error(product(gated=True), fused.silu_and_multiply(product(gated=False))) < TOLERANCES[dtype]
    )

"""Rows in FP8 times weights in FP8: rounded as plain PyTorch does it, products against float64 of that."""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import ON_GPU, TOLERANCES, relative_error
from tests.kernels.test_linear import fp8, int4, on, widened
from vlfit import kernels
from vlfit.kernels.gemm import fp8 as eight_bits
from vlfit.kernels.gemm.fp8 import EightBits, Tiles
from vlfit.layers import fused
from vlfit.layers.linear import Fp8Linear
from vlfit.plan.native.tiles import Means

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

DTYPE = torch.bfloat16 if ON_GPU else torch.float16
# What rounding numbers to 3 bits of mantissa may change, relatively: each by up to 2^-4 of its power of two,
# evenly spread, which is 2^-4 / sqrt(3) of it, and 0.72 of that of a number of that binade on average.
ROUNDED = 0.027


@pytest.fixture(autouse=True)
def able(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card does not multiply float8")


def rows_of(count: int, width: int, device: torch.device) -> Tensor:
    """Rows with an outlier, a group of zeros, and numbers of all sizes."""
    x = torch.randn(count, width) * 10 ** torch.linspace(-3, 2, count)[:, None]
    x[:, 5] *= 50
    x[0, 128:256] = 0
    return x.to(device, DTYPE)


def check(found: EightBits, x: Tensor, *, exactly: bool = False) -> None:
    """``found`` is ``x`` rounded: the very codes, but for a few that lie on an edge, unless the interpreter
    has rounded on the way there, for it cuts bits off (Triton 3.7).
    """
    exact = eight_bits.plain_quantize(x)
    assert found.rows == len(x)
    rows = slice(0, found.rows)
    found = EightBits(found.codes[rows], found.scale[:, rows], found.rows, found.dtype)
    assert found.scale.shape == exact.scale.shape
    edge = 1e-6 if exactly else 2.0**-7 if ON_GPU else 2.0**-9
    torch.testing.assert_close(found.scale.cpu(), exact.scale.cpu(), rtol=edge, atol=0)
    others = found.codes.cpu().view(torch.uint8) != exact.codes.cpu().view(torch.uint8)
    assert float(others.float().mean()) < (2e-3 if exactly else 0.2)
    wide = eight_bits.plain_wide(found).cpu()
    assert relative_error(wide, eight_bits.plain_wide(exact).cpu()) < (2e-3 if exactly else 0.02)
    assert relative_error(wide, x.double().cpu()) < ROUNDED


@pytest.mark.parametrize("width", [256, 1280, 2560])
def test_rows_are_rounded_where_they_lie(width: int, device: torch.device) -> None:
    torch.manual_seed(0)
    x = rows_of(3, 2 * width, device)[:, :width]
    found = eight_bits.quantize(x)
    check(found, x, exactly=True)


@pytest.mark.parametrize("first", [True, False])
def test_norms_are_rounded_as_they_are_found(first: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    hidden, delta = rows_of(3, 640, device), rows_of(3, 640, device)
    weight = torch.randn(640).to(device, DTYPE)
    there = hidden.clone()
    found = eight_bits.add_norm(there, None if first else delta, weight, 1e-6)
    before = hidden.cpu()
    exact = fused.add_norm(before, None if first else delta.cpu(), weight.cpu(), 1e-6)
    assert torch.equal(there.cpu(), before)
    check(found, exact)


def test_what_gates_let_through_is_rounded(device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = rows_of(3, 2 * 1280, device).clamp(-80, 80)
    found = eight_bits.silu_and_multiply(gate_up)
    exact = fused.silu_and_multiply(gate_up.cpu())
    check(found, exact)


@pytest.mark.parametrize("rows", [1, 70, *([257, 808, 2050] if ON_GPU else [])])  # the most: by cuBLAS
@pytest.mark.parametrize(
    ("outputs", "inputs", "block"),
    [
        (256, 256, (128, 128)),
        (200, 384, (128, 128)),
        (96, 256, (32, 128)),
        (70, 256, (1, 256)),
        (130, 128, (130, 128)),
        *([(2560, 9728, (128, 128)), (6144, 2560, (1, 2560))] if ON_GPU else []),
    ],
)
def test_products(rows: int, outputs: int, inputs: int, block: tuple[int, int], device: torch.device) -> None:
    torch.manual_seed(rows)
    weights = on(fp8(outputs, inputs, block), device)
    bias = torch.randn(outputs).to(device, DTYPE) if rows % 2 else None
    x = eight_bits.quantize(rows_of(rows, inputs, device))
    tiles = None if ON_GPU else Tiles(64, 64, 4, 2, 2)
    out = eight_bits.multiply(x, weights, bias, tiles)
    exact = eight_bits.plain_wide(x) @ widened(weights).T + (0 if bias is None else bias.double())
    assert out.dtype == DTYPE
    # Matrix units of Hopper keep 14 bits of what they add up, of 128 inputs at a time.
    assert relative_error(out, exact) < TOLERANCES[DTYPE] + (2.0**-13 if ON_GPU else 0)


def test_a_layers_halves_hand_rows_on_in_eight_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm, products and gates against float64: what three roundings of rows cost, and no more."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, "used_on", lambda device: True)
    monkeypatch.setattr(eight_bits, "means", lambda device: Means(eight_bits=True))
    monkeypatch.setattr(eight_bits, "WIDEN_ROWS", 8)
    made: list[int] = []
    room = eight_bits._room

    def counted(rows: int, width: int, dtype: torch.dtype, there: torch.device) -> EightBits:
        made.append(width)
        return room(rows, width, dtype, there)

    monkeypatch.setattr(eight_bits, "_room", counted)
    gate_up, down = (on(fp8(*shape, (128, 128)), device) for shape in ((256, 256), (256, 128)))
    first, last = (Fp8Linear(each.codes, each.scale, each.block) for each in (gate_up, down))
    hidden, delta = (torch.randn(9, 256).to(device, DTYPE) for _ in range(2))
    weight = torch.ones(256).to(device, DTYPE)
    wide = hidden.double() + delta.double()
    x = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt()
    gate, up = (x @ widened(gate_up).T).chunk(2, dim=1)
    exact = (torch.nn.functional.silu(gate) * up) @ widened(down).T
    found = fused.feed_forward(first, last, hidden.clone(), delta, weight, 1e-6)
    assert made == [256, 128]
    assert relative_error(found, exact) < 2 * ROUNDED
    joined = fused.normed(first, hidden.clone(), delta, weight, 1e-6)
    assert relative_error(joined, x @ widened(gate_up).T) < ROUNDED
    assert relative_error(first(x.to(DTYPE)), x @ widened(gate_up).T) < ROUNDED
    assert made == [256, 128, 256, 256]


def test_which_weights_and_rows_it_is_for() -> None:
    assert eight_bits.fits(fp8(70, 256, (128, 128)))
    assert eight_bits.fits(fp8(70, 256, (1, 256)))
    assert not eight_bits.fits(fp8(70, 256, (128, 64)))
    assert not eight_bits.fits(fp8(70, 200, (128, 128)))
    assert not eight_bits.fits(int4(70, 256, 128))
    assert not eight_bits.takes(fp8(70, 256, (128, 128)), 808, torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize("way", ["right", "first block for all", "blocks exchanged", "not at all"])
def test_the_library_is_asked_for_both_blocks_of_weights(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for cuBLAS, which may know the layout of weights' scales by another name."""

    def scaled(x: Tensor, weight: Tensor, scale: Tensor, by: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        if way == "not at all":
            raise RuntimeError("no such product")
        by = {"first block for all": by[:, :1].expand_as(by), "blocks exchanged": by.flip(1)}.get(way, by)
        rows = x.float() * scale.repeat_interleave(128, 1)
        wide = weight.float() * by.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (rows @ wide).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    assert eight_bits.multiplies_rightly(torch.device("cpu")) == (way == "right")

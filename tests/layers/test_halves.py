"""Weights in float16 with products in float32: numbers, the bytes that the plan knows, sleep, and words."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.sleeping import settled
from tests.tiny import build_tiny
from vlfit.api.conversation import ask
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.memory.usage import halves_in
from vlfit.layers import cpu_linear as halves
from vlfit.layers.cpu_linear import HalfLinear, HalfPacker, piece_rows, uses_half_weights
from vlfit.plan.native import ram as in_ram
from vlfit.plan.native.expectation import expect_in_ram

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not uses_half_weights(CPU, torch.float32), reason="this torch has no such products"
)


@pytest.fixture
def packing() -> Iterator[HalfPacker]:
    packing = HalfPacker()
    yield packing
    packing.close()


@pytest.fixture
def small_matrices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(in_ram, "LEAST_INPUTS", 1)


def may_be_off(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """How far products and sums in float32, in any order, may be from the exact ones: [rows, out].

    A term ``x_i w_i`` is rounded when it is made (or with its first sum, where the unit fuses the two), then
    with each sum that it goes through: at most n - 1 of them and the one with the bias, n + 1 in all. Each
    multiplies by 1 + d, ``|d| <= u = 2**-24``, so that the error is at most
    ``gamma (sum |x_i| |w_i| + |bias|)``, ``gamma = m u / (1 - m u)``, m = n + 1 (Higham, Accuracy and
    Stability, 3.1). One more in m pays many times for the sums in float64 to which it is compared, whose u is
    2**-53. Powers of two round nothing.

    The weights, of bfloat16, are whole in float16 down to 2**-17; smaller ones are rounded to a multiple of
    2**-24, so that they lose at most 2**-25. That is of numbers taken as they are. Others are multiplied by
    the power of two that brings the largest of a matrix to 2**13 or more, but not to 2**14: what they lose is
    at most 2**-25 / 2**13 of the largest, and only where they are below 2**-17 / 2**13 of it.
    """
    rounded = (x.shape[1] + 2) * 2.0**-24
    x, weight, bias = x.double().abs(), weight.double().abs(), bias.double().abs()
    largest = float(weight.max())
    unit = 1.0 if halves.SMALL <= largest < halves.LARGE else largest / 2**13
    lost = (weight < 2.0**-17 * unit).double() * 2.0**-25 * unit
    return rounded / (1 - rounded) * (x @ weight.T + bias) + x @ lost.T


def exactly(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T + bias.double()


@pytest.mark.parametrize("scale", [0.02, 1e-6, 3e4], ids=["usual", "small numbers only", "large numbers"])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("columns", [64, 600])
def test_weights_of_16_bits_multiply_as_in_float32(
    packing: HalfPacker, scale: float, rows: int, columns: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, columns).mul_(scale).bfloat16()
    x, bias = torch.randn(rows, columns), torch.randn(96) * scale
    layer = HalfLinear([packing.half(part.float()) for part in weight.split(32)], bias)
    packing.settle()
    off = (layer(x) - exactly(x, weight, bias)).abs()
    may = [may_be_off(x, *part) for part in zip(weight.split(32), bias.split(32), strict=True)]
    assert (off <= torch.cat(may, dim=1)).all()


@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_allowed_to_float32_is_not_enough_for_16_bits(rows: int, dtype: torch.dtype) -> None:
    """Neither for sums nor for numbers that are rounded before they are multiplied."""
    torch.manual_seed(0)
    for columns in (64, 600):
        weight = torch.randn(96, columns).mul_(0.02).bfloat16()
        x, bias = torch.randn(rows, columns), torch.randn(96) * 0.02
        exact, may = exactly(x, weight, bias), may_be_off(x, weight, bias)
        sums = torch.zeros(rows, 96, dtype=dtype)
        for each, beside in zip(x.T, weight.float().T, strict=True):
            sums = (sums + each[:, None] * beside).to(dtype)
        assert ((sums.float() + bias - exact).abs() > may).any()
        if columns == 64:  # the longer the sums, the more is allowed to them
            assert ((exactly(x.to(dtype), weight, bias) - exact).abs() > may).any()


def test_other_weights_lose_what_is_below_11_bits(packing: HalfPacker) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    half = packing.half(weight.clone())
    packing.settle()
    read_back = half(torch.eye(512)).T
    assert ((read_back - weight).abs() <= weight.abs() * 2**-11 + 2**-25).all()


def test_pieces_are_whole_blocks() -> None:
    assert piece_rows(2560) % in_ram.BLOCK_OUTPUTS == 0
    assert piece_rows(2**30) == in_ram.BLOCK_OUTPUTS


@pytest.mark.parametrize("name", ["tied", "untied_sharded", "fp8", "half_with_biases"])
@pytest.mark.usefixtures("small_matrices_too")
def test_the_plan_knows_what_they_take(name: str, tmp_path: Path) -> None:
    """But for the table of rotary frequencies, which is no weight."""
    folder = build_tiny(name, tmp_path / name, None if name == "fp8" else "bfloat16")
    with NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=256)) as backend:
        account = backend.account()
        assert halves_in(backend.engine.runner.text)
        assert halves_in(backend.engine.runner.vision)
    assert account.settings.cpu_16_bit
    lines = expect_in_ram(open_checkpoint(folder), account.settings.kv_tokens, 4, cpu_16_bit=True).lines
    held = {**account.memory.weights, "kv_cache": account.memory.kv_cache}
    for line in lines:
        assert 0 <= held[line.line] - line.bytes < 512, line.line


@pytest.mark.usefixtures("small_matrices_too")
def test_they_are_given_back_asleep_and_there_again_awake(tmp_path: Path) -> None:
    folder = build_tiny("tied", tmp_path / "tied", "bfloat16")
    with NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=256)) as backend:
        words = say(backend)
        before = sum(backend.account().memory.weights.values())
        kept = halves_in(backend.engine.runner.text)
        rest = settled(backend.sleep())
        assert rest.asleep is not None
        assert rest.asleep.freed >= before
        assert sum(half.nbytes() for half in kept) == 0
        assert say(backend) == words
        assert sum(backend.account().memory.weights.values()) == before


def test_the_same_words_as_with_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny("tied", tmp_path / "tied", "bfloat16")
    with NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=256)) as backend:
        assert not halves_in(backend.engine.runner.text)  # they are too small to be worth it
        words = say(backend)
    monkeypatch.setattr(in_ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(in_ram, "LEAST_INPUTS", 1)
    with NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=256)) as backend:
        assert halves_in(backend.engine.runner.text)
        assert say(backend) == words


def test_what_computes_otherwise_has_none() -> None:
    assert not uses_half_weights(CPU, torch.bfloat16)
    assert not uses_half_weights(torch.device("cuda"), torch.float32)


def say(backend: NativeBackend) -> str:
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    return backend.stream(ask("what is this?"), sampling).answer().text


def test_little_waits_to_be_laid_out(monkeypatch: pytest.MonkeyPatch, packing: HalfPacker) -> None:
    """And what is larger than all that may wait, waits alone."""
    monkeypatch.setattr(halves, "_WAITING", 3 * 32 * 512)
    waiting: list[int] = []
    fill = halves.HalfMatrix.fill

    def watched(half: halves.HalfMatrix, weight: torch.Tensor) -> Callable[[], None]:
        pack = fill(half, weight)

        def slowly() -> None:
            time.sleep(0.01)
            waiting.append(packing._waiting)
            pack()

        return slowly

    monkeypatch.setattr(halves.HalfMatrix, "fill", watched)
    packed = [packing.half(torch.ones(rows, 512)) for rows in (32, 32, 64, 32, 128, 32)]
    packing.settle()
    assert max(waiting) == 128 * 512
    assert sorted(waiting)[-2] <= 3 * 32 * 512
    assert [float(half(torch.ones(1, 512))[0, 0]) for half in packed] == [512.0] * 6

"""float16 weights on a CPU: error bounds, planned bytes, sleep, answers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.sleeping import sleep_result
from tests.tiny import build_tiny
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.memory.usage import cpu_matrices_in
from vlfit.layers import cpu_linear as halves
from vlfit.layers.cpu_linear import HalfLinear, HalfPacker, rows_per_piece, uses_half_weights
from vlfit.plan.native import ram as in_ram
from vlfit.plan.native.expectation import expect_in_ram

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not uses_half_weights(CPU, torch.float32), reason="this torch has no float16 GEMM"
)


@pytest.fixture(autouse=True)
def no_compiled_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them weights stay as they are stored (``test_cpu_stored.py``)."""
    monkeypatch.setenv("VLFIT_CPU_KERNELS", "0")


@pytest.fixture
def packer() -> Iterator[HalfPacker]:
    packer = HalfPacker()
    yield packer
    packer.close()


@pytest.fixture
def small_matrices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(in_ram, "LEAST_INPUTS", 1)


def error_bound(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
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


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T + bias.double()


@pytest.mark.parametrize("scale", [0.02, 1e-6, 3e4], ids=["usual", "small numbers only", "large numbers"])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("columns", [64, 600])
def test_float16_weights_multiply_within_float32_error(
    packer: HalfPacker, scale: float, rows: int, columns: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, columns).mul_(scale).bfloat16()
    x, bias = torch.randn(rows, columns), torch.randn(96) * scale
    layer = HalfLinear([packer.pack(part.float()) for part in weight.split(32)], bias)
    packer.wait()
    error = (layer(x) - exact_linear(x, weight, bias)).abs()
    bounds = [error_bound(x, *part) for part in zip(weight.split(32), bias.split(32), strict=True)]
    assert (error <= torch.cat(bounds, dim=1)).all()


@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_error_bound_excludes_16_bit_arithmetic(rows: int, dtype: torch.dtype) -> None:
    """Neither sums in 16 bits nor inputs rounded to 16 bits pass it."""
    torch.manual_seed(0)
    for columns in (64, 600):
        weight = torch.randn(96, columns).mul_(0.02).bfloat16()
        x, bias = torch.randn(rows, columns), torch.randn(96) * 0.02
        exact, bound = exact_linear(x, weight, bias), error_bound(x, weight, bias)
        sums = torch.zeros(rows, 96, dtype=dtype)
        for each, beside in zip(x.T, weight.float().T, strict=True):
            sums = (sums + each[:, None] * beside).to(dtype)
        assert ((sums.float() + bias - exact).abs() > bound).any()
        if columns == 64:  # the longer the sums, the more is allowed to them
            assert ((exact_linear(x.to(dtype), weight, bias) - exact).abs() > bound).any()


def test_float32_weights_are_rounded_to_11_bits(packer: HalfPacker) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    matrix = packer.pack(weight.clone())
    packer.wait()
    read_back = matrix(torch.eye(512)).T
    assert ((read_back - weight).abs() <= weight.abs() * 2**-11 + 2**-25).all()


def test_pieces_are_multiples_of_blocks() -> None:
    assert rows_per_piece(2560) % in_ram.BLOCK_OUTPUTS == 0
    assert rows_per_piece(2**30) == in_ram.BLOCK_OUTPUTS


@pytest.mark.parametrize("name", ["tied", "untied_sharded", "fp8", "half_with_biases"])
@pytest.mark.usefixtures("small_matrices_too")
def test_planned_bytes(name: str, tmp_path: Path) -> None:
    """Except the RoPE frequencies, which are no weight."""
    folder = build_tiny(name, tmp_path / name, None if name == "fp8" else "bfloat16")
    with NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=256)) as backend:
        account = backend.account()
        assert cpu_matrices_in(backend.engine.runner.text)
        assert cpu_matrices_in(backend.engine.runner.vision)
    assert account.settings.cpu_16_bit
    lines = expect_in_ram(
        open_checkpoint(folder), account.settings.kv_tokens, 4, cpu_16_bit=True, sequences=1
    ).lines
    actual = {**account.memory.weights, "kv_cache": account.memory.kv_cache}
    for line in lines:
        assert 0 <= actual[line.line] - line.bytes < 512, line.line


@pytest.mark.usefixtures("small_matrices_too")
def test_sleep_frees_them_and_waking_restores_them(tmp_path: Path) -> None:
    folder = build_tiny("tied", tmp_path / "tied", "bfloat16")
    with NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=256)) as backend:
        text = answer(backend)
        before = sum(backend.account().memory.weights.values())
        kept = cpu_matrices_in(backend.engine.runner.text)
        rest = sleep_result(backend.sleep())
        assert rest.asleep is not None
        assert rest.asleep.freed_bytes >= before
        assert sum(half.nbytes() for half in kept) == 0
        assert answer(backend) == text
        assert sum(backend.account().memory.weights.values()) == before


def test_the_same_answer_as_with_float32_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny("tied", tmp_path / "tied", "bfloat16")
    with NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=256)) as backend:
        assert not cpu_matrices_in(backend.engine.runner.text)  # too small to be packed
        text = answer(backend)
    monkeypatch.setattr(in_ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(in_ram, "LEAST_INPUTS", 1)
    with NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=256)) as backend:
        assert cpu_matrices_in(backend.engine.runner.text)
        assert answer(backend) == text


def test_only_for_float32_on_a_cpu() -> None:
    assert not uses_half_weights(CPU, torch.bfloat16)
    assert not uses_half_weights(torch.device("cuda"), torch.float32)


def answer(backend: NativeBackend) -> str:
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    return backend.stream(single_turn("what is this?"), sampling).answer().text


def test_waiting_weights_are_bounded(monkeypatch: pytest.MonkeyPatch, packer: HalfPacker) -> None:
    """A matrix above the bound waits alone."""
    monkeypatch.setattr(halves, "_WAITING", 3 * 32 * 512)
    waiting: list[int] = []
    prepare = halves.HalfMatrix.prepare_packing

    def slowed(matrix: halves.HalfMatrix, weight: torch.Tensor) -> Callable[[], None]:
        pack = prepare(matrix, weight)

        def slowly() -> None:
            time.sleep(0.01)
            waiting.append(packer._waiting)
            pack()

        return slowly

    monkeypatch.setattr(halves.HalfMatrix, "prepare_packing", slowed)
    packed = [packer.pack(torch.ones(rows, 512)) for rows in (32, 32, 64, 32, 128, 32)]
    packer.wait()
    assert max(waiting) == 128 * 512
    assert sorted(waiting)[-2] <= 3 * 32 * 512
    assert [float(half(torch.ones(1, 512))[0, 0]) for half in packed] == [512.0] * 6

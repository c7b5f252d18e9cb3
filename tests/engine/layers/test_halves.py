"""Weights in float16 with products in float32: numbers, the bytes that the plan knows, sleep, and words."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.engine.sleeping import settled
from tests.tiny import build_tiny
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.conversation import ask
from vlfit.engine.holdings import halves_in
from vlfit.engine.layers import halves
from vlfit.engine.layers.halves import HalfLinear, Packing, halves_on, piece_rows
from vlfit.engine.options import EngineOptions
from vlfit.engine.sampling import SamplingParams
from vlfit.plan import in_ram
from vlfit.plan.expect import expect_in_ram

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not halves_on(CPU, torch.float32), reason="this torch has no such products")


@pytest.fixture
def packing() -> Iterator[Packing]:
    packing = Packing()
    yield packing
    packing.close()


@pytest.fixture
def small_matrices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(in_ram, "LEAST_INPUTS", 1)


@pytest.mark.parametrize("scale", [0.02, 1e-6, 3e4], ids=["usual", "small numbers only", "large numbers"])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_weights_of_16_bits_multiply_as_in_float32(packing: Packing, scale: float, rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 600).mul_(scale).bfloat16()
    x, bias = torch.randn(rows, 600), torch.randn(96) * scale
    exact = x.double() @ weight.double().T + bias.double()
    layer = HalfLinear([packing.half(part.float()) for part in weight.split(32)], bias)
    packing.settle()
    usual = (F.linear(x, weight.float(), bias) - exact).abs().max()
    assert (layer(x) - exact).abs().max() <= 4 * usual


def test_other_weights_lose_what_is_below_11_bits(packing: Packing) -> None:
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
    with NativeBackend.load(folder, EngineOptions(device="cpu", context=256)) as backend:
        account = backend.account()
        assert halves_in(backend.engine.runner.text)
        assert halves_in(backend.engine.runner.vision)
    assert account.settings.halves
    lines = expect_in_ram(open_checkpoint(folder), account.settings.kv_tokens, 4, halves=True).lines
    held = {**account.holdings.weights, "kv_cache": account.holdings.kv_cache}
    for line in lines:
        assert 0 <= held[line.line] - line.bytes < 512, line.line


@pytest.mark.usefixtures("small_matrices_too")
def test_they_are_given_back_asleep_and_there_again_awake(tmp_path: Path) -> None:
    folder = build_tiny("tied", tmp_path / "tied", "bfloat16")
    with NativeBackend.load(folder, EngineOptions(device="cpu", context=256)) as backend:
        words = say(backend)
        before = sum(backend.account().holdings.weights.values())
        kept = halves_in(backend.engine.runner.text)
        rest = settled(backend.sleep())
        assert rest.asleep is not None
        assert rest.asleep.freed >= before
        assert sum(half.nbytes() for half in kept) == 0
        assert say(backend) == words
        assert sum(backend.account().holdings.weights.values()) == before


def test_the_same_words_as_with_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny("tied", tmp_path / "tied", "bfloat16")
    with NativeBackend.load(folder, EngineOptions(device="cpu", context=256)) as backend:
        assert not halves_in(backend.engine.runner.text)  # they are too small to be worth it
        words = say(backend)
    monkeypatch.setattr(in_ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(in_ram, "LEAST_INPUTS", 1)
    with NativeBackend.load(folder, EngineOptions(device="cpu", context=256)) as backend:
        assert halves_in(backend.engine.runner.text)
        assert say(backend) == words


def test_what_computes_otherwise_has_none() -> None:
    assert not halves_on(CPU, torch.bfloat16)
    assert not halves_on(torch.device("cuda"), torch.float32)


def say(backend: NativeBackend) -> str:
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    return backend.stream(ask("what is this?"), sampling).answer().text


def test_little_waits_to_be_laid_out(monkeypatch: pytest.MonkeyPatch, packing: Packing) -> None:
    """And what is larger than all that may wait, waits alone."""
    monkeypatch.setattr(halves, "_WAITING", 3 * 32 * 512)
    waiting: list[int] = []
    fill = halves.Half.fill

    def watched(half: halves.Half, weight: torch.Tensor) -> Callable[[], None]:
        pack = fill(half, weight)

        def slowly() -> None:
            time.sleep(0.01)
            waiting.append(packing._waiting)
            pack()

        return slowly

    monkeypatch.setattr(halves.Half, "fill", watched)
    packed = [packing.half(torch.ones(rows, 512)) for rows in (32, 32, 64, 32, 128, 32)]
    packing.settle()
    assert max(waiting) == 128 * 512
    assert sorted(waiting)[-2] <= 3 * 32 * 512
    assert [float(half(torch.ones(1, 512))[0, 0]) for half in packed] == [512.0] * 6

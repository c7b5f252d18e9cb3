"""Predicted speed of the native engine on a GPU beside what was measured, fitted to it or not.

Nothing is measured here: the figures are those of docs/log.md and of ``benchmarks.sizes`` behind them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.checkpoints import write_sparse_gguf
from tests.plan.on_meta import model_of_entry
from vlfit.checkpoint import catalog
from vlfit.checkpoint.source import open_checkpoint
from vlfit.machine.cards import CARDS, Card, machine_with_card
from vlfit.machine.model import Gpu
from vlfit.plan.backends import NATIVE
from vlfit.plan.calibration import constants_for
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.native import gpu_cost
from vlfit.plan.shapes import Model, model_of
from vlfit.plan.speed import Speed

[H200] = machine_with_card("H200").gpus
[H100] = machine_with_card("H100 80GB HBM3").gpus


def held_to_30(gpu: Gpu, read: float) -> Gpu:
    """``gpu`` held to 30 multiprocessors, with which it ``read`` so many bytes/s, as a card of its own."""
    return replace(gpu, multiprocessors=30, bandwidth=round(read / gpu_cost.READ_SHARE_OF_HBM.value))


# Card, model, tokens/s, seconds to the first token of 1024x768 without decoding the picture (None: unknown,
# or measured with kernels of another day).
FITTED: list[tuple[Gpu, str, str, float | None, float | None]] = [
    (H200, "2B", "bf16", 951, 0.0148),
    (H200, "2B", "fp8", 1313, None),
    (H200, "4B", "fp8", 705, None),
    (H200, "4B", "int4", 910, 0.0264),
    (H200, "8B", "int4", None, 0.0361),
    (held_to_30(H200, 3129e9), "2B", "fp8", 751, None),
    (held_to_30(H200, 3129e9), "4B", "fp8", 384, None),
    (held_to_30(H200, 2765e9), "2B", "bf16", None, 0.0435),
    (held_to_30(H200, 2765e9), "4B", "int4", None, 0.0695),
    (held_to_30(H200, 2765e9), "8B", "int4", None, 0.1192),
    (held_to_30(H100, 2305e9), "2B", "bf16", None, 0.0488),
]
# Measured after the fit or on another card; sections of docs/log.md.
NOT_FITTED: list[tuple[Gpu, str, str, float | None, float | None]] = [
    # 2026-11-30: the tree of 71740e89 on the card
    (H200, "2B", "bf16", 939, 0.0155),
    (H200, "2B", "fp8", 1307, 0.0155),
    (H200, "4B", "fp8", 698, 0.0217),
    (H200, "4B", "int4", 903, 0.0223),
    (H200, "8B", "int4", 656, 0.0379),
    (held_to_30(H200, 2765e9), "2B", "bf16", 596, 0.0431),
    (held_to_30(H200, 2765e9), "4B", "int4", 480, 0.0681),
    (held_to_30(H200, 2765e9), "8B", "int4", 335, 0.1192),
    # 2026-11-29: the next weights brought into L2, and what a step waits for
    (H200, "8B", "int4", 662, None),
    # 2026-11-28: one row by FP8 and 16 bits with matrix units; kernels of before
    (H200, "2B", "bf16", 919, None),
    (H200, "2B", "fp8", 1193, None),
    (H200, "4B", "fp8", 670, None),
    (H200, "4B", "int4", 832, None),
    (H200, "8B", "int4", 645, None),
    (held_to_30(H200, 2765e9), "4B", "fp8", 319, None),
    (held_to_30(H200, 2765e9), "4B", "int4", 457, None),
    (held_to_30(H200, 2765e9), "8B", "int4", 273, None),
    # 2026-11-28: one row's tiles multiplied in turn; kernels of before
    (held_to_30(H200, 3655e9), "4B", "int4", 461, None),
    (held_to_30(H200, 3655e9), "8B", "int4", 275, None),
    # 2026-11-29: decode attention with few multiprocessors; kernels of before
    (H200, "2B", "bf16", 912, None),
    (H200, "2B", "fp8", 1178, None),
    (H200, "4B", "fp8", 663, None),
    (H200, "4B", "int4", 825, None),
    (H200, "8B", "int4", 640, None),
    (held_to_30(H200, 2760e9), "2B", "fp8", 618, None),
    (held_to_30(H200, 2760e9), "4B", "fp8", 329, None),
    (held_to_30(H200, 2760e9), "4B", "int4", 471, None),
    (held_to_30(H200, 2760e9), "8B", "int4", 280, None),
    # 2026-11-29: prompts in FP8 by cuBLAS, pixels sooner from their worker
    (H200, "2B", "bf16", None, 0.0154),
    (H200, "4B", "fp8", None, 0.0211),
    (H200, "4B", "int4", None, 0.0239),
    (held_to_30(H200, 2760e9), "2B", "bf16", None, 0.0437),
    (held_to_30(H200, 2760e9), "4B", "fp8", None, 0.0566),
    (held_to_30(H200, 2760e9), "4B", "int4", None, 0.0682),
    # 2026-11-28: one row multiplied as integers; kernels of before
    (H100, "2B", "bf16", 688, None),
    (H100, "4B", "fp8", 499, None),
    (H100, "4B", "int4", 686, None),
    (H100, "8B", "int4", 459, None),
    (held_to_30(H100, 2315e9), "4B", "int4", 396, None),
    (held_to_30(H100, 2315e9), "8B", "int4", 257, None),
    # 2026-11-28: whole prompts as CUDA graphs on large cards; the time for which the card is busy
    (H100, "2B", "bf16", None, 0.0117),
    (H100, "4B", "fp8", None, 0.0196),
    (H100, "8B", "int4", None, 0.0356),
    (H100, "Qwen3.5-2B", "bf16", None, 0.0126),
    (H100, "Qwen3.5-4B", "fp8", None, 0.0212),
    (H100, "Qwen3.5-9B", "int4", None, 0.0369),
]


# Card, size, type of the GGUF file, tokens/s, seconds to the first token as above. Of files the time of
# products was fitted, never a decode step or a prompt.
FILES: list[tuple[Gpu, str, str, float | None, float | None]] = [
    # 2026-11-28: one row multiplied as integers; one tile a program, with which the products of all but Q8_0
    # took 4 to 16 % longer
    (H100, "4B", "Q4_K_M", 662, None),
    (H100, "8B", "Q4_K_M", 429, None),
    (H100, "4B", "Q8_0", 544, None),
    (held_to_30(H100, 2314e9), "4B", "Q4_K_M", 308, None),
    (held_to_30(H100, 2309e9), "8B", "Q4_K_M", 179, None),
    (held_to_30(H100, 2314e9), "4B", "Q8_0", 308, None),
    (held_to_30(H100, 2311e9), "4B", "IQ4_XS", 296, None),
    # 2026-11-28: one row by FP8 and 16 bits with matrix units
    (H200, "4B", "Q4_K_M", 820, None),
    (H200, "4B", "Q8_0", 695, None),
    (H200, "4B", "IQ4_XS", 762, None),
    (held_to_30(H200, 2765e9), "4B", "Q4_K_M", 351, None),
    (held_to_30(H200, 2765e9), "4B", "Q8_0", 337, None),
    (held_to_30(H200, 2765e9), "4B", "IQ4_XS", 335, None),
    # 2026-11-29: decode attention with few multiprocessors
    (H200, "4B", "Q4_K_M", 825, None),
    (H200, "8B", "Q4_K_M", 511, None),
    (held_to_30(H200, 2760e9), "4B", "Q4_K_M", 360, None),
    (held_to_30(H200, 2760e9), "8B", "Q4_K_M", 228, None),
    # 2026-11-28: whole prompts as CUDA graphs on large cards; the time for which the card is busy
    (H100, "4B", "Q4_K_M", None, 0.0211),
]


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """The table's constants, whatever was measured on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@cache
def model(size: str, weights: str) -> Model:
    return model_of_entry(next(each for each in catalog.family_entries(size) if each.weights == weights))


def speed_on(gpu: Gpu, size: str, weights: str, chunk: int = 1024) -> Speed:
    speed = NATIVE.speed(model(size, weights), gpu, PlanSettings(weights, 4096, 768, 1, chunk))
    assert speed is not None
    return speed


@pytest.mark.parametrize(("gpu", "size", "weights", "tokens", "first"), [*FITTED, *NOT_FITTED])
def test_what_was_measured_is_in_the_range(
    gpu: Gpu, size: str, weights: str, tokens: float | None, first: float | None
) -> None:
    assert_in_range(speed_on(gpu, size, weights), tokens, first)


@pytest.fixture(scope="module")
def model_of_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Model]:
    """What is planned for a file by size and type; each is written, with its whole vocabulary, once."""

    @cache
    def write_and_read(size: str, kind: str) -> Model:
        checkpoint = open_checkpoint(write_sparse_gguf(tmp_path_factory.mktemp("file"), size, kind))
        return model_of(checkpoint.name, checkpoint.config, checkpoint.tensors, "", gguf_type=kind)

    return write_and_read


@pytest.mark.parametrize(("gpu", "size", "kind", "tokens", "first"), FILES)
def test_what_was_measured_of_gguf_files_is_in_the_range(
    model_of_file: Callable[[str, str], Model],
    gpu: Gpu,
    size: str,
    kind: str,
    tokens: float | None,
    first: float | None,
) -> None:
    speed = NATIVE.speed(model_of_file(size, kind), gpu, PlanSettings(kind, 4096, 768, 1, 1024))
    assert speed is not None
    assert_in_range(speed, tokens, first)


def assert_in_range(speed: Speed, tokens: float | None, first: float | None) -> None:
    if tokens is not None:
        assert speed.decode.low < tokens < speed.decode.high
    likely = speed.likely_first_token
    assert likely is not None
    if first is not None:
        assert likely.low < first < likely.high


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_ranges_are_no_wider_than_half_again(card: Card) -> None:
    [gpu] = machine_with_card(card.name).gpus
    for size, weights in (("2B", "fp8"), ("4B", "int4")):
        speed = speed_on(gpu, size, weights, chunk=256)
        likely = speed.likely_first_token
        assert likely is not None
        assert speed.decode.low < speed.decode.expected < speed.decode.high <= 1.51 * speed.decode.low
        assert likely.low < likely.expected < likely.high <= 1.51 * likely.low
        assert speed.first_token.low < likely.low
        assert likely.high < speed.first_token.high
        assert speed.decode.high <= speed.roof * (1 + 1e-9)


def test_what_makes_a_card_slower() -> None:
    [card] = machine_with_card("RTX 5060").gpus
    here = speed_on(card, "4B", "int4")
    assert card.multiprocessors is not None
    fewer = speed_on(replace(card, multiprocessors=card.multiprocessors // 2), "4B", "int4")
    assert fewer.decode.expected < here.decode.expected
    assert fewer.first_token.expected > 1.9 * here.first_token.expected
    narrower = speed_on(replace(card, bandwidth=(card.bandwidth or 0) // 2), "4B", "int4")
    assert narrower.decode.expected < here.decode.expected
    assert narrower.first_token.expected == here.first_token.expected
    assert speed_on(card, "4B", "int4", 128).first_token.expected > here.first_token.expected
    workstation = speed_on(replace(card, name="NVIDIA RTX PRO 2000"), "4B", "int4")
    assert workstation.first_token.expected < here.first_token.expected


def test_an_a10g_multiplies_half_as_fast_as_an_a10() -> None:
    """By their data sheets 70 and 125 TFLOP/s in 16 bits, 35 and 31.2 in float32; memory is the same."""
    (a10g,), (a10,) = machine_with_card("A10G").gpus, machine_with_card("A10").gpus
    slower, faster = speed_on(a10g, "4B", "int4"), speed_on(a10, "4B", "int4")
    assert slower.first_token.expected == pytest.approx(faster.first_token.expected * 125 / 70, rel=0.1)
    assert slower.decode.expected > faster.decode.expected


def test_a_card_without_multiprocessors_has_a_wide_range() -> None:
    unknown = replace(H200, multiprocessors=None)
    assert not gpu_cost.is_known(unknown)
    wide = speed_on(unknown, "4B", "int4").decode
    assert wide.high > 1.6 * wide.low


def test_what_was_measured_on_this_card_counts() -> None:
    [card] = machine_with_card("RTX 5060").gpus
    four, table = model("4B", "int4"), constants_for(card)
    slow = replace(
        table,
        copy_bandwidth=replace(table.efficiency, value=0.5 * 448e9),
        multiplications=replace(table.efficiency, value=10e12),
    )
    steps = [gpu_cost.step_seconds(four, card, each, 3e9) for each in (table, slow)]
    prompts = [gpu_cost.prompt_seconds(four, card, each, 768, 40, 1024) for each in (table, slow)]
    assert steps[1] > 1.5 * steps[0]
    assert prompts[1].tower == pytest.approx(prompts[0].tower * 512 * 30 * 2.497e9 * 0.9 / 10e12)
    assert prompts[1].text > 2 * prompts[0].text

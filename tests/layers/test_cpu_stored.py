"""Weights as stored on a CPU: error bounds, words on every vector unit, planned bytes, the library."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.awq_gptq import as_awq, as_gptq
from tests.checkpoint.test_gguf_hybrid import SPECS
from tests.compressed import compress
from tests.engine.sleeping import sleep_result
from tests.engine.test_parity import CONVERSATIONS, run
from tests.gguf_files import as_blocks, as_gguf, plausible_blocks
from tests.loading.test_compressed import CASES
from tests.loading.test_gguf_blocks import wide_enough
from tests.loading.test_ollama_layout import as_ollama
from tests.tiny import build_tiny
from tests.tiny_decoders import build_decoder
from tests.tiny_qwen3_5 import QWEN3_5, build_qwen3_5
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.gguf.stored_blocks import EXACT_FORMS, MULTIPLIED_AS_STORED
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.memory.usage import cpu_matrices_in
from vlfit.kernels.cpu import library, products
from vlfit.kernels.cpu.products import (
    FEW_ROWS,
    FEW_ROWS_WITH_GEMM,
    FEW_ROWS_WITH_TILES,
    BlockWeight,
    StoredWeight,
    Weights,
)
from vlfit.kernels.gemm.weights import QuantizedWeight
from vlfit.layers.cpu_stored import StoredEmbedding, keeps_stored
from vlfit.layers.linear import dequantize_fp8, dequantize_int8, dequantize_packed
from vlfit.loading.block_tensors import dequantize_blocks
from vlfit.machine import processor
from vlfit.parity.run_checks import run_checks
from vlfit.plan.native import ram
from vlfit.plan.native.expectation import expect_in_ram

CPU = torch.device("cpu")
FOUND = library.vector_levels()
needs_compiler = pytest.mark.skipif(processor.find_c_compiler() is None, reason="no C compiler")


# The best of this processor, that of most, and the one of all: compiling each takes five seconds and more.
SEEN_ALWAYS = tuple(each for each in FOUND if each in (FOUND[0], "avx2", "portable"))
OTHERS = tuple(each for each in FOUND if each not in SEEN_ALWAYS)


@pytest.fixture(params=[*SEEN_ALWAYS, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(processor.KERNELS_SWITCH, request.param)
    return str(request.param)


@pytest.fixture
def small_matrices_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(ram, "LEAST_WEIGHTS", 1)
        patched.setattr(ram, "LEAST_INPUTS", 1)
        yield


# --- products ----------------------------------------------------------------------------------------------


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def codes8(rows: int, columns: int) -> Tensor:
    return torch.randint(-128, 128, (rows, columns)).to(torch.int8)


def scales(rows: int, groups: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.rand(rows, groups) + 0.01).to(dtype)


def affine(rows: int, groups: int, supers: int) -> tuple[Tensor, Tensor]:
    pairs = torch.randint(0, 64, (rows, groups, 2)).to(torch.uint8).view(torch.int16).squeeze(2)
    return pairs.contiguous(), torch.rand(rows, supers, 2).half().view(torch.int32).squeeze(2).contiguous()


def int4(rows: int, columns: int, group: int, zeros: bool, dtype: torch.dtype) -> QuantizedWeight:
    groups = columns // group
    zero = words(-(-rows // 8), groups) if zeros else None
    return QuantizedWeight(words(rows, columns // 8), scales(rows, groups, dtype), zero, (1, group))


def two_level(rows: int, columns: int, group: int, bits: int, is_affine: bool) -> QuantizedWeight:
    codes = words(rows, columns // 8) if bits == 4 else codes8(rows, columns)
    groups, supers = columns // group, columns // 256
    if is_affine:
        scale, super_scale = affine(rows, groups, supers)
    else:
        scale = torch.randint(-32, 32, (rows, groups)).to(torch.int8)
        super_scale = torch.rand(rows, supers).half()
    return QuantizedWeight(codes, scale, None, (1, group), super_scale)


def eight(rows: int, columns: int, group: int) -> QuantizedWeight:
    return QuantizedWeight(codes8(rows, columns), scales(rows, -(-columns // group)), None, (1, group))


def fp8(rows: int, columns: int) -> QuantizedWeight:
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    return QuantizedWeight(codes, scales(-(-rows // 128), -(-columns // 128)), None, (128, 128))


def blocks(rows: int, kind: str) -> BlockWeight:
    """Rows of 1280 weights, or a block of 32 or 64 more, in another order than in the file; not aligned."""
    size, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    columns = 1280 + size % 256
    count = rows * columns // size
    random = np.random.default_rng(7)
    if kind in ("F16", "BF16"):
        raw = random.normal(size=count).astype(np.float16).view(np.uint8)
    else:
        raw = plausible_blocks(kind, count, random).reshape(-1)
    file = torch.empty(2 + len(raw), dtype=torch.uint8)
    file[2:] = torch.from_numpy(raw.copy())
    order = torch.from_numpy(random.permutation(rows).astype(np.int32))
    return BlockWeight(file[2:].view(rows, columns // size * length), kind, order)


FORMS: dict[str, Callable[[], Weights]] = {
    "4 bits, groups of 32": lambda: int4(37, 1280, 32, False, torch.float16),
    "4 bits, groups of 64, zero points": lambda: int4(37, 1280, 64, True, torch.bfloat16),
    "4 bits, groups of 128, zero points": lambda: int4(150, 1280, 128, True, torch.float32),
    "4 bits, rows": lambda: int4(5, 96, 96, False, torch.float32),
    "4 bits, two levels": lambda: two_level(37, 1280, 32, 4, False),
    "4 bits, two levels and minima": lambda: two_level(37, 1280, 32, 4, True),
    "4 bits, two levels of 16 and minima": lambda: two_level(6, 512, 16, 4, True),
    "8 bits, groups of 16": lambda: eight(37, 1280, 16),
    "8 bits, groups of 128": lambda: eight(37, 1280, 128),
    "8 bits, rows of 99": lambda: eight(7, 99, 99),
    "8 bits, two levels": lambda: two_level(37, 1280, 16, 8, False),
    "8 bits, two levels and minima": lambda: two_level(37, 1280, 32, 8, True),
    "FP8": lambda: fp8(150, 300),
    "bfloat16": lambda: torch.randn(37, 1283).bfloat16(),
    "float16": lambda: torch.randn(9, 77).mul(1e-6).half(),
    **{
        f"{kind}{' with minima' if kind in ('Q4_1', 'Q5_1', 'Q2_K', 'Q4_K', 'Q5_K') else ''}": partial(
            blocks, 37, kind
        )
        for kind in sorted(MULTIPLIED_AS_STORED)
    },
}


def dequantized(weights: Weights) -> Tensor:
    if isinstance(weights, Tensor):
        return weights.float()
    if isinstance(weights, BlockWeight):
        assert weights.order is not None
        return dequantize_blocks(weights.rows, weights.type)[weights.order.long()]
    stored = (weights.codes, weights.scale)
    if weights.format == "int4":
        return dequantize_packed(weights, torch.float32)
    if weights.format == "int8":
        return dequantize_int8(*stored, torch.float32, weights.super_scale)
    return dequantize_fp8(*stored, weights.block_shape, torch.float32)


def magnitudes(weights: Weights) -> Tensor:
    """|scale| times the largest code, plus |minimum|, for each weight: what sums are rounded relative to."""
    wide = dequantized(weights).double().abs()
    if isinstance(weights, BlockWeight):
        group = EXACT_FORMS[weights.type].group if weights.type in EXACT_FORMS else 1
        largest: Tensor = wide.unflatten(1, (-1, group)).amax(2).repeat_interleave(group, dim=1)
        return 3 * largest
    if isinstance(weights, Tensor) or weights.format == "fp8":
        return wide
    if weights.super_scale is None and weights.zero_point is None:
        return wide
    # Codes and zero points are summed apart: a group's largest weight, thrice, bounds both.
    grouped = wide.unflatten(1, (weights.scale.shape[1], -1))
    bound: Tensor = (3 * grouped.amax(2, keepdim=True)).expand_as(grouped).flatten(1)
    return bound


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_products_are_within_the_rounding_of_float32(form: str, level: str) -> None:
    """Each term is rounded with its sums: at most inputs + 4 times, 2**-24 each (Higham, 3.1).

    The four: scale, its product with a sum, zero points or minima, bias. Inputs that meet integers have half
    a step more, at most 2**-22 of the largest of 128; many rows in parts of bfloat16 2**-16.4 of each term,
    and three sums an input.
    """
    torch.manual_seed(0)
    weights = FORMS[form]()
    exact, stored = dequantized(weights), StoredWeight(weights)
    wide = magnitudes(weights)
    bias = torch.randn(stored.outputs)
    has_tiles = level == "amx" and library.load_library().vlfit_has_tiles()  # type: ignore[union-attr]
    for rows in (1, 2, 5, FEW_ROWS_WITH_TILES, 17, 64, FEW_ROWS + 3):
        x = torch.randn(rows, stored.inputs)
        ours = products.multiply([stored], x, bias)
        terms = x.double().abs() @ wide.double().T + bias.double().abs()
        error = (ours - (x.double() @ exact.double().T + bias.double())).abs()
        bound = (stored.inputs + 4) * 2.0**-24 * terms
        if rows > FEW_ROWS_WITH_TILES and has_tiles:
            bound = 3 * bound + 2.0**-16.4 * terms
        elif rows > FEW_ROWS_WITH_GEMM and stored.in_gemm:
            bound += 2.0**-15.98 * largest_of_blocks(x).double() @ wide.double().T
        elif not isinstance(weights, Tensor) and getattr(weights, "format", "") != "fp8":
            bound += 2.0**-22 * largest_of_blocks(x).double() @ wide.double().T
        assert (error <= bound).all(), rows


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_rounded_inputs_are_within_half_a_step(form: str, level: str) -> None:
    """8 bits: 1/254 of the largest of 128; bfloat16: 2**-8 of each input and weight. Few rows: exact."""
    torch.manual_seed(7)
    weights = FORMS[form]()
    exact, stored = dequantized(weights), StoredWeight(weights, rounds_inputs=True)
    plain, wide, bias = StoredWeight(weights), magnitudes(weights), torch.randn(stored.outputs)
    for rows in (FEW_ROWS_WITH_GEMM, 17, 64, FEW_ROWS + 3):
        x = torch.randn(rows, stored.inputs)
        ours = products.multiply([stored], x, bias)
        if rows <= FEW_ROWS_WITH_GEMM or stored.input_roundoff == plain.input_roundoff:
            assert torch.equal(ours, products.multiply([plain], x, bias))
            continue
        terms = x.double().abs() @ wide.double().T + bias.double().abs()
        error = (ours - (x.double() @ exact.double().T + bias.double())).abs()
        bound = (stored.inputs + 4) * 2.0**-24 * terms
        if stored.in_gemm:
            bound += 1 / 253.9 * largest_of_blocks(x).double() @ wide.double().T
        else:
            bound = 3 * bound + 2.01 * 2.0**-8 * terms
        assert (error <= bound).all(), rows
        # Without the bias, beside which small products are rounded by more than this.
        product = x.double() @ exact.double().T
        of_row = (stored(x) - product).square().mean().sqrt() / product.square().mean().sqrt()
        assert of_row < stored.input_roundoff * (3 if "minima" in form or "_" in form else 1)
        assert not products.multiply([stored], torch.zeros_like(x), None).any()
        wrong = x.clone()
        wrong[1, 3] = torch.nan
        finite = stored(wrong).isfinite()
        assert not finite[1].any()
        assert finite[[0, 2, 3]].all()


@needs_compiler
def test_rounded_inputs_of_rows_that_are_not_whole(level: str) -> None:
    """An odd number of inputs, and parts of which one is not rounded in 8 bits."""
    torch.manual_seed(8)
    odd = torch.randn(33, 259).bfloat16()
    stored, x = StoredWeight(odd, rounds_inputs=True), torch.randn(40, 259)
    exact = x.double() @ odd.double().T
    terms = x.double().abs() @ odd.double().abs().T
    assert ((stored(x) - exact).abs() <= 2.0**-7 * terms).all()
    both = (int4(30, 256, 32, True, torch.bfloat16), torch.randn(17, 256).bfloat16())
    parts = [StoredWeight(part, rounds_inputs=True) for part in both]
    x = torch.randn(40, 256)
    ours = products.multiply(parts, x, None)
    exact = torch.cat([x.double() @ dequantized(part).double().T for part in both], 1)
    assert ours.shape == (40, 47)
    assert float((ours - exact).square().mean().sqrt() / exact.square().mean().sqrt()) < 0.01


def largest_of_blocks(x: Tensor) -> Tensor:
    """``x`` with the largest magnitude of 128 neighbours in place of each."""
    columns = x.shape[1]
    blocks = torch.nn.functional.pad(x.abs(), (0, -columns % 128)).unflatten(1, (-1, 128))
    largest: Tensor = blocks.amax(2, keepdim=True).expand_as(blocks).flatten(1)[:, :columns]
    return largest


@needs_compiler
@pytest.mark.parametrize("form", ["4 bits, groups of 64, zero points", "8 bits, groups of 128", "bfloat16"])
def test_inputs_of_all_sizes(form: str, level: str) -> None:
    """Zeros give zeros, tiny and huge inputs scale, and what is no number reaches its own row alone."""
    torch.manual_seed(4)
    stored = StoredWeight(FORMS[form]())
    for rows in (4, FEW_ROWS + 1):
        x = torch.randn(rows, stored.inputs)
        plain = stored(x)
        assert not stored(torch.zeros_like(x)).any()
        for factor in (2.0**60, 2.0**-60):
            torch.testing.assert_close(stored(x * factor) / factor, plain, rtol=2e-6, atol=2e-3)
        for value in (torch.nan, torch.inf):
            wrong = x.clone()
            wrong[1, 3] = value
            finite = stored(wrong).isfinite()
            assert not finite[1].any()
            assert finite[[0, 2, 3]].all()


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_dequantized_rows_equal_the_definition(form: str, level: str) -> None:
    torch.manual_seed(1)
    weights = FORMS[form]()
    exact, stored = dequantized(weights), StoredWeight(weights)
    out = torch.empty(stored.outputs - 1, stored.inputs)
    stored.dequantize(1, out)
    torch.testing.assert_close(out, exact[1:], rtol=2**-22, atol=1e-6 if "minima" in form else 0)
    assert torch.equal(stored.rows(torch.tensor([stored.outputs - 1, 1])), out[[-1, 0]])
    with pytest.raises(IndexError):
        stored.rows(torch.tensor([stored.outputs]))


@needs_compiler
def test_parts_of_different_formats_side_by_side(level: str) -> None:
    torch.manual_seed(2)
    forms = [int4(9, 256, 32, True, torch.float16), eight(30, 256, 32), int4(8, 256, 64, True, torch.float16)]
    parts = [StoredWeight(form) for form in forms]
    for rows in (1, 4, 20):
        x = torch.randn(rows, 256)
        alone = [products.multiply([part], x, None) for part in parts]
        torch.testing.assert_close(products.multiply(parts, x, None), torch.cat(alone, dim=1))
    assert products.multiply(parts, torch.empty(0, 256), None).shape == (0, 47)


@needs_compiler
def test_a_code_that_is_no_number_stays_none(level: str) -> None:
    weights = fp8(4, 128)
    weights.codes.view(torch.uint8)[2, 5] = 0xFF
    stored = StoredWeight(weights)
    for rows in (1, FEW_ROWS + 1):
        wrong = stored(torch.randn(rows, 128)).isnan().all(0)
        assert wrong.tolist() == [False, False, True, False]


@needs_compiler
def test_torchs_own_tiles_are_not_disturbed() -> None:
    """oneDNN keeps a configuration of AMX tiles on each thread; ours comes and goes between its products."""
    torch.manual_seed(5)
    stored, x = StoredWeight(torch.randn(300, 512).bfloat16()), torch.randn(130, 512)
    theirs = torch.randn(200, 512).bfloat16()
    expected, ours = x.bfloat16() @ theirs.T, stored(x)
    for _ in range(3):
        assert torch.equal(x.bfloat16() @ theirs.T, expected)
        assert torch.equal(stored(x), ours)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_nothing(threads: int) -> None:
    torch.manual_seed(3)
    stored, x = StoredWeight(int4(300, 2048, 128, True, torch.bfloat16)), torch.randn(3, 2048)
    expected, before = stored(x), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(stored(x), expected)
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_forms_that_are_unknown_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\b48\b"):
        StoredWeight(eight(4, 96, 48))
    with pytest.raises(ValueError, match="16 bits"):
        StoredWeight(torch.randn(4, 64))
    stored = blocks(4, "Q8_0")
    with pytest.raises(ValueError, match="IQ3_S"):
        StoredWeight(BlockWeight(stored.rows, "IQ3_S"))
    with pytest.raises(ValueError, match="whole blocks"):
        StoredWeight(BlockWeight(stored.rows, "Q4_K"))
    for wrong in (torch.tensor([0, 1, 2, 4]), torch.tensor([0, -1, 2, 3]), torch.tensor([0, 1, 2])):
        with pytest.raises(ValueError, match="row"):
            StoredWeight(BlockWeight(stored.rows, "Q8_0", wrong.int()))


# --- checkpoints -------------------------------------------------------------------------------------------


def compressed(name: str, folder: Path) -> Path:
    spec, groups, choose, _ = CASES[name]
    return compress(build_tiny(spec, folder / "source"), folder / "narrow", groups, choose)[0]


def ordered_gptq(folder: Path) -> Path:
    return as_gptq(build_tiny("tied", folder / "source"), folder / "narrow", ordered=True)[0]


def with_value_heads(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(QWEN3_5, "wide", SPECS["wide"])
        return as_gguf(build_qwen3_5("wide", folder / "source"), folder / "gguf", "q8_0")[0]


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    **{
        name: lambda folder, name=name: compressed(name, folder)  # type: ignore[misc]
        for name in CASES
        if name != "FP8 by block"  # of 40 inputs
    },
    "4 bits, zero points (AWQ)": lambda folder: as_awq(
        build_tiny("half_with_biases", folder / "source"), folder / "narrow"
    )[0],
    "4 bits in another order (GPTQ)": ordered_gptq,
    "official FP8": lambda folder: build_tiny("fp8_untied_sharded", folder / "narrow"),
    "bfloat16": lambda folder: build_tiny("untied_sharded", folder / "narrow", "bfloat16"),
    "float16": lambda folder: build_tiny("odd_vocab_one_kv_head", folder / "narrow", "float16"),
    **{
        f"GGUF {kind}": lambda folder, kind=kind: as_blocks(  # type: ignore[misc]
            wide_enough(folder / "source"), folder / "gguf", kind
        )[0]
        for kind in ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "IQ3_S")
    },
    "GGUF, rows of q and k in another order": lambda folder: as_gguf(
        build_decoder("llama2", folder / "source"), folder / "gguf", "q8_0"
    )[0],
    "GGUF, the same in 16 bits": lambda folder: as_gguf(
        build_decoder("llama2", folder / "source"), folder / "gguf", "f16"
    )[0],
    "GGUF, value heads in another order": with_value_heads,
    "tower inside (Ollama), q, k and v apart": lambda folder: as_ollama(
        build_tiny("half_with_biases", folder / "source"), folder / "gguf"
    ),
}
OPTIONS = EngineOptions(device="cpu", dtype="float32", max_model_len=1024, max_num_batched_tokens=128)


@needs_compiler
@pytest.mark.parametrize(
    "levels",
    [pytest.param(SEEN_ALWAYS, id="most"), pytest.param(OTHERS, id="others", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_words_and_planned_bytes(
    name: str, levels: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greedy words are those of dequantized float32 weights on every vector unit; bytes are planned."""
    if not levels:
        pytest.skip("this processor has no other vector units")
    folder = CHECKPOINTS[name](tmp_path)
    asked = [CONVERSATIONS["text"]]
    if not name.startswith("GGUF"):  # of a text model
        asked += [CONVERSATIONS["picture"], CONVERSATIONS["system and turns"]]
    monkeypatch.setenv(processor.KERNELS_SWITCH, "0")
    expected = run(NativeEngine(open_checkpoint(folder), OPTIONS), *asked, tokens=16)
    monkeypatch.setattr(ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(ram, "LEAST_INPUTS", 1)
    for level in levels:
        monkeypatch.setenv(processor.KERNELS_SWITCH, level)
        engine = NativeEngine(open_checkpoint(folder), OPTIONS)
        assert cpu_matrices_in([engine.runner.text, engine.runner.vision])
        assert run(engine, *asked, tokens=16) == expected, level
    account = engine.account()
    assert account.settings.cpu_stored
    lines = expect_in_ram(
        engine.checkpoint,
        account.settings.kv_tokens,
        4,
        cpu_16_bit=account.settings.cpu_16_bit,
        cpu_stored=True,
        sequences=OPTIONS.max_num_seqs,
    ).lines
    held = {**account.memory.weights, "kv_cache": account.memory.kv_cache}
    orders = 4 * 3 * 4 * 96 if "order" in name else 0  # not counted
    for line in (each for each in lines if each.line in held):
        assert 0 <= held.get(line.line, 0) - line.bytes < 512 + orders, line.line


@needs_compiler
@pytest.mark.usefixtures("small_matrices_too", "only_its_own_to_collect")
@pytest.mark.parametrize(
    "name", ["4 bits, zero points (AWQ)", "plain bytes", "official FP8", "bfloat16", "GGUF Q4_0", "GGUF Q6_K"]
)
def test_rounded_inputs_are_within_tolerances(name: str, tmp_path: Path) -> None:
    """Logits without a dtype are ten times nearer to those in float32 than ``vlfit verify`` demands."""
    checkpoint = open_checkpoint(CHECKPOINTS[name](tmp_path))

    def build(**changes: object) -> NativeEngine:
        return NativeEngine(checkpoint, replace(OPTIONS, **{"dtype": "auto", **changes}))  # type: ignore[arg-type]

    report = run_checks(build, checkpoint, "quick")
    assert report.findings == []
    rounded = {each.stage: each.largest for each in report.measured if each.condition == "rounded inputs"}
    engine = build()
    stored = [each for each in cpu_matrices_in(engine.runner.models) if isinstance(each, StoredWeight)]
    # A processor may have units for one form and not for another: 8-bit integers, but not bfloat16.
    assert stored
    assert bool(rounded) == any(each.input_roundoff > 2.0**-9 for each in stored)
    assert all(apart < 0.05 for apart in rounded.values())


@needs_compiler
@pytest.mark.usefixtures("small_matrices_too", "only_its_own_to_collect")
def test_a_wrong_product_with_rounded_inputs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, inner = open_checkpoint(CHECKPOINTS["bfloat16"](tmp_path)), products.multiply
    if StoredWeight(FORMS["bfloat16"](), rounds_inputs=True).input_roundoff < 2.0**-9:
        pytest.skip("no units for rounded inputs")

    def wrong(parts: Sequence[StoredWeight], x: Tensor, bias: Tensor | None) -> Tensor:
        out = inner(parts, x, bias)
        return out.roll(1, 1) if parts[0].rounds_inputs and len(x) > FEW_ROWS_WITH_GEMM else out

    monkeypatch.setattr(products, "multiply", wrong)

    def build(**changes: object) -> NativeEngine:
        return NativeEngine(checkpoint, replace(OPTIONS, **{"dtype": "auto", **changes}))  # type: ignore[arg-type]

    report = run_checks(build, checkpoint, "quick")
    assert {(each.code, each.condition) for each in report.findings} == {
        ("rounded_inputs_differ", "rounded inputs")
    }
    assert report.findings[0].way_around == "add --dtype float32"


@needs_compiler
@pytest.mark.usefixtures("small_matrices_too")
def test_sleep_unmaps_them_and_waking_maps_them_again(tmp_path: Path) -> None:
    folder = compressed("4 bits, all else in 8, tied", tmp_path)
    with NativeBackend.load(folder, EngineOptions(device="cpu", max_model_len=256)) as backend:
        assert isinstance(backend.engine.runner.text.embedding, StoredEmbedding)
        kept = cpu_matrices_in(backend.engine.runner.text)
        before, pages = sum(backend.account().memory.weights.values()), mapped_bytes(folder)
        assert pages > before / 2
        rest = sleep_result(backend.sleep())
        assert rest.asleep is not None
        assert rest.asleep.freed_bytes >= before
        assert sum(matrix.nbytes() for matrix in kept) == mapped_bytes(folder) == 0
        sleep_result(backend.wake())
        assert sum(backend.account().memory.weights.values()) == before
        assert mapped_bytes(folder) == pages


def mapped_bytes(folder: Path) -> int:
    """Bytes of files below ``folder`` that are mapped into this process."""
    found = 0
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        if str(folder) in line:
            first, last = (int(each, 16) for each in line.split()[0].split("-"))
            found += last - first
    return found


# --- the library -------------------------------------------------------------------------------------------


def test_only_for_float32_on_a_cpu_with_large_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled for a model without any."""
    monkeypatch.setattr(library, "_build", lambda level: pytest.fail("compiled"))
    monkeypatch.setattr(products, "load_library", lambda: pytest.fail("compiled"))
    assert not keeps_stored(open_checkpoint("mini"), CPU, torch.float32)
    monkeypatch.setattr(ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(ram, "LEAST_INPUTS", 1)
    checkpoint = open_checkpoint(build_tiny("tied", tmp_path / "tied", "bfloat16"))
    assert not keeps_stored(checkpoint, CPU, torch.bfloat16)
    assert not keeps_stored(checkpoint, torch.device("cuda"), torch.float32)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.KERNELS_SWITCH, "0")
    assert not products.available()
    with pytest.raises(ValueError, match="not available"):
        StoredWeight(torch.ones(16, 16, dtype=torch.bfloat16))


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(processor.KERNELS_SWITCH, raising=False)
    library._load.cache_clear()
    yield tmp_path
    library._load.cache_clear()


def test_without_a_compiler_a_line_says_so(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not products.available()
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_not_fatal(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "false")
    assert not products.available()
    assert "failed" in caplog.text
    assert not list((fresh / "vlfit" / "kernels").iterdir())


def test_of_a_compiler_that_takes_too_long_nothing_runs_on(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gcc is a driver: the process that compiles is its child."""
    compiler, child = tmp_path / "slow-compiler", tmp_path / "child"
    compiler.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {child}\nwait\n", encoding="utf-8")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(library, "_COMPILE_SECONDS", 2.0)
    assert not products.available()
    assert str(compiler) in caplog.text
    assert not list((fresh / "vlfit" / "kernels").iterdir())
    for _ in range(500):
        if not is_running(int(child.read_text("utf-8"))):
            return
        time.sleep(0.02)
    pytest.fail("the child of the compiler runs on")


def is_running(process: int) -> bool:
    """Whether ``process`` is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_compiler
def test_a_compiler_that_does_not_know_the_best_units_compiles_for_the_next(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "old-compiler"
    known = processor.find_c_compiler()
    # Not optimized, which takes a quarter of the time: what it computes is not looked at.
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *amx*|*vnni*|*bf16*) exit 1;; esac\nexec {known} "$@" -O0\n',
        encoding="utf-8",
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    assert products.available()
    (built,) = (fresh / "vlfit" / "kernels").iterdir()
    plain = next(level for level in library.vector_levels() if level in library.KNOWN_TO_ALL)
    assert built.name.startswith(f"products-{plain}-")


@needs_compiler
def test_levels_are_limited_by_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    every = library.vector_levels()
    assert every[-1] == "portable"
    for place, level in enumerate(every):
        monkeypatch.setenv(processor.KERNELS_SWITCH, level)
        assert library.vector_levels() == every[place:]


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_no_code_from_a_folder_that_others_write_in(
    mode: int, fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = library.library_folder()
    folder.chmod(mode)
    assert not products.available()
    assert str(folder) in caplog.text
    assert not list(folder.iterdir())


@needs_compiler
def test_compiled_once_and_again_if_others_could_change_it(fresh: Path) -> None:
    assert products.available()
    (built,) = (fresh / "vlfit" / "kernels").iterdir()
    assert built.stat().st_mode & 0o777 == 0o700
    first = built.stat().st_mtime_ns
    library._load.cache_clear()
    assert products.available()
    assert built.stat().st_mtime_ns == first
    built.chmod(0o722)
    library._load.cache_clear()
    assert products.available()
    assert built.stat().st_mtime_ns != first


@needs_compiler
@pytest.mark.parametrize("size", [0, 4096])
def test_compiled_again_if_it_was_cut_short(size: int, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.KERNELS_SWITCH, "portable")
    folder = library.library_folder()
    whole = library._build("portable")
    length = whole.stat().st_size
    os.truncate(whole, size)
    assert library._build("portable") == whole
    assert whole.stat().st_size == length
    assert list(folder.iterdir()) == [whole]
    assert products.available()


def test_a_user_without_a_home_has_no_compiled_products(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(processor.KERNELS_SWITCH, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    library._load.cache_clear()
    assert not products.available()
    assert "HOME" in caplog.text
    library._load.cache_clear()


def test_a_level_that_is_none_is_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(processor.KERNELS_SWITCH, raising=False)
    every = library.vector_levels()
    monkeypatch.setenv(processor.KERNELS_SWITCH, "avx1024")
    assert library.vector_levels() == every
    assert "avx1024" in caplog.text
    assert "avx512_vnni" in caplog.text

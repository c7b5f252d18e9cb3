"""The engine with an FP8 KV cache: answers equal those of a cache whose rows were rounded to FP8."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.test_parity import CONVERSATIONS, run
from tests.engine.test_shared_prefixes import answer
from vlfit import kernels
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.errors import UsageError
from vlfit.kernels.attention import paged as attention
from vlfit.kernels.attention.paged import AttentionTiles
from vlfit.layers.kv_cache import CacheRows, dequantize_kv_rows, quantize_kv_rows
from vlfit.plan.native.expectation import expect_in_ram

ON_GPU = torch.cuda.is_available()
OPTIONS = EngineOptions(
    device="cpu", max_model_len=512, max_num_batched_tokens=64, max_num_seqs=3, kv_dtype="fp8"
)


def engine(folder: Path, options: EngineOptions = OPTIONS) -> NativeEngine:
    return NativeEngine(open_checkpoint(folder), options)


def round_rows_on_write(monkeypatch: pytest.MonkeyPatch) -> None:
    write = CacheRows.write

    def rounded(self: CacheRows, layer: int, slots: Tensor, rows: Tensor) -> None:
        write(self, layer, slots, dequantize_kv_rows(*quantize_kv_rows(rows), rows.dtype))

    monkeypatch.setattr(CacheRows, "write", rounded)


@pytest.mark.parametrize("name", ["tied", "odd_vocab_one_kv_head"])
def test_answers_equal_those_of_rounded_keys_and_values(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    conversations = [CONVERSATIONS[each] for each in ("picture", "text", "system and turns")]
    in_fp8 = run(engine(tiny(name)), *conversations, tokens=24)
    exact = run(engine(tiny(name), replace(OPTIONS, kv_dtype="auto")), *conversations, tokens=24)
    assert exact != in_fp8  # or nothing was rounded
    round_rows_on_write(monkeypatch)
    assert run(engine(tiny(name), replace(OPTIONS, kv_dtype="auto")), *conversations, tokens=24) == in_fp8


def test_shared_prefixes_keep_their_scales(tiny: Callable[[str], Path]) -> None:
    """Of whole blocks and of partly copied ones."""
    again, fresh = engine(tiny("tied")), engine(tiny("tied"), replace(OPTIONS, prefix_cache=False))
    prefix = "the quick brown fox jumps over the lazy dog and goes on to the river"
    for text in (prefix, prefix, f"{prefix} to drink"):
        words, shared = answer(again, single_turn(text))
        assert (words, 0) == answer(fresh, single_turn(text))
    assert shared > 0


def test_planned_bytes(tiny: Callable[[str], Path]) -> None:
    built = engine(tiny("tied"))
    account = built.account()
    assert account.settings.kv_dtype == "fp8"
    lines = expect_in_ram(built.checkpoint, account.settings.kv_tokens, 4, kv_dtype="fp8", sequences=1).lines
    assert account.memory.kv_cache == next(line.bytes for line in lines if line.line == "kv_cache")
    plain = expect_in_ram(built.checkpoint, account.settings.kv_tokens, 2, sequences=1).lines
    heads_of_16 = 18 / 32
    assert account.memory.kv_cache == heads_of_16 * plain[-1].bytes


@pytest.mark.parametrize(("kv_dtype", "words"), [("bf16", "which is float32"), ("fp9", "'fp9'")])
def test_unsupported_kv_dtypes_are_refused(tiny: Callable[[str], Path], kv_dtype: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        engine(tiny("tied"), replace(OPTIONS, kv_dtype=kv_dtype))


def test_bf16_cache_with_bf16_compute(tiny: Callable[[str], Path]) -> None:
    built = engine(tiny("tied"), replace(OPTIONS, kv_dtype="bf16", dtype="bfloat16"))
    assert built.runner.cache.keys.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="the next one runs it on the GPU")
@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_the_same_answers_with_kernels(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, with a chunk that has a past beside a decoding sequence."""
    options = replace(OPTIONS, max_model_len=256, max_num_batched_tokens=24, max_num_seqs=2)
    conversations = [CONVERSATIONS["picture"], CONVERSATIONS["text"]]
    expected = run(engine(tiny("odd_vocab_one_kv_head"), options), *conversations, tokens=3)
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    monkeypatch.setattr(attention, "prefill_tiles", lambda *_, **__: AttentionTiles(64, 64, 4, 1))
    monkeypatch.setattr(attention, "num_decode_splits", lambda *_: 2)
    assert run(engine(tiny("odd_vocab_one_kv_head"), options), *conversations, tokens=3) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["tied", "odd_vocab_one_kv_head"])
def test_the_same_answers_on_a_gpu(tiny: Callable[[str], Path], name: str) -> None:
    """In float32, with captured graphs; the last bits of a GEMM may round a key to the next code, so
    the first tokens are compared.
    """
    conversations = [CONVERSATIONS[each] for each in ("picture", "text")]
    expected = run(engine(tiny(name)), *conversations, tokens=8)
    on_gpu = engine(tiny(name), replace(OPTIONS, device="cuda", dtype="float32"))
    assert run(on_gpu, *conversations, tokens=8) == expected
    assert on_gpu.runner.cache.keys.dtype == torch.uint8

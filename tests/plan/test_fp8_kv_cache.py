"""Plans with an FP8 KV cache: half the bytes, in all lines and numbers."""

from dataclasses import replace

import pytest

from tests.plan.example import EXAMPLE, planned
from tests.wording import codes_of
from vlfit.errors import UsageError
from vlfit.machine.cards import machine_with_card
from vlfit.plan.backends import check_wishes, cost_model
from vlfit.plan.report import plan_to_json
from vlfit.plan.wishes import Wishes


def test_fp8_row_of_128_takes_130_bytes() -> None:
    wide = planned("Qwen3-VL-2B-Instruct-FP8", context=8192, sequences=1)
    narrow = replace(wide.settings, kv_dtype="fp8")
    before, after = (
        {line.line: line for line in cost_model(wide.backend).lines(wide.model, wide.gpu, settings)}
        for settings in (wide.settings, narrow)
    )
    assert before["kv_cache"].bytes == 8192 * 114_688
    assert after["kv_cache"].bytes == 8192 * 58_240 == before["kv_cache"].bytes * 130 // 256
    assert "FP8" in after["kv_cache"].note
    others = set(before) - {"kv_cache", "text_workspace"}  # that has what torch rounds the pool up by
    assert {name: before[name] for name in others} == {name: after[name] for name in others}


def test_fp8_cache_fits_more_context() -> None:
    wide, narrow = (
        planned("Qwen3-VL-4B-Instruct-FP8", context=16384, image_tokens=1024, sequences=1, kv_dtype=each)
        for each in ("bf16", "fp8")
    )
    assert (wide.fits, narrow.fits) == (False, True)
    assert narrow.command is not None
    assert narrow.command[narrow.command.index("--kv-dtype") + 1] == "fp8"
    assert plan_to_json(narrow)["settings"]["kv_dtype"] == "fp8"
    changes = [change for change in wide.changes if "--kv-dtype fp8" in change.what]
    assert [change.enough for change in changes] == [True]
    lines = cost_model(wide.backend).lines(wide.model, wide.gpu, replace(wide.settings, kv_dtype="fp8"))
    assert changes[0].frees == wide.total - sum(line.bytes for line in lines)


def test_fp8_step_reads_half_of_the_cache_bytes() -> None:
    wide, narrow = (
        planned("Qwen3-VL-2B-Instruct-FP8", context=4096, image_tokens=1024, sequences=1, kv_dtype=each)
        for each in ("bf16", "fp8")
    )
    assert wide.speed is not None
    assert narrow.speed is not None
    tokens = 1024 + 40  # a picture and a question
    assert wide.speed.bytes_per_token - narrow.speed.bytes_per_token == tokens * (114_688 - 58_240)


def test_vllm_fp8_cache_flag_and_bytes() -> None:
    made = planned("Qwen3-VL-2B-Instruct-FP8", backend="vllm", kv_dtype="fp8", context=4096)
    assert made.command is not None
    assert made.command[made.command.index("--kv-cache-dtype") + 1] == "fp8"
    pool = next(line.bytes for line in made.ledger if line.line == "kv_cache")
    assert pool % (114_688 // 2) == 0
    assert "fp8_kv_unknown" not in codes_of(made.remarks)
    older = planned("2B", machine_with_card("RTX 3060 12GB"), backend="vllm", kv_dtype="fp8", context=4096)
    assert "fp8_kv_unknown" in codes_of(older.remarks)


def test_impossible_kv_dtypes_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        check_wishes(Wishes(backend="transformers", kv_dtype="fp8"))
    assert caught.value.param == "kv_dtype"
    with pytest.raises(UsageError, match="int8") as caught:
        Wishes(kv_dtype="int8")
    assert caught.value.param == "kv_dtype"
    assert planned("2B", EXAMPLE, kv_dtype="bf16").settings == planned("2B", EXAMPLE).settings

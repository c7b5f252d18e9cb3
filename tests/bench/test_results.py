"""Settings of the engine in the results of a benchmark."""

from types import SimpleNamespace
from typing import Any

import pytest

from vlfit.api.stats import EngineSettings
from vlfit.bench import results as facts
from vlfit.checkpoint.source import open_checkpoint
from vlfit.plan.native import ram as in_ram


@pytest.mark.parametrize(
    ("kept", "dtype", "named"),
    [("bf16", "float32", "float32"), ("bf16", "bfloat16", "bfloat16"), ("fp8", "float32", "fp8")],
)
def test_kv_dtype_in_the_results(kept: str, dtype: str, named: str) -> None:
    assert settings_of(dtype, kv_dtype=kept)["kv_dtype"] == named


def test_halves_in_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """mini's matrices are too small for it."""
    assert settings_of("float32", cpu_16_bit=True)["halves"] is False
    monkeypatch.setattr(in_ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(in_ram, "LEAST_INPUTS", 1)
    assert settings_of("float32", cpu_16_bit=True)["halves"] is True
    assert settings_of("float32", cpu_16_bit=False)["halves"] is False


def settings_of(dtype: str, **others: Any) -> dict[str, Any]:
    settings = EngineSettings("cpu", "", dtype, 2 if dtype == "bfloat16" else 4, 64, 16, 1, 64, 64, **others)
    measured: Any = SimpleNamespace(
        account=SimpleNamespace(settings=settings), checkpoint=open_checkpoint("mini")
    )
    return facts.settings_json(measured)

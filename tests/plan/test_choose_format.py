"""Which weights format a name means here that leaves it open, as ``4B`` does. No network."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.edit import copy_of
from tests.checkpoint.test_source import cache, put
from vlfit.backends.opening import BackendSpec, open_backend
from vlfit.checkpoint.source import resolve_name
from vlfit.errors import NotDownloaded
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan.model_choice import choose_format
from vlfit.plan.wishes import Wishes

__all__ = ["cache"]

Tiny = Callable[[str], Path]
BF16, FP8 = "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-4B-Instruct-FP8"


@pytest.fixture(autouse=True)
def models(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLFIT_HOME", str(tmp_path / "vlfit"))
    return tmp_path / "vlfit" / "models"


def chosen(name: str, machine: Machine, wishes: Wishes | None = None) -> str:
    return choose_format(resolve_name(name), machine, wishes).name


@pytest.mark.parametrize(
    ("name", "card", "meant"),
    [
        ("4B", "RTX 5060", FP8),  # int4 leaves more room, but has to be converted
        ("4B", "RTX 4090", BF16),
        ("2B", "RTX 5060", "Qwen/Qwen3-VL-2B-Instruct"),
        ("8B", "RTX 4090", "Qwen/Qwen3-VL-8B-Instruct"),
        ("4B-FP8", "RTX 4090", FP8),
        ("8B-Thinking", "RTX 4080", "Qwen/Qwen3-VL-8B-Thinking-FP8"),
    ],
)
def test_what_is_not_here_is_what_the_plan_ranks_first_on_the_hub(name: str, card: str, meant: str) -> None:
    assert chosen(name, machine_with_card(card)) == meant


def test_without_a_gpu_the_fewest_bytes() -> None:
    machine = machine_with_card("RTX 5060")
    without = Machine(**{**{name: getattr(machine, name) for name in machine.__slots__}, "gpus": ()})
    assert chosen("4B", without) == FP8
    assert chosen("qwen2.5-3b", without) == "Qwen/Qwen2.5-3B-Instruct"  # of those that the hub has


def test_where_only_a_conversion_fits_the_error_has_its_command() -> None:
    with pytest.raises(NotDownloaded) as error:
        chosen("8B", machine_with_card("RTX 5060"))
    assert "vlfit convert Qwen/Qwen3-VL-8B-Instruct --weights int4" in error.value.hint


def test_what_is_here_goes_first(cache: Path, models: Path, tiny: Tiny) -> None:
    card = machine_with_card("RTX 5060")
    put(cache, BF16, tiny("tied"))
    assert chosen("4B", card) == BF16  # though FP8 would fit better
    put(cache, FP8, tiny("fp8"))
    assert chosen("4B", card) == FP8  # of two the better plan
    copy_of(tiny("tied"), models / "Qwen3-VL-4B-Instruct-INT4")
    assert chosen("4B", card) == "Qwen3-VL-4B-Instruct-INT4"


def test_the_copy_that_the_plan_advised_is_found(models: Path, tiny: Tiny) -> None:
    copy_of(tiny("tied"), models / "Qwen3-VL-8B-Instruct-INT4-E8")
    assert chosen("8B", machine_with_card("RTX 5060")) == "Qwen3-VL-8B-Instruct-INT4-E8"


def test_python_takes_the_same_names(cache: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache, FP8, tiny("fp8"))
    opened: list[object] = []
    monkeypatch.setattr(
        "vlfit.backends.native.NativeBackend.load", lambda model, options, progress: opened.append(model)
    )
    for name in ("4B", "qwen3-vl:4b-fp8", "mini"):
        open_backend(BackendSpec(model=name))
    assert opened == [FP8, "qwen3-vl:4b-fp8", "mini"]

"""Names of GGUF models that are here: what a shell completes, and the type that a name without one means."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.hollow_gguf import TINY, only, write_mmproj, write_model
from vlfit.api.engine_options import EngineOptions
from vlfit.backends import opening
from vlfit.backends.opening import BackendSpec
from vlfit.cli.models import resolve_to_one
from vlfit.cli.options import complete_model, complete_removable
from vlfit.cli.plan import _plans_here
from vlfit.cli.printing import Printer
from vlfit.machine.cards import machine_with_card
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB

NAME = "org/Q-GGUF"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Somebody's home: two types of a model in the hub's cache, one of another in LM Studio's folder."""
    for variable in ("HOME", "HF_HOME", "VLFIT_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    files = repository / "snapshots" / ("a" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    for kind in ("Q8_0", "Q4_0"):
        write_model(files / f"Q-{kind}.gguf", only(kind))
    write_mmproj(files / "mmproj-F16.gguf")
    write_model(tmp_path / ".lmstudio" / "models" / "org" / "R-GGUF" / "R-Q4_0.gguf", only("Q4_0"))
    return tmp_path


def test_a_shell_completes_what_is_here() -> None:
    both = {f"{NAME}:Q8_0", f"{NAME}:Q4_0"}
    theirs = "lmstudio:org/R-GGUF:Q4_0"
    assert both | {theirs} <= set(complete_model(""))
    assert set(complete_model("lmstudio:")) == {theirs}
    assert both <= set(complete_removable(""))
    assert theirs not in complete_removable("")  # nothing in other programs' folders is removed


@pytest.mark.parametrize(("device", "kind"), [("auto", "Q8_0"), ("cuda", "Q8_0"), ("cpu", "Q4_0")])
def test_the_type_is_for_the_device_that_was_asked_for(
    device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a computer with a card; at the command line as in Python."""
    monkeypatch.setattr("vlfit.machine.survey.survey", lambda: machine_with_card("RTX 5060"))
    assert resolve_to_one(NAME, Printer(quiet=True), device=device).name == f"{NAME}:{kind}"
    spec = BackendSpec(kind="native", model=NAME, options=EngineOptions(device=device))
    assert opening._one_format(spec) == f"{NAME}:{kind}"


def test_a_plan_counts_what_is_here_and_fits(home: Path) -> None:
    """A model whose layers are to wait in RAM, where there is no room for them, does not."""
    deep = home / ".lmstudio" / "models" / "org" / "deep-GGUF" / "deep-Q8_0.gguf"
    write_model(deep, only("Q8_0"), replace(TINY, layers=12))
    card = machine_with_card("RTX 5060")
    card = replace(card, host=replace(card.host, ram_available=8 * GIB))
    wishes, quiet = Wishes(offload=MIB), Printer(quiet=True)
    assert len(_plans_here(card, Wishes(), quiet)) == 4
    assert [each.model.name for each in _plans_here(card, wishes, quiet)] == ["lmstudio:org/deep-GGUF:Q8_0"]
    full = replace(card, host=replace(card.host, ram_available=0))
    assert _plans_here(full, wishes, quiet) == []

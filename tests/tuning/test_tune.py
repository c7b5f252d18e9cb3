"""Tiles measured on the GPU that is here: each choice is one of the candidates, and what is kept is used."""

from pathlib import Path

import pytest
import torch

from vlfit.kernels.gemm.quantized import card_of
from vlfit.plan.native import tiles as tuned
from vlfit.plan.native.tiles import BUILT_IN
from vlfit.tuning import tune


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_measured_is_kept_and_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "_FEW", {form: sizes[:1] for form, sizes in tune._FEW.items()})
    monkeypatch.setattr(tune, "_SOME", {form: sizes[:1] for form, sizes in tune._SOME.items()})
    monkeypatch.setattr(tune, "_BUSY", (640,))
    monkeypatch.setattr(tune, "_REPLAYS", 1)
    device = torch.device("cuda", 0)
    said: list[str] = []
    table, found = tune.tune(device, said.append)
    assert set(table) == set(BUILT_IN)
    assert len(said) == 1 + len(table)
    for each in found:
        assert 1e-6 < each.seconds <= each.before < 1e-2
        assert each.tiles in (BUILT_IN[each.form, each.regime], *tune._candidates(each.form, each.regime))
    tuned.save(card_of(device), table)
    assert tuned.table_of(card_of(device)) == table
    tuned.table_of.cache_clear()

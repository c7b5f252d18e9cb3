"""Tuning on a GPU: each choice is a candidate, and the stored table is used."""

from pathlib import Path

import pytest
import torch

from vlfit.kernels.gemm.quantized import card_for_device
from vlfit.plan.native import tiles as tuned
from vlfit.plan.native.tiles import BUILT_IN
from vlfit.tuning import tune


@pytest.mark.gpu
def test_measured_tiles_are_stored_and_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        tune, "_CANDIDATES_8_ROWS", {form: sizes[:1] for form, sizes in tune._CANDIDATES_8_ROWS.items()}
    )
    monkeypatch.setattr(
        tune, "_CANDIDATES_16_ROWS", {form: sizes[:1] for form, sizes in tune._CANDIDATES_16_ROWS.items()}
    )
    monkeypatch.setattr(tune, "BUSY_WARPS", (640,))
    monkeypatch.setattr(tune, "REPLAYS", 1)
    device = torch.device("cuda", 0)
    said: list[str] = []
    table, found = tune.tune(device, said.append)
    assert set(table) == set(BUILT_IN)
    assert len(said) == 1 + len(table)
    for each in found:
        assert 1e-6 < each.seconds <= each.built_in_seconds < 1e-2
        assert each.tiles in (
            BUILT_IN[each.weight_format, each.regime],
            *tune.candidate_tiles(each.weight_format, each.regime),
        )
    tuned.save_tiles(card_for_device(device), table)
    assert tuned.load_tiles(card_for_device(device)) == table
    tuned.load_tiles.cache_clear()

"""Tiles measured on a card: saved, used for that card alone, and never read from a broken file."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plan.on_meta import META, Live
from vlfit.kernels.sampling.draw import NUM_FIELDS, sample_tokens
from vlfit.plan.model_lookup import find_exact_models
from vlfit.plan.native import cost as costs
from vlfit.plan.native import tiles as tuned
from vlfit.plan.native.tiles import (
    BUILT_IN,
    FORMS,
    REGIMES,
    CardKind,
    GemmTiles,
    load_tiles,
    save_tiles,
    splits_for,
    tiles_for,
)
from vlfit.tuning import tune

CARD = CardKind("NVIDIA GeForce RTX 4060", (8, 9))
OTHER = CardKind("NVIDIA GeForce RTX 5060", (12, 0))


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuned, "triton_version", lambda: "3.6.0")
    load_tiles.cache_clear()
    yield
    load_tiles.cache_clear()


def table() -> dict[tuple[str, int], GemmTiles]:
    """A table that differs from the built-in one everywhere."""
    return {of: replace(tiles, busy=tiles.busy + 1) for of, tiles in BUILT_IN.items()}


def test_saved_tiles_are_for_one_card() -> None:
    assert load_tiles(CARD) == BUILT_IN
    path = save_tiles(CARD, table())
    assert load_tiles(CARD) == table() != BUILT_IN
    assert load_tiles(OTHER) == BUILT_IN
    assert path.parent.name == "tiles"
    assert "RTX-4060-8.9-3.6.0" in path.name


@pytest.mark.parametrize("what", ["triton_version", "kernels_version"])
def test_saved_tiles_are_for_one_triton_and_kernels(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiles(CARD, table())
    monkeypatch.setattr(tuned, what, lambda: "9.9")
    assert load_tiles(CARD) == BUILT_IN


def broken(change: Any) -> str:
    facts = json.loads(save_tiles(CARD, table()).read_text())
    change(facts)
    return json.dumps(facts)


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.update(version=1),
        lambda facts: facts["tiles"].pop("int4"),
        lambda facts: facts["tiles"]["fp8"].pop("8"),
        lambda facts: facts["tiles"]["fp8"]["8"].update(outputs=48),
        lambda facts: facts["tiles"]["fp8"]["8"].update(rows=16),
        lambda facts: facts["tiles"]["fp8"]["8"].update(warps=True),
        lambda facts: facts["tiles"]["fp8"]["8"].update(parts=3),
        lambda facts: facts["tiles"]["fp8"]["8"].update(busy=0),
        lambda facts: facts["tiles"]["fp8"]["8"].update(outputs=256, inputs=1024, warps=1, stages=6),
        lambda facts: facts["tiles"]["fp8"]["8"].update(outputs=128, inputs=512, warps=1, stages=1),
        lambda facts: facts["tiles"]["fp8"]["8"].update(inputs=64, warps=8, parts=8),
        lambda facts: facts.update(tiles=[]),
    ],
)
def test_broken_files_are_ignored(change: Any) -> None:
    words = broken(change)
    tuned.tiles_path(CARD).write_text(words)
    load_tiles.cache_clear()
    assert load_tiles(CARD) == BUILT_IN
    for junk in ("", "[" * 100_000, "\x00", "3", " " * 2**17):
        tuned.tiles_path(CARD).write_text(junk)
        load_tiles.cache_clear()
        assert load_tiles(CARD) == BUILT_IN


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (10, 0)])
def test_tiles_that_fit_a_larger_cards_shared_memory(capability: tuple[int, int]) -> None:
    """Two stages of 64 KiB of codes and 8 KiB of rows; of int4 it is half the codes."""
    large = {**table(), ("fp8", 8): GemmTiles(8, 128, 512, 8, 2), ("int4", 8): GemmTiles(8, 128, 512, 8, 2)}
    save_tiles(CardKind("H100", capability), large)
    assert load_tiles(CardKind("H100", capability)) == large
    save_tiles(CARD, large)
    assert load_tiles(CARD) == BUILT_IN
    save_tiles(CARD, {**table(), ("int4", 8): large["int4", 8]})
    assert load_tiles(CARD)["int4", 8] == large["int4", 8]


def test_kernels_version_is_a_hash() -> None:
    assert len(tuned.kernels_version()) == 12


def test_splits_depend_on_busy_warps() -> None:
    tiles = GemmTiles(16, 32, 128, 2, 4, busy=640)
    assert splits_for(16, 6144, 2560, tiles) == 2
    assert splits_for(16, 2560, 4096, tiles) == 4
    assert splits_for(16, 2560, 4096, replace(tiles, busy=641)) == 8
    assert [tiles_for(rows, "int4").rows for rows in (1, 8, 9, 16, 17, 33, 64)] == [8, 8, 16, 16, 32, 64, 64]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", REGIMES)
def test_candidate_tiles_can_be_saved(form: str, regime: int) -> None:
    candidates = tune.candidate_tiles(form, regime)
    assert len(set(candidates)) == len(candidates) >= 6
    for tiles in (*candidates, BUILT_IN[form, regime]):
        path = save_tiles(CARD, {**BUILT_IN, (form, regime): tiles})
        assert load_tiles(CARD)[form, regime] == tiles, path


@pytest.mark.parametrize(("gain", "chosen"), [(0.5, True), (0.99, False)])
def test_fastest_tiles_are_chosen_if_clearly_faster(gain: float, chosen: bool) -> None:
    before, better = BUILT_IN["fp8", 16], GemmTiles(16, 64, 128, 4, 4, busy=640)

    def seconds(trial: tune.Trial, *_: object) -> float:
        return 1e-5 * (gain if trial.tiles.outputs == 64 else 1.0)

    class Matrix:
        outputs, inputs = 6144, 2560

    matrices: Any = {name: [Matrix()] for name in tune._MATRICES}
    device: Any = None
    found = tune.choose_tiles("fp8", 16, [before, better], matrices, device, seconds)
    assert found.tiles == (better if chosen else before)
    assert found.built_in_seconds == pytest.approx(4e-5)


@pytest.mark.parametrize("vocabulary", [151_936, 5000])
def test_sampling_bytes_match_the_kernel(vocabulary: int) -> None:
    """Counted on the meta device, for 16 rows."""
    logits = torch.empty((16, vocabulary), dtype=torch.bfloat16, device=META)
    asked = torch.empty((NUM_FIELDS + 1, 16), dtype=torch.int32, device=META)
    asked, positions = asked[:-1], asked[-1]
    with Live() as live:
        sample_tokens(logits, asked, positions)
    assert live.peak == 16 * costs.sampling_bytes(vocabulary)


def test_text_peak_uses_the_cards_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """More split-K programs need more partial sums."""
    monkeypatch.setattr(costs, "HOST_SAMPLER_BYTES", 0)  # a row being sampled is more than a layer of 8 rows
    shared = {of: replace(tiles, busy=100_000) for of, tiles in BUILT_IN.items()}
    assert costs.num_splits(2560, 4096, 8, "fp8") < costs.num_splits(2560, 4096, 8, "fp8", shared)
    (model,) = find_exact_models("4B", "fp8")
    assert costs.text_peak_bytes(model, 8, 1024, 1, table=shared) > costs.text_peak_bytes(model, 8, 1024, 1)

"""``vlfit verify``: the verdict, exit codes, JSON, and a block to post that names nobody."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Vlfit

Tiny = Callable[[str], Path]
STAGES = {"pixels", "patches", "tokens", "positions", "tower.merged", "layer.0.attention", "logits"}


def test_a_sound_model_is_verified(vlfit: Vlfit, tiny: Tiny) -> None:
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--json")
    assert ended.code == 0, ended.out
    told = json.loads(ended.out)
    assert told["ok"] is True
    assert told["checks"]["findings"] == []
    assert {each["stage"] for each in told["checks"]["measured"]} >= STAGES
    memory = told["memory"]
    assert memory["planned"] > 0
    assert 0 <= memory["held"] - memory["planned"] < 512  # small tables of rotary frequencies
    assert told["speed"]["tokens_per_s"] > 0


@pytest.fixture
def misplaced_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower's table of positions is read as if its entries were cells."""

    def interpolation(side: int, count: int) -> Any:
        place = np.clip((np.arange(count) + 0.5) * side / count - 0.5, 0, side - 1).astype(np.float32)
        before = np.floor(place)
        return before.astype(np.int64), place - before

    monkeypatch.setattr("vlfit.models.qwen3_vl.vision._interpolation", interpolation)


@pytest.mark.usefixtures("misplaced_positions")
def test_a_fault_is_named(vlfit: Vlfit, tiny: Tiny) -> None:
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--json")
    assert ended.code == 1
    told = json.loads(ended.out)
    first = told["checks"]["findings"][0]
    assert (told["ok"], first["component"], first["stage"]) == (False, "tower", "tower.embedding")
    assert first["measured"] > first["tolerance"] > 0


@pytest.mark.usefixtures("misplaced_positions")
def test_the_report_has_ten_lines(vlfit: Vlfit, tiny: Tiny) -> None:
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu")
    assert ended.code == 1
    assert "tower.embedding" in ended.out
    assert len(ended.out.splitlines()) <= 10


def test_what_is_shared_names_no_folder(vlfit: Vlfit, tiny: Tiny) -> None:
    folder = tiny("tied")
    ended = vlfit("verify", folder, "--quick", "--device", "cpu", "--share")
    assert ended.code == 0
    assert str(folder.parent) not in ended.out
    assert ended.out.startswith("| | |\n|---|---|\n| model | ")


@pytest.mark.parametrize(
    "flags",
    [("--quick", "--full"), ("--against", "mini", "--table", "mini"), ("--against", "mini", "--share")],
)
def test_what_excludes_each_other_is_refused(vlfit: Vlfit, flags: tuple[str, ...]) -> None:
    assert vlfit("verify", "mini", *flags).code == 2


def test_copies_are_held_against_the_widest(vlfit: Vlfit, tiny_decoder: Tiny, tmp_path: Path) -> None:
    folder = tiny_decoder("qwen3")
    copy = tmp_path / "copies" / "fp8"
    assert vlfit("convert", folder, "--weights", "fp8", "--out", copy, "-y").code == 0
    ended = vlfit("verify", "--table", copy.parent, "--table", folder, "--device", "cpu", "--json")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert [each["widest"] for each in told["copies"]] == [True, False]
    assert [each["weights_format"] for each in told["copies"]][1] == "fp8"
    assert told["copies"][1]["figures"]["kld_mean"] > 0
    against = vlfit("verify", copy, "--against", folder, "--device", "cpu")
    assert against.code == 0
    assert f"{told['copies'][1]['figures']['kld_mean']:.5f}" in against.out


def test_a_text_model(vlfit: Vlfit, tiny_decoder: Tiny) -> None:
    ended = vlfit("verify", tiny_decoder("qwen3"), "--quick", "--device", "cpu", "--json")
    assert ended.code == 0, ended.out
    assert json.loads(ended.out)["speed"]["picture"] is None

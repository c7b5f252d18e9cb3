"""Copies of one model beside the widest: distributions, boxes, words and counts, and what is refused."""

import re
from collections.abc import Callable
from math import log
from pathlib import Path

import pytest
import torch

from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint, read_checkpoint
from vlfit.errors import UsageError
from vlfit.parity.copies import divergence
from vlfit.parity.questions import (
    boxes_overlap,
    draw_count,
    figures_of,
    first_number,
    make_questions,
    says_words,
)
from vlfit.quantize.conversion import convert
from vlfit.verify.verify_copies import MOST_COPIES, compare_copies, names_in, rows_json, table_lines

# Each engine of a check is collected by itself.
pytestmark = pytest.mark.usefixtures("only_its_own_to_collect")
Folder = Callable[[str], Path]
OPTIONS = EngineOptions(device="cpu")


def test_divergence_is_in_nats() -> None:
    right = torch.tensor([0.5, 0.5]).log()
    assert divergence(right, torch.tensor([0.75, 0.25]).log()) == pytest.approx(0.5 * log(1 / 0.75))
    assert divergence(right, right + 3) == pytest.approx(0.0, abs=1e-7)  # logits may be shifted
    padded = torch.tensor([0.5, 0.5, 1e-30]).log()
    assert divergence(padded, right) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("answer", "number"),
    [("There are 12 stars", 12), ("Seven of them", 7), ("None that I know", None), ("no cats", 0)],
)
def test_numbers_are_read(answer: str, number: int | None) -> None:
    assert first_number(answer) == number


def test_words_and_boxes_are_held_against_others() -> None:
    assert says_words('It says "EXIT".', "EXIT")
    assert not says_words("EXITS and Exit", "EXIT")
    one, two = ('{"bbox_2d": [0, 0, 100, 100]}', '{"bbox_2d": [0, 0, 100, 50]}')
    assert boxes_overlap(one, one) == 1.0
    assert boxes_overlap(two, one) == 0.5
    assert boxes_overlap(one + two, one) == 0.5  # one more than there was
    assert boxes_overlap("none", one) == 0.0
    assert boxes_overlap(one, "none") is None


def test_figures_count_what_changed() -> None:
    questions = [each for each in make_questions(sees=True) if each.kind in ("words", "count")]
    widest = [each.truth for each in questions]
    ours = ["other", *widest[1:-1], "99"]
    figures = figures_of(questions, ours, widest, [0.1, 0.3], 3, 4, same_prompt=True)
    assert (figures.words, figures.words_changed, figures.words_right) == (6, 1, 5)
    assert (figures.counts, figures.counts_changed, figures.counts_right) == (6, 1, 5)
    assert figures.kld_mean == pytest.approx(0.2)
    assert (figures.kld_most, figures.top1) == (0.3, 0.75)
    assert figures.boxes_iou is None


def test_things_that_are_counted_are_apart() -> None:
    import io

    from PIL import Image

    pictures = [Image.open(io.BytesIO(draw_count("circles", count))).convert("L") for count in (1, 2, 9)]
    dark = [sum(picture.histogram()[:200]) for picture in pictures]
    assert dark[1] == 2 * dark[0]
    assert dark[2] == 9 * dark[0]


def test_a_quantized_copy_beside_its_sibling(tiny: Folder, tmp_path: Path) -> None:
    wide = open_checkpoint(tiny("tied"))
    convert(wide, "fp8", tmp_path / "fp8")
    copy = read_checkpoint("fp8", tmp_path / "fp8")
    rows = compare_copies([copy, wide], OPTIONS)
    assert [row.is_widest for row in rows] == [True, False]
    assert rows[0].name == wide.name
    first, second = (row.figures for row in rows)
    assert first is not None
    assert second is not None
    assert (first.kld_most, first.top1) == (0.0, 1.0)
    assert 0 < second.kld_mean < 0.1 < second.kld_most + 0.1
    assert 0.5 < second.top1 <= 1.0
    assert second.same_prompt
    assert rows_json(rows)["copies"][1]["figures"]["kld_mean"] == second.kld_mean
    assert len(table_lines(rows)) == 4


def test_a_copy_of_itself_has_no_divergence(tiny_decoder: Folder) -> None:
    same = open_checkpoint(tiny_decoder("qwen3"))
    figures = compare_copies([same, same], OPTIONS)[1].figures
    assert figures is not None
    assert figures.kld_most < 1e-9
    assert figures.top1 == 1.0
    assert figures.words is None  # it has no tower


def test_another_model_is_refused(tiny: Folder, tiny_decoder: Folder) -> None:
    with pytest.raises(UsageError, match=r"qwen3\b.*llama|llama.*qwen3\b"):
        compare_copies(
            [open_checkpoint(tiny_decoder("qwen3")), open_checkpoint(tiny_decoder("llama2"))], OPTIONS
        )
    with pytest.raises(UsageError, match=r"\b1$|\b1\n"):
        compare_copies([open_checkpoint(tiny("tied"))], OPTIONS)


def test_a_folder_names_its_copies(tmp_path: Path) -> None:
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
    for name in ("model-Q8_0.gguf", "mmproj-model.gguf", "notes.txt"):
        (tmp_path / name).touch()
    found = [Path(each).name for each in names_in([str(tmp_path), "4B"])]
    assert found == ["model-Q8_0.gguf", "a", "b", "4B"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match=re.escape(repr(str(empty)))):
        names_in([str(empty)])
    with pytest.raises(UsageError, match=rf"^{MOST_COPIES + 1}\b.*\b{MOST_COPIES}\b"):
        names_in([str(number) for number in range(MOST_COPIES + 1)])

"""The ten pictures of the model card, and the table of what two checkpoints say about them."""

import json
from pathlib import Path

import pytest

from training.mini import compare
from training.mini.compare import OWN, TEN, CannotCompare, kept_words, table
from vlfit.client import VLM
from vlfit.tasks.describe import CAPTION_SHORT


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "before.json"
    path.write_text(json.dumps({shown.path.name: f"A {shown.path.stem} | seen." for shown in TEN}))
    return path


def test_the_ten_are_there_small_and_their_sources_are_named() -> None:
    assert len({shown.path.name for shown in TEN}) == 10
    for shown in TEN:
        assert shown.path.is_file()
        sources = OWN / "README.md" if shown.path.parent == OWN else shown.path.parent.parent / "PICTURES.md"
        assert shown.path.name in sources.read_text("utf-8")
        assert shown.path.parent != OWN or shown.path.stat().st_size <= 60_000
    assert {path.name for path in OWN.glob("*.jpg")} == {s.path.name for s in TEN if s.path.parent == OWN}


def test_the_table_sets_the_words_of_both_beside_what_is_shown(kept: Path) -> None:
    before = kept_words(kept)
    after = dict.fromkeys(before, "Something else.")
    text = table({"before": before, "after": after}, markdown=False)
    assert text.count("Something else.") == 10
    assert "coffee.jpg\n  shows   photo: a cup of coffee" in text
    assert "  before  A coffee | seen.\n  after   Something else." in text
    rows = table({"before": before, "after": after}, markdown=True).splitlines()
    assert len(rows) == 12
    assert rows[0] == "| picture | what it shows | before | after |"
    # A bar in an answer does not end the cell.
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}


def test_kept_words_come_back_and_can_be_kept_again(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again.json"
    assert compare.main(["--before", str(kept), "--markdown", "--save", str(again)]) == 0
    assert json.loads(again.read_text()) == json.loads(kept.read_text())
    assert capsys.readouterr().out.startswith("| picture | what it shows | before |\n")


def test_a_checkpoint_is_asked_for_the_short_caption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "TEN", TEN[-1:])
    words = compare.words_of("mini")
    assert list(words) == ["red.jpg"]
    with VLM("mini") as vlm:
        assert words["red.jpg"] == vlm.ask(CAPTION_SHORT, TEN[-1].path).text


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"coffee.jpg": 3}', '{"coffee.jpg": "A cup."}'])
def test_kept_words_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "words.json"
    path.write_text(text)
    with pytest.raises(CannotCompare, match=r"words\.json"):
        kept_words(path)


@pytest.mark.parametrize("source", ["nowhere.json", "no-such-folder"])
def test_a_checkpoint_that_is_not_there_is_an_error_with_a_line(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--before", str(tmp_path / source)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_nothing_to_compare_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main([])
    assert "--before" in capsys.readouterr().err

"""Asking, adding up and gates: with a model of words only, and once with mini itself."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from training.mini import asking, evaluate
from training.mini.asking import QuestionProgress, ask_all, ask_dialogue, parts_of
from training.mini.evaluate import clothes_in, main
from training.mini.gates import (
    GATES,
    OPTIONAL,
    OVERALL,
    Row,
    ScoredAnswer,
    copies_pass,
    drop,
    drop_lines,
    gates_pass,
    summarize,
    table_lines,
)
from training.mini.held_out import HeldOut, read, write
from training.mini.teller import Exchange
from training.mini.vocabulary import CLOTHES
from vlfit.api.conversation import ImagePart, VideoPart


def judged(
    topic: str, score: float, answer: str = "It is so.", said: str = "", picture: str = "p"
) -> ScoredAnswer:
    return ScoredAnswer(picture, Exchange(topic, "?", answer), said, score)


def jpeg(size: tuple[int, int] = (150, 130)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(buffer, "JPEG")
    return buffer.getvalue()


# Adding up


def test_topics_are_means_and_is_there_is_balanced() -> None:
    table = summarize(
        [judged("colour", 1.0), judged("colour", 0.0)]
        + [judged("is there", 1.0, "Yes, there is.")] * 3
        + [judged("is there", 0.0, "No, there is not.")]
    )
    assert table["colour"] == Row(2, 0.5, GATES["colour"])
    assert table["is there"].right == 0.5
    assert table[OVERALL] == Row(6, 4 / 6)


def test_words_are_also_told_apart_by_length() -> None:
    table = summarize([judged("written", 1.0, 'It says "CAT".'), judged("written", 0.0, 'It says "TIGER".')])
    assert table["  3 letters"] == Row(1, 1.0)
    assert table["  5 letters"] == Row(1, 0.0)


def test_boxes_have_a_mean_overlap_and_json_a_share_that_parses() -> None:
    truth = '[{"bbox_2d": [0, 0, 10, 10], "label": "dog"}]'
    half = '[{"bbox_2d": [0, 0, 10, 5], "label": "dog"}]'
    table = summarize(
        [
            judged("locate one", 0.0, truth, half),
            judged("locate all", 0.0, truth, "no boxes"),
            judged("name", 1.0),
        ]
    )
    assert table["overlap"] == Row(2, 0.25)
    assert table["JSON"] == Row(2, 0.5, GATES["JSON"])
    assert "MISSED" in "\n".join(table_lines(table))


def full_table(**changed: float) -> dict[str, Row]:
    """Every gate just reached."""
    return {topic: Row(100, changed.get(topic, gate), gate) for topic, gate in GATES.items()}


def test_gates_are_reached_missed_or_not_asked() -> None:
    assert gates_pass(full_table(), partial=False)
    assert not gates_pass(full_table(colour=0.969), partial=False)
    without_clothes = {topic: row for topic, row in full_table().items() if topic not in OPTIONAL}
    assert gates_pass(without_clothes, partial=False), "clothes are asked where there are photos"
    without_names = {topic: row for topic, row in full_table().items() if topic != "name"}
    assert not gates_pass(without_names, partial=False)
    assert gates_pass(without_names, partial=True)


def test_a_copy_is_compared_on_the_questions_it_was_asked() -> None:
    original = [judged("name", 1.0, picture=str(n)) for n in range(4)] + [judged("count", 0.0)]
    copy = [judged("name", 0.0, picture="0"), judged("name", 1.0, picture="1"), judged("count", 1.0)]
    lost = drop(original, copy)
    assert lost == {"name": 50.0, "count": -100.0, OVERALL: 0.0}
    assert copies_pass({"fp8": lost})
    assert copies_pass({"fp8": {OVERALL: 0.5}, "int4": {OVERALL: 2.0}})
    assert not copies_pass({"fp8": {OVERALL: 0.51}})
    assert not copies_pass({"fp8": {OVERALL: 0.0}, "int4": {OVERALL: 2.1}})
    assert "MISSED" in drop_lines("int4", {OVERALL: 2.1, "name": 3.0, "count": 0.0}, 3)[0]
    assert "MISSED" in drop_lines("int4", {OVERALL: 2.1}, 50, sampled=True)[0]
    assert "MISSED" not in drop_lines("int4", {OVERALL: 2.1}, 49, sampled=True)[0]
    assert [
        line.split() for line in drop_lines("int4", {OVERALL: 0.1, "name": 3.0, "count": 0.0}, 3)[1:]
    ] == [["name", "+3.00"]]
    with pytest.raises(ValueError, match="only the copy"):
        drop(original, [judged("name", 1.0, picture="unknown")])


# Asking


class Chat:
    """Answers from a list, and remembers what it was asked."""

    def __init__(self, answers: list[str]) -> None:
        self.answers = iter(answers)
        self.asked: list[tuple[str, int]] = []

    def ask(self, text: str, *pictures: Any) -> Any:
        self.asked.append((text, len(pictures)))
        return type("Answer", (), {"text": next(self.answers)})()


class Model:
    """Stands for a VLM: one chat, its settings kept."""

    def __init__(self, answers: list[str]) -> None:
        self.one = Chat(answers)
        self.settings: dict[str, Any] = {}

    def chat(self, **settings: Any) -> Chat:
        self.settings = settings
        return self.one


def test_a_dialogue_is_asked_turn_by_turn_and_its_pictures_once() -> None:
    turns = (
        Exchange("name", "What is this?", "It is a dog."),
        Exchange("colour", "Its colour?", "It is red."),
    )
    model = Model(["It is a dog.", "It is blue."])
    found = ask_dialogue(model, HeldOut("two", (b"1", b"2"), False, "Be brief.", (turns,)), turns)  # type: ignore[arg-type]
    assert [one.score for one in found] == [1.0, 0.0]
    assert model.one.asked == [("What is this?", 2), ("Its colour?", 0)]
    assert model.settings["system"] == "Be brief."
    assert model.settings["temperature"] == 0


def test_clips_go_as_clips() -> None:
    clip = HeldOut("clip", (b"1", b"2", b"3"), True, "", ())
    assert parts_of(clip) == (VideoPart((b"1", b"2", b"3"), 2.0, "clip"),)
    assert parts_of(HeldOut("one", (b"1",), False, "", ())) == (ImagePart(b"1", "one"),)


def test_clothes_are_asked_by_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        clothes_in(tmp_path)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "missing"))):
        clothes_in(tmp_path / "missing")
    for name in CLOTHES:
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        clothes_in(tmp_path)
    for name in CLOTHES:
        (tmp_path / name / "1.jpg").write_bytes(jpeg())
    items = clothes_in(tmp_path)
    assert [item.dialogues[0][0].answer for item in items] == [
        f"It is {phrase}." for phrase in CLOTHES.values()
    ]
    assert {item.dialogues[0][0].topic for item in items} == {"clothes"}
    (tmp_path / "cars").mkdir()
    with pytest.raises(ValueError, match="cars"):
        clothes_in(tmp_path)


# The command


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Two questions about a red picture, and a greeting."""
    about = tuple((Exchange(topic, "What is this?", "It is a dog."),) for topic in ("name", "colour"))
    items = [
        HeldOut("red", (jpeg(),), False, "", about),
        HeldOut("talk", (), False, "", ((Exchange("talk", "Hello", "Hello!"),),)),
    ]
    write(tmp_path / "few.zip", items, "free")
    return tmp_path / "few.zip"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is answered by topic, in place of a model; all right at first."""
    said = {"name": "It is a dog.", "colour": "It is a dog.", "talk": "Hello!", "clothes": ""}

    def ask_all(
        _model: str, items: list[HeldOut], progress: QuestionProgress, _processes: int
    ) -> list[ScoredAnswer]:
        asked = [(item.name, e) for item in items for turns in item.dialogues for e in turns]
        progress(len(asked))
        return [ScoredAnswer(name, e, said[e.topic], float(said[e.topic] == e.answer)) for name, e in asked]

    monkeypatch.setattr(evaluate, "ask_all", ask_all)
    return said


def test_the_table_the_exit_status_and_the_json(
    questions: Path, answers: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--questions", str(questions), "--only", "name", "--only", "colour"]
    assert main([*given, "--json", str(tmp_path / "scores.json")]) == 0
    printed = capsys.readouterr().out
    assert "colour" in printed
    assert "talk" not in printed
    assert "clothes: not asked" in printed
    answers["name"] = "It is a cat."
    assert main([*given, "--json", str(tmp_path / "scores.json")]) == 1
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written["topics"]["name"] == {
        "asked": 1,
        "right": 0.0,
        "gate": 0.9,
        "sampled": False,
        "passes": False,
        "missed": True,
    }
    assert [wrong["said"] for wrong in written["wrong"]] == ["It is a cat."]


def test_a_full_run_without_all_gates_fails(questions: Path, answers: dict[str, str]) -> None:
    assert answers
    assert main(["--questions", str(questions)]) == 1
    assert main(["--questions", str(questions), "--sample", "3"]) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--only", "cooking"], 'no question is about "cooking"; the topics are "name", "colour", "talk"'),
        (["--only", "clothes"], "give --clothes FOLDER"),
        (["--clothes", "nowhere"], "nowhere must hold one folder of photos for each of dress"),
        (["--questions", "nowhere.zip"], "nowhere.zip: no such file"),
    ],
)
def test_what_cannot_be_asked_is_told(
    given: list[str], said: str, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--questions", str(questions), *given]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--sample", "0"], "'0': give a whole number from 1 on"),
        (["--sample", "abc"], "'abc': give a whole number from 1 on"),
        (["--processes", "-1"], "give a whole number from 1 on"),
        (["--json", "nowhere/scores.json"], "there is no folder nowhere"),
        (["--json", "."], "is a folder"),
    ],
)
def test_what_makes_no_sense_is_refused(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_gate_missed_on_a_few_of_a_sample_fails_nothing(
    tmp_path: Path, answers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    answers["name"] = "It is a cat."
    dialogues = tuple((Exchange("name", f"What is this, {n}?", "It is a dog."),) for n in range(120))
    path = tmp_path / "many.zip"
    write(path, [HeldOut("red", (jpeg(),), False, "", dialogues)], "free")
    given = ["--questions", str(path), "--only", "name"]
    assert main([*given, "--sample", "49", "--json", str(tmp_path / "few.json")]) == 0
    printed = capsys.readouterr().out
    assert "too few to tell" in printed
    assert "MISSED" not in printed
    row = json.loads((tmp_path / "few.json").read_text())["topics"]["name"]
    assert (row["asked"], row["passes"], row["missed"]) == (49, False, False)
    assert main([*given, "--sample", "50"]) == 1
    assert "MISSED" in capsys.readouterr().out
    assert main(given) == 1


def test_mini_answers_through_the_engine(
    questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = tuple(jpeg() for _ in range(4))
    turns = (Exchange("follow-up", "What happens?", "?"), Exchange("follow-up", "And the background?", "?"))
    items = [*read(questions), HeldOut("clip", frames, True, "Be brief.", (turns,))]
    write(tmp_path / "more.zip", items, "free")
    path = tmp_path / "scores.json"
    assert main(["--questions", str(tmp_path / "more.zip"), "--json", str(path)]) == 1
    capsys.readouterr()
    written = json.loads(path.read_text())
    assert written["topics"]["all"]["asked"] == 5
    assert len([wrong for wrong in written["wrong"] if wrong["said"]]) >= 3, "words came from the model"


@pytest.mark.slow
def test_several_processes_give_the_same_answers(questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "WORTH_A_PROCESS", 20)
    about = tuple((Exchange("talk", f"Hello {n}", "Hello!"),) for n in range(20))
    items = [HeldOut(f"talk-{n}", (), False, "", about[n * 2 : n * 2 + 2]) for n in range(10)]
    items += [HeldOut(f"more-{n}", (), False, "", about[n * 2 : n * 2 + 2]) for n in range(10)] + read(
        questions
    )
    told: list[int] = []
    assert sum(item.questions for item in items) > 40
    together = ask_all("mini", items, told.append, processes=2)
    assert told == sorted(told)
    assert told[-1] == len(together) == sum(item.questions for item in items)
    alone = ask_all("mini", items[-26:], told.append, processes=1)
    assert [(one.picture, one.exchange, one.said) for one in together[-len(alone) :]] == [
        (one.picture, one.exchange, one.said) for one in alone
    ]


@pytest.mark.slow
def test_copies_are_made_and_compared(
    questions: Path, answers: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answers
    path = tmp_path / "scores.json"
    given = ["--questions", str(questions), "--only", "name", "--copies", "--json", str(path)]
    assert main(given) == 0
    assert re.search(r"\bint4\b.* \+0\.00 .*\b1\b", capsys.readouterr().out)
    assert json.loads(path.read_text())["points_lost"] == {
        w: {"name": 0.0, "all": 0.0} for w in ("fp8", "int4")
    }
    capsys.readouterr()
    assert main([*given, "--model", str(tmp_path)]) == 2
    assert "vlfit convert --weights fp8 failed" in capsys.readouterr().err


def test_a_copy_that_loses_fails_but_not_on_a_few_of_a_sample(
    questions: Path, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers

    def worse(_model: str, items: list[HeldOut], _processes: int) -> dict[str, list[ScoredAnswer]]:
        asked = [(item.name, e) for item in items for turns in item.dialogues for e in turns]
        return {"int4": [ScoredAnswer(name, exchange, "", 0.0) for name, exchange in asked]}

    monkeypatch.setattr(evaluate, "ask_copies", worse)
    given = ["--questions", str(questions), "--only", "name", "--copies"]
    assert main(given) == 1
    assert main([*given, "--sample", "3"]) == 0


def test_a_checkpoint_that_is_none_is_told(
    questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--questions", str(questions), "--model", str(tmp_path)]) == 2
    assert "evaluate: " in capsys.readouterr().err
    assert main(["--questions", str(questions), "--model", "nosuch"]) == 2
    message, hint = capsys.readouterr().err.strip().split("\n")
    assert "nosuch" in message
    assert hint not in message

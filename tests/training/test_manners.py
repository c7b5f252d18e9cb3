"""Small talk: wordings vary, answers do not, and what is held out stays held out."""

import re
from collections import defaultdict
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest

from training.mini.manners import (
    HELD_OUT,
    SYSTEMS,
    TOPIC,
    plain,
    read_talk,
    small_talk,
    talk_dialogue,
    talk_with_picture,
)
from training.mini.teller import Exchange
from training.mini.wordings import BadWording, compiled, say
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT

# Words in capitals that are no lists; anything else in capitals is a list whose name is misspelt.
CAPITALS = {
    "ASCII", "BERT", "CPU", "CSS", "DAN", "DNA", "FROM", "GPT", "GPU", "HTML", "JSON", "LLM", "PDF", "PHP",
    "SELECT", "SQL", "USA", "API", "VLM", "LLaVA",
}  # fmt: skip


@pytest.fixture(scope="module")
def talk() -> list[Exchange]:
    random = np.random.default_rng(7)
    return [small_talk(random) for _ in range(20_000)]


def test_a_seed_gives_the_same_talk() -> None:
    one, other = (np.random.default_rng(3) for _ in range(2))
    assert [small_talk(one) for _ in range(50)] == [small_talk(other) for _ in range(50)]
    assert talk_dialogue(one) == talk_dialogue(other)
    assert [small_talk(one) for _ in range(5)] != [small_talk(np.random.default_rng(4)) for _ in range(5)]


def test_one_question_has_one_answer_however_it_is_typed(talk: list[Exchange]) -> None:
    answers: dict[str, set[str]] = defaultdict(set)
    for exchange in talk:
        answers[plain(exchange.question)].add(exchange.answer)
    assert {question: found for question, found in answers.items() if len(found) > 1} == {}
    assert {exchange.topic for exchange in talk} == {TOPIC}


def test_every_intent_comes_up_and_its_answer_is_short_and_about_mini(talk: list[Exchange]) -> None:
    intents = read_talk()
    assert {exchange.answer for exchange in talk} == {intent.answer for intent in intents.values()}
    for intent in intents.values():
        assert len(intent.answer.split()) <= 35, intent.name
        assert intent.answer[-1] == "."
    assert "mini" in intents["who"].answer
    assert "vlfit" in intents["who"].answer
    assert intents["no picture"].answer == "I see no picture. Please attach one."


def test_questions_vary_as_people_type(talk: list[Exchange]) -> None:
    questions = [exchange.question for exchange in talk]
    assert len(set(questions)) > 8_000
    share_lower = sum(question == question.lower() for question in questions) / len(questions)
    share_bare = sum(question.rstrip()[-1] not in "?.!" for question in questions) / len(questions)
    assert 0.2 < share_lower < 0.7
    assert 0.2 < share_bare < 0.7
    assert max(len(question.split()) for question in questions) < 90


def test_slips_of_the_finger_change_one_or_two_letters_only() -> None:
    asked = "what can you do for me"
    intent = replace(read_talk()["can"], wordings=((f"{asked}?",),), alone=True)
    random = np.random.default_rng(0)
    slipped = {
        question
        for question in (intent.ask(random).question.strip().lower() for _ in range(3000))
        if plain(question) != asked
    }
    assert len(slipped) > 20
    for question in slipped:
        assert abs(len(plain(question)) - len(asked)) <= 1
        assert SequenceMatcher(None, plain(question), asked).ratio() > 0.9, question


def test_what_models_are_asked_for_a_caption_is_known_without_a_picture() -> None:
    wordings = read_talk()["no picture"].wordings
    assert (CAPTION_SHORT,) in wordings
    assert (CAPTION_LONG,) in wordings


def test_every_wording_is_spelt_out() -> None:
    random = np.random.default_rng(1)
    for intent in read_talk().values():
        for wording in intent.wordings:
            for _ in range(8):
                text = say((wording,), random)
                assert text.strip(), intent.name
                assert not set("{}|") & set(text), text
                assert set(re.findall(r"[A-Z]{3,}", text)) <= CAPITALS, text


def test_enough_is_held_out_and_each_intent_has_some() -> None:
    intents = read_talk()
    assert len(HELD_OUT) >= 40
    assert all(intent.held_out for intent in intents.values())
    assert len({plain(exchange.question) for exchange in HELD_OUT}) == len(HELD_OUT)
    assert {exchange.answer for exchange in HELD_OUT} == {intent.answer for intent in intents.values()}


def test_what_is_held_out_is_never_said(talk: list[Exchange]) -> None:
    kept = {plain(exchange.question) for exchange in HELD_OUT}
    assert not kept & {plain(exchange.question) for exchange in talk}
    # Even an intent whose wordings could give it draws again.
    asked = HELD_OUT[0].question
    intent = replace(read_talk()["greeting"], wordings=((asked,), ("something else",)))
    random = np.random.default_rng(2)
    said = {plain(intent.ask(random).question) for _ in range(200)}
    assert plain("something else") in said
    assert plain(asked) not in said


def test_dialogues_begin_and_end_as_dialogues_do() -> None:
    random = np.random.default_rng(5)
    answers = {place: set[str]() for place in ("first", "last", "later", "")}
    for intent in read_talk().values():
        answers[intent.place].add(intent.answer)
    lengths = set()
    for _ in range(600):
        dialogue = talk_dialogue(random)
        lengths.add(len(dialogue))
        assert dialogue[0].answer not in answers["last"] | answers["later"]
        assert all(exchange.answer not in answers["first"] for exchange in dialogue[1:])
        assert all(exchange.answer not in answers["last"] for exchange in dialogue[:-1])
        assert len({exchange.question for exchange in dialogue}) == len(dialogue)
    assert lengths == {2, 3}


def test_talk_beside_a_picture_denies_no_picture() -> None:
    random = np.random.default_rng(6)
    intents = read_talk()
    said = {talk_with_picture(random).answer for _ in range(3000)}
    assert said == {intent.answer for intent in intents.values() if not intent.blind}
    assert intents["no picture"].answer not in said
    between = {talk_with_picture(random, between=True).answer for _ in range(3000)}
    assert intents["greeting"].answer not in between
    assert intents["thanks"].answer in between


def test_limits_are_told_to_who_asks_for_them() -> None:
    random = np.random.default_rng(8)
    limits = read_talk()["limits"]
    asked = {plain(limits.ask(random).question) for _ in range(2000)}
    assert {"what can ' t you do", "what are your limits"} <= asked


def test_system_prompts_differ_in_length_and_manner() -> None:
    assert len(set(SYSTEMS)) >= 25
    lengths = [len(system.split()) for system in SYSTEMS]
    assert min(lengths) < 4
    assert 25 < max(lengths) <= 40


def test_choices_are_drawn_and_lists_filled_in() -> None:
    lists = {"PET": (("dog",), ("cat",))}
    wording = compiled("a {|big }PET {runs|{sits|lies} there}, GPT", lists)
    random = np.random.default_rng(0)
    said = {say((wording,), random) for _ in range(500)}
    ends = ("runs", "sits there", "lies there")
    assert said == {
        f"a {size}{pet} {end}, GPT" for size in ("", "big ") for pet in ("dog", "cat") for end in ends
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[greeting] share 1\nhello\n", "line 1, .*one answer"),
        ("# why\n[greeting] share 1\n> Hello!\n", "line 2, .*no wordings"),
        ("[greeting] share 1\n> Hello!\nhi {there|you\n", "braces do not match in 'hi {there|you'"),
        ("[greeting] share 1\n> Hello!\nhi there}\n", "braces do not match"),
        ("[greeting] often\n> Hello!\nhi\n", r"line 1, \[greeting\] often: .*often"),
    ],
)
def test_what_is_written_wrongly_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "talk.txt"
    path.write_text(text)
    with pytest.raises(BadWording, match=message):
        read_talk(path)

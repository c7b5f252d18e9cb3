"""Learning from a trained mini on a CPU: drawing, what the teacher reads, and a run of two steps."""

from pathlib import Path

import numpy as np
import pytest
import torch

from training.mini.atlas import built_in_atlas
from training.mini.data import BatchForm, one_batch
from training.mini.export import load_weights
from training.mini.lots import draw_scene
from training.mini.render import Renderer, to_numbers
from training.mini.sequences import PADDING, Sequence, Words, begin_with_pictures, stack
from training.mini.shape import MINI35
from training.mini.teacher import Teacher, distance, without_thoughts
from training.mini.teller import Exchange
from training.mini.tokenizer import PACKAGE, added_id
from training.mini.train import Trainer, TrainingPlan

TURNS = [Exchange("name", "What is this?", "It is a dog."), Exchange("x", "Is it?", "Yes.")]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_things_drawn_in_their_boxes_are_those_drawn_over_whole_pictures() -> None:
    atlas = built_in_atlas()
    renderer = Renderer(atlas, CPU)
    scenes = [draw_scene(seed, (160, 128), atlas) for seed in range(30)]
    numbers = to_numbers(scenes)
    for scale in (1.0, 0.7):
        x = (torch.arange(round(160 * scale)) + 0.5) * (160 / round(160 * scale))
        y = (torch.arange(round(128 * scale)) + 0.5) * (128 / round(128 * scale))
        whole, boxes = (torch.full((len(scenes), 3, len(y), len(x)), 50.0) for _ in range(2))
        renderer.draw_at_once(whole, torch.from_numpy(numbers.things), numbers, x, y)
        renderer.draw_in_boxes(boxes, numbers, x, y)
        assert torch.equal(whole, boxes)
        assert float((whole - 50).abs().max()) > 50


def test_the_teacher_reads_what_mini_would_be_asked() -> None:
    path = str(PACKAGE / "tokenizer.json")
    rows = []
    for hybrid in (True, False):
        row = Sequence(320, Words(path, hybrid))
        begin_with_pictures(row, (256, 256), "You are mini.")
        assert row.exchange(TURNS)
        if hybrid:
            assert row.exchange(TURNS[:1], "A question. I look.")
        row.talk([Exchange("talk", "Hello", "Hello!"), Exchange("talk", "Who are you?", "I am mini.")], "")
        rows.append(stack([row]))
    with_thoughts, plain = rows
    lesson = without_thoughts(with_thoughts)

    def read(layout: object, segment: int) -> list[list[int]]:
        where = layout.segments[0] == segment  # type: ignore[attr-defined]
        return [layout.tokens[0, where].tolist(), *layout.positions[:, 0, where].tolist()]  # type: ignore[attr-defined]

    for segment in (0, 1, 100):
        assert read(lesson.layout, segment) == read(plain, segment)
    # Where the first word of an answer is to be learnt, the teacher is asked at the end of the question.
    learnt = np.flatnonzero(with_thoughts.targets[0] >= 0)
    first = [place for place in learnt if lesson.layout.segments[0, place] == PADDING]
    asked = [int(lesson.source[0, place]) for place in first]
    assert {with_thoughts.tokens[0, place + 1] for place in asked if place >= 0} == {added_id("<think>")}
    assert sum(place >= 0 for place in asked) == 3
    assert any(place < 0 for place in asked), "of thoughts it knows nothing"


def test_a_student_learns_from_mini_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "measure", lambda trainer: None)
    plan = TrainingPlan(
        10.0, tmp_path, tmp_path / "work", batch=2, workers=0, warm_up=2, compiled=False, most_steps=3,
        start=PACKAGE, teacher=PACKAGE, easy_until=0.0, kept=4, seed=7,
    )  # fmt: skip
    trainer = Trainer(plan, MINI35, built_in_atlas(), CPU)
    trainer.run()
    learnt, mini = load_weights(tmp_path), load_weights(PACKAGE)
    tower = [name for name in mini if name.startswith("model.visual.") and "merger" not in name]
    assert all(torch.equal(learnt[name], mini[name]) for name in tower), "the tower is the teacher's"
    assert not torch.equal(
        learnt["model.visual.merger.linear_fc2.weight"], mini["model.visual.merger.linear_fc2.weight"]
    )
    assert trainer.loss < trainer.first_loss


def test_the_teacher_is_no_distance_from_itself() -> None:
    atlas = built_in_atlas()
    words = Words(str(PACKAGE / "tokenizer.json"), hybrid=True)
    batch = one_batch(BatchForm("one", (256, 256), 1.0), np.random.default_rng(0), 2, atlas, words)
    taught = Teacher(PACKAGE, Renderer(atlas, CPU)).teach(batch)
    slots = torch.from_numpy(batch.layout.slots).long()
    states = [state.float() for state in taught.states]
    assert float(distance(taught, taught.image, states, slots)) < 1e-3
    assert float(distance(taught, taught.image, [states[0]] * len(states), slots)) > 0.3
    assert float(taught.chances.float().sum(-1).min()) > 0.5
    assert 0 < float(taught.known.mean()) <= 1

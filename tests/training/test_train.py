"""A whole training run in seconds: it learns, stops, goes on, and leaves a checkpoint that loads."""

import json
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed

from training.mini.atlas import built_in_atlas
from training.mini.data import KINDS, draw_form, make_batch, one_batch
from training.mini.export import export
from training.mini.model import Model
from training.mini.muon import orthogonalize
from training.mini.refine import FineTuningBatches, refine
from training.mini.render import Renderer
from training.mini.sequences import BLIND, Words
from training.mini.team import Team
from training.mini.tokenizer import PACKAGE
from training.mini.train import NO_TOPICS, TINY, Trainer, TrainingPlan


def plan(out: Path, steps: int) -> TrainingPlan:
    return TrainingPlan(
        10.0, out, out / "work", batch=4, workers=0, warm_up=2, rate=5e-3, measure_each=1, compiled=False,
        most_steps=steps, measured_tokens=2,
    )  # fmt: skip


@pytest.mark.slow
def test_a_tiny_run_learns_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    atlas = built_in_atlas()
    first = Trainer(plan(tmp_path, 6), TINY, atlas, torch.device("cpu"))
    first.run()
    start = first.first_loss
    assert first.step == 6
    second = Trainer(plan(tmp_path, 12), TINY, atlas, torch.device("cpu"))
    second.run()
    assert second.step == 12
    assert start - second.loss > 0.5
    assert second.rate() < 0.3 * second.plan.rate, "the rate must come down towards the end"
    written = json.loads((tmp_path / "training.json").read_text())
    assert written["step"] == 12
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert written["pictures"] == 12 * 4
    card = (tmp_path / "README.md").read_text()
    assert "12 steps" in card
    assert "48 pictures" in card
    last = {topic: value for topic, value in written["history"][-1].items() if topic not in NO_TOPICS}
    assert last
    assert all(f"| {topic} | {100 * value:.0f} % |" in card for topic, value in last.items())
    assert replace(second.plan, most_steps=24).most_steps == 24


def train_in_a_team(rank: int, folder: str) -> None:
    """One of two processes: trains, and leaves its weights behind."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    trainer = Trainer(plan(Path(folder), 3), TINY, built_in_atlas(), torch.device("cpu"), Team(rank, 2))
    trainer.run()
    torch.save(trainer.model.state_dict(), f"{folder}/weights-{rank}")
    trainer.team.leave()


@pytest.mark.slow
def test_a_team_of_two_ends_with_one_model_that_neither_makes_alone(tmp_path: Path) -> None:
    context = get_context("spawn")
    processes = [context.Process(target=train_in_a_team, args=(rank, str(tmp_path))) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    first, second = (torch.load(tmp_path / f"weights-{rank}") for rank in (0, 1))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    torch.set_num_threads(1)
    alone = Trainer(plan(tmp_path / "alone", 3), TINY, built_in_atlas(), torch.device("cpu"))
    alone.run()
    assert any(not torch.equal(value, first[name]) for name, value in alone.model.state_dict().items())


def test_muon_makes_directions_orthogonal() -> None:
    torch.manual_seed(0)
    turned = orthogonalize(torch.randn(2, 48, 32)).float()
    values = torch.linalg.svdvals(turned)
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.5


@pytest.mark.slow
def test_every_kind_of_batch_holds_its_pictures_and_what_is_to_be_learnt() -> None:
    atlas, words = built_in_atlas(), Words(str(PACKAGE / "tokenizer.json"))
    renderer = Renderer(atlas, torch.device("cpu"))
    met = set()
    for seed in range(60):
        batch = make_batch(seed, 24, atlas, words, 0.0)
        kind = (batch.pictures > 1, batch.frames)
        if kind in met:
            continue
        met.add(kind)
        layout = batch.layout
        rows = len(layout.tokens)
        tokens_of_one = batch.size[0] * batch.size[1] // 1024
        assert (layout.slots.max(1) == batch.pictures * tokens_of_one - 1).all()
        pictures = renderer.render(batch.numbers, batch.size, batch.scale)
        assert len(pictures) == rows * batch.pictures * batch.frames
        # What is learnt follows a question, never the pictures or the questions themselves.
        learnt = layout.targets >= 0
        assert learnt.any(1).all()
        assert (layout.segments[learnt] > 0).all()
        assert (layout.positions[0][layout.segments >= BLIND] < 200).all(), "talk starts from zero"
    assert met == {(False, 1), (True, 1), (True, 2)}, f"{len(KINDS)} kinds, one of them with longer answers"


def test_refining_leaves_the_vision_tower_alone(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(TINY)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    words = Words(str(PACKAGE / "tokenizer.json"))
    lessons = FineTuningBatches(built_in_atlas(), words, ["chart", "many"], batch=2)
    steps = refine(model, lessons, seconds=1.0, rate=1e-3)
    assert steps >= 1
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert not any("visual" in name for name in changed)
    export(model.state_dict(), model.shape, tmp_path)
    assert (tmp_path / "config.json").exists()


def test_a_share_of_a_batch_can_be_of_one_sort() -> None:
    words = Words(str(PACKAGE / "tokenizer.json"))
    random = np.random.default_rng(0)
    batch = one_batch(
        draw_form(random, kind="one"), random, 12, built_in_atlas(), words, sort="empty", share=1.0
    )
    assert batch.numbers.rows[0] == 0, "an empty scene has nothing in its first slot"


@pytest.mark.slow
def test_the_whole_model_can_be_refined_with_scenes_that_other_processes_draw() -> None:
    torch.manual_seed(0)
    model = Model(TINY)
    before = model.model.visual.patch_embed.proj.weight.clone()
    lessons = FineTuningBatches(built_in_atlas(), Words(str(PACKAGE / "tokenizer.json")), [], batch=8)
    assert refine(model, lessons, seconds=4.0, rate=1e-3, see=True, workers=1) >= 1
    assert not torch.equal(before, model.model.visual.patch_embed.proj.weight)

"""A whole training run in seconds: it learns, stops, goes on, and leaves a checkpoint that loads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from training.mini.atlas import built_in_atlas
from training.mini.measure import box_overlap, overlap, score
from training.mini.muon import orthogonalize
from training.mini.train import TINY, Plan, Trainer


def plan(out: Path, steps: int) -> Plan:
    return Plan(
        10.0, out, out / "work", batch=4, workers=0, warm_up=2, rate=5e-3, measure_each=1, compiled=False,
        most_steps=steps, measured_tokens=2,
    )  # fmt: skip


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
    assert replace(second.plan, most_steps=24).most_steps == 24


def test_muon_makes_directions_orthogonal() -> None:
    torch.manual_seed(0)
    turned = orthogonalize(torch.randn(2, 48, 32)).float()
    values = torch.linalg.svdvals(turned)
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.5


@pytest.mark.parametrize(
    ("topic", "truth", "said", "worth"),
    [
        ("colour", "The square is red.", "The square is red", 1.0),
        ("colour", "The square is red.", "The square is blue.", 0.0),
        ("grounding", '```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "dog"}]\n```', "I see a dog", 0.0),
        (
            "grounding",
            '[{"bbox_2d": [0, 0, 10, 10], "label": "dog"}]',
            '[{"bbox_2d": [0, 0, 10, 5], "label": "dog"}]',
            0.5,
        ),
        ("photo", "A photo, mostly red and blue.", "A dark photo, mostly blue, red and grey.", 1.0),
        ("photo", "A photo, mostly red and blue.", "A photo, mostly blue.", 0.0),
        ("analysis", '{"objects": [], "text": ["7"]}', '{"objects": [], "text": ["1"]}', 0.0),
        ("analysis", '{"objects": [], "text": ["7"]}', '{"objects": [], "text": ["7"]}', 1.0),
    ],
)
def test_scores(topic: str, truth: str, said: str, worth: float) -> None:
    assert score(topic, truth, said) == worth


def test_overlap() -> None:
    assert overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert overlap((0, 0, 1, 1), (2, 2, 3, 3)) == 0
    assert box_overlap([("dog", (0, 0, 1, 1))], [("cat", (0, 0, 1, 1))]) == 0
    assert box_overlap([("dog", (0, 0, 1, 1))], [("dog", (0, 0, 1, 1)), ("dog", (0, 0, 1, 1))]) == 0.5

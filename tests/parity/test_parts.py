"""Tolerances, boxes, hashes and end tokens by themselves."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.edit import copy_of
from vlfit.checkpoint.source import open_checkpoint
from vlfit.parity.conditions import distance
from vlfit.parity.findings import CheckReport, Component, Finding, Likely, Measured
from vlfit.parity.scenes import draw_scenes, mean_overlap, overlap, read_boxes
from vlfit.parity.stored_files import check_end_tokens, check_files, end_token_ids
from vlfit.parity.tolerances import EXACT, Difference, Precision, Tolerance, difference, step_tolerance
from vlfit.prompt.tokenizer import read_tokenizer


def test_a_difference_is_relative_to_its_row() -> None:
    theirs = torch.tensor([[1.0, -1.0], [100.0, 100.0]])
    ours = theirs + torch.tensor([[0.1, 0.0], [0.0, 0.0]])
    apart = difference(ours, theirs)
    assert apart.worst_row == 0
    assert apart.row == pytest.approx(0.1 / math.sqrt(2))
    assert apart.element == pytest.approx(0.05)
    assert difference(theirs, theirs) == Difference(0.0, 0.0, 0)


def test_other_shapes_and_numbers_that_are_none_differ_by_any_tolerance() -> None:
    wide = Tolerance(1e9, 1e9)
    assert difference(torch.zeros(2, 2), torch.zeros(2, 3)).share(wide) == float("inf")
    assert difference(torch.tensor([[float("nan"), 1.0]]), torch.ones(1, 2)).share(wide) == float("inf")
    assert difference(torch.ones(1, 2), torch.ones(1, 2)).share(EXACT) == 0.0
    assert difference(torch.ones(1, 2) + 1e-6, torch.ones(1, 2)).share(EXACT) == float("inf")


def test_tolerances_follow_their_formula() -> None:
    exact = step_tolerance(2.0**-24, 100)
    assert exact.row == pytest.approx(3 * 4 * (math.sqrt(12) + 10) * 2.0**-24)
    assert step_tolerance(2.0**-8, 100).row > 1000 * exact.row
    # Weights and inputs of four products, each rounded: their errors add as squares.
    rounded = math.sqrt(12 * 2.0**-48 + 4 * (2.0**-22 + 2.0**-20))
    both = step_tolerance(2.0**-24, 100, 2.0**-11, 2.0**-10)
    assert both.row == pytest.approx(3 * 4 * (rounded + 10 * 2.0**-24))
    assert both.element == pytest.approx(4 * both.row)
    assert Precision("float32", half_weights=True).weights == 2.0**-11
    assert exact.deep(Difference(1e-3, 2e-3)).row == pytest.approx(exact.row + 3e-3)
    assert Precision("bfloat16", fp8_rows=True).unit == 2.0**-4


def test_scenes_are_where_they_are_said_to_be() -> None:
    import io

    from PIL import Image, ImageOps

    scenes = draw_scenes()
    assert len({scene.data for scene in scenes.values()}) == len(scenes) == 4
    for scene in scenes.values():
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(scene.data)))
        assert picture is not None
        for shape, (left, top, right, bottom) in scene.boxes.items():
            x, y = (left + right) / 2000 * picture.width, (top + bottom) / 2000 * picture.height
            assert picture.convert("RGB").getpixel((int(x), int(y))) != (255, 255, 255), shape


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ('[{"bbox_2d": [1, 2, 3, 4]}]', 1),
        ('{"bbox_2d": [3, 4, 1, 2]} {"bbox_2d": [1, 2, 3]} {"bbox_2d": ["a", 1, 2, 3]}', 1),
        ('"bbox_2d": [' * 1000, 0),
        ('{"bbox_2d": [1, 2, 3, 4]} ' * 500, 100),
        ("no boxes", 0),
    ],
)
def test_boxes_are_read_leniently(answer: str, count: int) -> None:
    boxes = read_boxes(answer)
    assert len(boxes) == count
    assert all(left <= right and top <= bottom for left, top, right, bottom in boxes)


def test_overlap_of_boxes() -> None:
    assert overlap((0, 0, 10, 10), (0, 0, 10, 10)) == 1.0
    assert overlap((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(1 / 3)
    assert overlap((0, 0, 1, 1), (2, 2, 3, 3)) == 0.0
    scene = draw_scenes()["square"]
    answer = json.dumps([{"bbox_2d": box} for box in scene.boxes.values()])
    assert mean_overlap(answer, scene) == pytest.approx(1.0)


def hub_cache(folder: Path, root: Path) -> Path:
    """The checkpoint in ``folder`` as the hub's cache has it: links to blobs named by their hash."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        data = path.read_bytes()
        small = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False)
        digest = hashlib.sha256(data) if path.suffix == ".safetensors" else small
        (blobs / digest.hexdigest()).write_bytes(data)
        (snapshot / path.name).symlink_to(blobs / digest.hexdigest())
    return snapshot


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json"])
def test_a_file_of_the_hub_is_held_to_its_hash(
    tiny: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    folder = hub_cache(tiny("tied"), tmp_path)
    report = CheckReport("full")
    check_files(open_checkpoint(folder), report, hashes=True)
    assert report.ok
    assert len(report.measured) == len(list(folder.iterdir()))
    blob = (folder / name).resolve()
    data = bytearray(blob.read_bytes())
    data[-3] ^= 1
    blob.write_bytes(data)
    checkpoint = open_checkpoint(tiny("tied"))
    check_files(dataclasses.replace(checkpoint, folder=folder), report, hashes=True)
    assert [(each.code, each.component, each.stage) for each in report.findings] == [
        ("hash_differs", Component.FILE, name)
    ]


def test_end_tokens_are_gathered_from_every_file(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")
    (folder / "generation_config.json").write_text('{"eos_token_id": 300}', encoding="utf-8")
    checkpoint = open_checkpoint(folder)
    tokenizer = read_tokenizer(folder, checkpoint.model_type)
    end = tokenizer.token_to_id("<|im_end|>")
    ids = end_token_ids(checkpoint, tokenizer)
    assert set(ids) == {300, end}
    report = CheckReport("quick")
    check_end_tokens(checkpoint, tokenizer, report)
    assert [(each.code, each.stage) for each in report.findings] == [
        ("eos_is_a_word", "generation_config.json")
    ]


def test_findings_as_json() -> None:
    report = CheckReport("quick")
    report.findings.append(
        Finding(
            "layer_differs",
            Component.MLP,
            "layer.3.mlp",
            "prefill",
            Likely.KERNEL,
            "worst in row 2",
            0.5,
            0.1,
        )
    )
    report.measured.append(Measured("layer.3.mlp", "prefill", 0.5, 0.1, "relative"))
    data = json.loads(json.dumps(report.as_json()))
    assert data["ok"] is False
    assert data["findings"][0]["component"] == "mlp"
    assert data["findings"][0]["likely"] == "kernel"
    assert report.measured[0].share == pytest.approx(5.0)


def test_numbers_that_json_has_none_of_are_null() -> None:
    report = CheckReport("quick")
    finding = Finding("layer_differs", Component.MLP, "layer.3.mlp", "prefill", Likely.KERNEL, "", math.inf)
    report.findings.append(dataclasses.replace(finding, tolerance=math.nan))
    report.measured.append(Measured("layer.3.mlp", "prefill", math.inf, math.nan, "relative"))
    data = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert (data["findings"][0]["measured"], data["findings"][0]["tolerance"]) == (None, None)
    assert (data["measured"][0]["largest"], data["measured"][0]["tolerance"]) == (None, None)


def test_log_probabilities_that_are_none_are_far_apart() -> None:
    assert distance(-1.0, -1.5) == 0.5
    assert distance(math.nan, -1.5) == math.inf
    assert distance(-math.inf, -math.inf) == math.inf

"""Tolerances, boxes, hashes and end tokens by themselves."""

import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.edit import copy_of
from tests.gguf_files import as_gguf
from tests.hub import LARGE, running_hub
from vlfit.checkpoint.gguf.gguf_checkpoint import prepare_gguf
from vlfit.checkpoint.source import Checkpoint, open_checkpoint, read_checkpoint
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


def flip_a_bit(path: Path) -> None:
    """Change one bit near the end of ``path``, which keeps its size; a link's target is changed."""
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def hashes_of(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Names of the files whose hash was compared, and of those whose hash differs."""
    report = CheckReport("full")
    check_files(checkpoint, report, hashes=True)
    assert {each.code for each in report.findings} <= {"hash_differs"}
    return [each.stage for each in report.measured], [each.stage for each in report.findings]


DOWNLOAD = "import sys, huggingface_hub as hub; hub.snapshot_download(sys.argv[1], local_dir=sys.argv[2])"


def test_a_folder_that_was_downloaded_to_is_held_to_its_hashes(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """``hf download --local-dir``: SHA-256 of weights, which are large files, git's SHA-1 of the others."""
    folder = tmp_path / "downloaded"
    source = copy_of(tiny("tied"), tmp_path / "source")
    (source / "large.bin").write_bytes(bytes(LARGE))
    environment = dict(os.environ, HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path / "home"))
    with running_hub() as hub:
        hub.add("someone/tied", source)
        subprocess.run(
            [sys.executable, "-c", DOWNLOAD, "someone/tied", folder],
            env={**environment, "HF_ENDPOINT": hub.url},
            check=True,
            capture_output=True,
        )
    files = sorted(path.name for path in source.iterdir())
    checkpoint = open_checkpoint(folder)
    assert hashes_of(checkpoint) == (files, [])
    damaged = ["large.bin", "model.safetensors", "tokenizer_config.json"]
    for name in damaged:
        flip_a_bit(folder / name)
    assert hashes_of(checkpoint) == (files, damaged)
    (folder / ".cache/huggingface/download/large.bin.metadata").write_text("main\n", encoding="utf-8")
    assert hashes_of(checkpoint)[1] == damaged[1:]
    (folder / ".cache/huggingface/download/model.safetensors.metadata").unlink()
    report = CheckReport("full")
    check_files(checkpoint, report, hashes=True)
    assert [each.check for each in report.skipped] == ["hashes of model.safetensors"]


def test_files_of_gguf_are_held_to_their_hashes(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Links to blobs of the hub's cache, Ollama's blobs, and files below a folder that was downloaded to."""
    model, mmproj = as_gguf(tiny("tied"), tmp_path / "gguf", "f32")
    assert mmproj is not None
    files = {path.name: path.read_bytes() for path in (model, mmproj)}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    snapshot, blobs, downloaded = (tmp_path / each for each in ("snapshot", "blobs", "downloaded"))
    for folder in (snapshot, blobs, downloaded / "q"):
        folder.mkdir(parents=True)
    notes = downloaded / ".cache" / "huggingface" / "download" / "q"
    notes.mkdir(parents=True)
    for name, data in files.items():
        (snapshot / digests[name]).write_bytes(data)
        (snapshot / name).symlink_to(snapshot / digests[name])
        (blobs / f"sha256-{digests[name]}").write_bytes(data)
        (downloaded / "q" / name).write_bytes(data)
        (notes / f"{name}.metadata").write_text(f"{'a' * 40}\n{digests[name]}\n1712656091.123\n", "utf-8")
    for paths in ([folder / name for name in files] for folder in (snapshot, downloaded / "q")):
        checkpoint = open_checkpoint(paths[0])
        assert hashes_of(checkpoint) == ([path.name for path in paths], [])
        flip_a_bit(paths[1])
        assert hashes_of(open_checkpoint(paths[0]))[1] == [mmproj.name]
    blob = blobs / f"sha256-{digests[model.name]}"
    ollamas = read_checkpoint("ollama", prepare_gguf(blob, blobs / f"sha256-{digests[mmproj.name]}"))
    assert hashes_of(ollamas) == ([f"sha256-{digest}" for digest in digests.values()], [])
    flip_a_bit(blob)
    ollamas = read_checkpoint("ollama", prepare_gguf(blob, blobs / f"sha256-{digests[mmproj.name]}"))
    assert hashes_of(ollamas)[1] == [blob.name]
    assert hashes_of(open_checkpoint(model)) == ([], [])


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

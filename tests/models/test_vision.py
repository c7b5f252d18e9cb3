"""The vision tower in halves: the same features as all at once, and the same turning bit for bit.

That they are the reference's is tested in ``test_parity.py``; what they take in ``tests/plan/test_costs.py``.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engine.test_parity import relative
from tests.pictures import picture
from vlfit.api.conversation import ImagePart, VideoPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.config import VisionConfig
from vlfit.checkpoint.processor_files import ImageProcessorConfig
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.layers.rope import apply_rope, cos_sin_tables
from vlfit.loading.loader import Loader
from vlfit.models.interface import PreparedImage, VisionFeatures
from vlfit.models.qwen3_vl import vision
from vlfit.models.qwen3_vl.cost import MAX_UNSPLIT_PATCHES
from vlfit.models.qwen3_vl.image_processor import patches_by_time, patchify, prepare_image
from vlfit.models.qwen3_vl.mrope import merge_order_indices, vision_rope_tables
from vlfit.models.qwen3_vl.vision import VisionTower

CPU = torch.device("cpu")
WHOLE = 1 << 20  # more patches than any picture here has
TOLERANCE = 2e-5  # relative, in float32: products of other heights add in another order
GENERATOR = torch.Generator().manual_seed(0)


def pixels(frames: int, height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


HALF = (0.5, 0.5, 0.5)
PROCESSING = ImageProcessorConfig(1, 1 << 30, 16, 2, 2, HALF, HALF, 1 / 255)


@pytest.fixture(scope="module", params=["tied", "vision_head_72"])
def tower(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> VisionTower:
    checkpoint = open_checkpoint(tiny(request.param))
    with Loader(checkpoint, CPU, torch.float32) as loader:
        return VisionTower(checkpoint.config.required_vision, loader)


@pytest.mark.parametrize(
    ("frames", "height", "width"), [(1, 32, 32), (1, 160, 96), (1, 32, 640), (6, 64, 96)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_patches_by_time(frames: int, height: int, width: int, dtype: torch.dtype) -> None:
    shown = pixels(frames, height, width)
    steps = list(patches_by_time(shown, PROCESSING, CPU, dtype))
    assert [len(step) for step in steps] == [height * width // 256] * -(-frames // 2)
    assert torch.equal(torch.cat(steps), patchify(torch.from_numpy(shown), PROCESSING).to(dtype))


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 160, 96), (1, 96, 352), (10, 64, 96)])
def test_features_do_not_depend_on_the_split_feed_forward(
    tower: VisionTower, frames: int, height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = pixels(frames, height, width)
    grid = (-(-frames // 2), height // 16, width // 16)
    features: list[VisionFeatures] = []
    for whole, placed in ((WHOLE, WHOLE), (8, 7), (28, 64)):
        monkeypatch.setattr(vision, "MAX_UNSPLIT_PATCHES", whole)
        monkeypatch.setattr(vision, "CPU_POSITION_ROWS", placed)
        with torch.inference_mode():
            features.append(tower(patches_by_time(shown, PROCESSING, CPU, torch.float32), grid))
    first, *others = features
    tokens = grid[0] * grid[1] * grid[2] // 4
    assert first.rows.shape == (tokens, tower.config.out_hidden_size)
    for other in others:
        assert relative(other.rows, first.rows) < TOLERANCE
        for level, expected in zip(other.deepstack, first.deepstack, strict=True):
            assert relative(level, expected) < TOLERANCE


def test_a_shortened_tower_runs_one_block_of_each_kind_and_all_mergers(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copy.copy(tower.blocks[0])
    blocks, grid = [*tower.blocks, *tower.blocks, other, other], (1, 4, 6)
    monkeypatch.setattr(tower, "blocks", blocks)
    patches = torch.rand(24, tower.patches.weight.shape[1])
    with torch.no_grad():
        whole = tower([patches], grid)
        with tower.shortened(lambda block: block is other):
            assert tower.blocks == [*blocks[: tower.deepstack_levels + 1], other]
            short = tower([patches], grid)
        with pytest.raises(ValueError, match="broken"), tower.shortened(lambda block: 0):
            raise ValueError("broken")
        again = tower([patches], grid)
    assert tower.blocks is blocks
    assert [each.shape for each in (short.rows, *short.deepstack)] == [
        each.shape for each in (whole.rows, *whole.deepstack)
    ]
    assert not torch.equal(short.rows, whole.rows)
    assert torch.equal(again.rows, whole.rows)
    assert all(map(torch.equal, again.deepstack, whole.deepstack))


def test_temporal_patches_do_not_attend_to_one_another(tower: VisionTower) -> None:
    first, second = pixels(2, 64, 96, seed=1), pixels(2, 64, 96, seed=2)
    with torch.inference_mode():
        clip, *alone = (
            tower(patches_by_time(frames, PROCESSING, CPU, torch.float32), (len(frames) // 2, 4, 6))
            for frames in (np.concatenate((first, second)), first, second)
        )
    assert relative(clip.rows, torch.cat([each.rows for each in alone])) < TOLERANCE
    assert relative(clip.rows[:6], alone[1].rows) > 0.1, "the two frames are alike: a weak test"


def test_a_clip_is_encoded_one_temporal_patch_at_a_time_and_features_are_freed(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = 16
    built = NativeEngine(
        open_checkpoint(tiny("tied")),
        EngineOptions(device="cpu", max_model_len=512, max_num_batched_tokens=chunk),
    )
    frames = tuple(picture(128, 64, seed=seed) for seed in range(12))
    prompt = built.prompts.build(single_turn("what happens?", VideoPart(frames)), None, built.context)
    [clip] = prompt.images
    steps = list(clip.time_steps())
    assert (clip.grid[0], len(steps), sum(step.tokens for step in steps)) == (6, 6, clip.tokens)
    assert np.array_equal(np.concatenate([step.pixels for step in steps]), clip.pixels)
    assert len({step.key for step in steps}) == len(steps)
    sequence = built.make_sequence(
        built.prepare_prompt(prompt), SamplingParams(max_tokens=2, ignore_eos=True), print
    )
    encoded: list[PreparedImage] = []
    feature_rows: list[int] = []
    encode = built.runner.encode_image

    def recorded(image: PreparedImage) -> VisionFeatures:
        features = encode(image)
        encoded.append(image)
        feature_rows.append(sum(len(each.rows) for each in sequence.features.values()) + len(features.rows))
        return features

    monkeypatch.setattr(built.runner, "encode_image", recorded)
    built.submit(sequence)
    while built.busy:
        built.step()
    assert [image.grid for image in encoded] == [step.grid for step in steps]
    assert max(feature_rows) <= chunk + 2 * steps[0].tokens < clip.tokens


def test_a_picture_is_one_time_step() -> None:
    image = prepare_image(ImagePart(picture(96, 64)), PROCESSING, None)
    assert list(image.time_steps()) == [image]


def test_feed_forward_halves_are_equal_and_whole_squares() -> None:
    for count in (4, 8, 3072, 3076, 5120, 10240, 40000):
        parts = vision.feed_forward_slices(count, 4)
        heights = [part.stop - part.start for part in parts]
        assert [part.start for part in parts] == [0, *np.cumsum(heights)[:-1].tolist()]
        assert sum(heights) == count
        assert max(heights) - min(heights) <= 4
        assert all(height % 4 == 0 for height in heights)
        assert len(parts) == (1 if count <= MAX_UNSPLIT_PATCHES else 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden_size", [128, 144])
def test_rope_in_slices_is_bit_equal_to_rope_of_all_rows(
    hidden_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, rows, columns = config_with(hidden_size=hidden_size), 6, 10
    joined = torch.randn(rows * columns, 3, 2, hidden_size // 2, generator=GENERATOR).to(dtype)
    expected = apply_rope(joined[:, :2].float(), *vision_rope_tables(config, rows, columns)).to(dtype)
    rotated = joined.clone()
    monkeypatch.setattr(vision, "CPU_POSITION_ROWS", 24)
    vision.VisionRope(config, rows, columns, CPU)(rotated)
    assert torch.equal(rotated[:, :2], expected)
    assert torch.equal(rotated[:, 2], joined[:, 2])


def config_with(**changed: int) -> VisionConfig:
    numbers = {
        "depth": 1,
        "hidden_size": 144,
        "intermediate_size": 96,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
        **changed,
    }
    return VisionConfig(
        **numbers, deepstack_visual_indexes=(0,), hidden_act="gelu_pytorch_tanh", model_type="qwen3_vl"
    )


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 10), (62, 46)])
def test_rope_tables_hold_each_patchs_angles(rows: int, columns: int) -> None:
    config = config_with()
    row, column = map(torch.from_numpy, merge_order_indices(rows, columns, 2))
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 36, 2, dtype=torch.float32) / 36)
    angles = torch.cat((row[:, None].float() * frequencies, column[:, None].float() * frequencies), -1)
    expected = cos_sin_tables(angles[:, None, None])
    for ours, theirs in zip(vision_rope_tables(config, rows, columns), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 10), (6, 6), (62, 46)])
def test_position_interpolation_equals_image_interpolation(rows: int, columns: int) -> None:
    table = torch.randn(36, 5, generator=GENERATOR, dtype=torch.float64)
    index, weights = vision.position_interpolation(36, rows, columns, 2)
    assert torch.allclose(weights.sum(0), torch.ones(rows * columns, 1))
    ours = (table[index] * weights).sum(0)
    image = table.T.reshape(1, 5, 6, 6)
    resized = torch.nn.functional.interpolate(image, (rows, columns), mode="bilinear", align_corners=True)
    row, column = map(torch.from_numpy, merge_order_indices(rows, columns, 2))
    assert (ours - resized[0, :, row, column].T).abs().max() < 1e-5

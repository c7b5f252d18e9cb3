"""Pictures as the reference sees them: sizes, pixels, patches; and clips."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.pictures import encoded, picture, rotated_by_exif, scene
from vlfit.api.conversation import ImagePart, VideoPart
from vlfit.checkpoint.processor_files import ImageProcessorConfig
from vlfit.errors import InvalidRequest, NotAPicture, PictureTooLarge
from vlfit.models.interface import PreparedImage
from vlfit.models.qwen3_vl.image_processor import (
    patchify,
    prepare_image,
    prepare_video,
    smart_resize,
    smart_resize_video,
)

OFFICIAL = ImageProcessorConfig(65536, 16777216, 16, 2, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
SMALL = ImageProcessorConfig(1024, 65536, 16, 2, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
UNEVEN = ImageProcessorConfig(
    784, 100352, 14, 2, 2, (0.48145466, 0.4578275, 0.40821073), (0.27, 0.26, 0.276), 1 / 255
)

# Odd on purpose: ones, primes, off by one around the factor, long and thin, and common camera shapes.
SIZES = [
    (1, 1), (1, 2), (3, 1), (1, 200), (200, 1), (7, 1400), (15, 17), (16, 16), (31, 33), (32, 32), (33, 31),
    (47, 48), (48, 80), (49, 81), (63, 64), (65, 64), (80, 112), (97, 89), (100, 100), (101, 103), (112, 48),
    (127, 129), (144, 176), (150, 20), (160, 120), (199, 7), (211, 223), (240, 320), (255, 257), (256, 256),
    (257, 255), (272, 304), (300, 2), (301, 199), (320, 240), (333, 500), (352, 288), (399, 401), (400, 16),
    (480, 270), (499, 333), (500, 500), (511, 513), (512, 384), (555, 10), (600, 399), (640, 359), (641, 480),
    (700, 525), (768, 1024), (799, 601), (997, 13), (1000, 750), (1023, 100), (1280, 721),
]  # fmt: skip


def numbers_in(notes: tuple[str, ...]) -> list[int]:
    """The whole numbers of the one note."""
    (note,) = notes
    return [int(number) for number in re.findall(r"\d+", note)]


def reference(processing: ImageProcessorConfig, image: Image.Image) -> tuple[torch.Tensor, list[int]]:
    """Patches and grid of transformers' processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels},
        patch_size=processing.patch_size,
        temporal_patch_size=processing.temporal_patch_size,
        merge_size=processing.merge_size,
        image_mean=list(processing.mean),
        image_std=list(processing.std),
    )
    result = processor(images=[image], return_tensors="pt")
    return result["pixel_values"], result["image_grid_thw"][0].tolist()


def patches_of(prepared: PreparedImage, processing: ImageProcessorConfig) -> torch.Tensor:
    return patchify(torch.from_numpy(prepared.pixels), processing)


def test_there_are_more_than_50_sizes() -> None:
    assert len(set(SIZES)) > 50


@pytest.mark.parametrize("processing", [OFFICIAL, SMALL, UNEVEN], ids=["official", "small", "uneven"])
def test_sizes_and_tokens_equal_the_reference(processing: ImageProcessorConfig) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_resize

    factor = processing.patch_size * processing.merge_size
    limits = (factor, processing.min_pixels, processing.max_pixels)
    for width, height in [*SIZES, (4032, 3024), (12000, 9000), (20000, 100), (6000, 4001), (9999, 8889)]:
        assert smart_resize(height, width, *limits) == reference_resize(height, width, *limits), (
            width,
            height,
        )


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_are_bit_equal_to_the_reference(size: tuple[int, int]) -> None:
    image = scene(*size)
    part = ImagePart(encoded(image, "BMP"))
    for processing in (SMALL, UNEVEN):
        prepared = prepare_image(part, processing, None)
        expected, grid = reference(processing, image)
        assert list(prepared.grid) == grid
        assert prepared.tokens == math.prod(grid) // 4
        assert torch.equal(patches_of(prepared, processing), expected)


def test_a_picture_of_the_right_size_is_not_resampled() -> None:
    prepared = prepare_image(ImagePart(picture(96, 64)), SMALL, None)
    assert np.array_equal(prepared.pixels[0], np.asarray(scene(96, 64)))
    assert (prepared.seen.width, prepared.seen.height) == (96, 64)
    assert (prepared.seen.seen_width, prepared.seen.seen_height, prepared.seen.notes) == (96, 64, ())


def test_sizes_seen_are_of_the_upright_picture() -> None:
    seen = prepare_image(ImagePart(rotated_by_exif(6, 100, 60)), SMALL, None).seen
    assert (seen.width, seen.height) == (60, 100)
    assert (seen.seen_width, seen.seen_height, seen.tokens) == (64, 96, 6)
    assert numbers_in(seen.notes) == [6]


def test_the_plans_cap_shrinks_with_a_note() -> None:
    part = ImagePart(picture(640, 480))
    free = prepare_image(part, SMALL, None)
    capped = prepare_image(part, SMALL, 16)
    own = "scaled down from 640x480 to 288x192: the checkpoint takes at most 64 tokens per picture"
    assert (free.tokens, free.seen.notes) == (54, (own,))
    assert capped.tokens <= 16
    assert numbers_in(capped.seen.notes) == [640, 480, 128, 96, 16]
    smaller = ImageProcessorConfig(1024, 16 * 1024, 16, 2, 2, SMALL.mean, SMALL.std, SMALL.rescale_factor)
    assert np.array_equal(capped.pixels, prepare_image(part, smaller, None).pixels)


@pytest.mark.parametrize("cap", [4, 5, 17, 64])
def test_no_picture_exceeds_the_cap(cap: int) -> None:
    for size in SIZES[::2]:
        prepared = prepare_image(ImagePart(picture(*size, "BMP")), SMALL, cap)
        assert 1 <= prepared.tokens <= cap
        assert prepared.pixels.shape[1] % 32 == 0
        assert prepared.pixels.shape[2] % 32 == 0


@pytest.mark.parametrize(("sent", "seen"), [((3000, 2000), (1248, 832)), ((2000, 3000), (832, 1248))])
def test_a_note_names_the_size_as_sent(sent: tuple[int, int], seen: tuple[int, int]) -> None:
    """Not from one rounded to patches, or brought within the checkpoint's limits, which nobody sent."""
    part = ImagePart(encoded(Image.new("RGB", sent), "BMP"))
    for most in (OFFICIAL.max_pixels, 3 * 1024**2):
        processing = replace(OFFICIAL, max_pixels=most)
        assert numbers_in(prepare_image(part, processing, 1024).seen.notes) == [*sent, *seen, 1024]


def test_a_picture_below_the_minimum_is_not_called_scaled_down() -> None:
    seen = prepare_image(ImagePart(picture(64, 64)), OFFICIAL, 16).seen
    assert [size in seen.notes[0] for size in ("64x64", "128x128", "256x256")] == [False, True, True]
    assert numbers_in(seen.notes)[-1] == 16


def test_a_cap_without_effect_has_no_note() -> None:
    free = prepare_image(ImagePart(picture(640, 480)), SMALL, None)
    assert prepare_image(ImagePart(picture(640, 480)), SMALL, 64).seen.notes == free.seen.notes
    assert prepare_image(ImagePart(picture(240, 270)), SMALL, 64).seen.notes == ()


def test_low_detail_shrinks_with_a_note() -> None:
    large = picture(1600, 1200)
    low = prepare_image(ImagePart(large, detail="low"), OFFICIAL, None)
    high = prepare_image(ImagePart(large, detail="high"), OFFICIAL, None)
    assert low.tokens <= 256 < high.tokens
    assert "low" in low.seen.notes[0]
    planned = prepare_image(ImagePart(large, detail="low"), OFFICIAL, 64)
    assert planned.tokens <= 64
    assert numbers_in(planned.seen.notes)[-1] == 64
    small = prepare_image(ImagePart(picture(96, 64), detail="low"), SMALL, None)
    assert small.seen.notes == ()


def test_sides_over_1_to_200_are_refused_with_numbers() -> None:
    with pytest.raises(PictureTooLarge, match=r"20000x1 .*1:20,000.*1:200"):
        smart_resize(1, 20000, 32, 1024, 65536)
    assert smart_resize(100, 20000, 32, 1024, 65536) == (32, 3616)


def test_the_key_depends_on_the_file_and_the_size_it_is_seen_at() -> None:
    one = prepare_image(ImagePart(picture(), "one"), SMALL, None)
    same = prepare_image(ImagePart(picture(), "another label"), SMALL, None)
    smaller = prepare_image(ImagePart(picture()), SMALL, one.tokens - 1)
    other = prepare_image(ImagePart(picture(seed=1)), SMALL, None)
    turned = prepare_image(ImagePart(picture(64, 96)), SMALL, None)
    assert len(one.key) == 32
    assert one.key == same.key
    assert len({each.key for each in (one, smaller, other, turned)}) == 4


def test_of_a_file_larger_than_its_pixels_they_are_the_key() -> None:
    small = picture(64, 64, file_format="PNG")
    padded = small + bytes(64 * 64 * 3)  # after the last chunk of a PNG nothing is read
    keys = {prepare_image(ImagePart(data), SMALL, None).key for data in (padded, padded + b"more")}
    assert len(keys) == 1


def test_byte_values_equal_the_reference() -> None:
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    image = Image.fromarray(np.stack([ramp.repeat(2, 0).repeat(2, 1)] * 3, axis=-1))
    expected, _ = reference(UNEVEN, image.resize((28, 28)))
    pixels = torch.from_numpy(np.array(image.resize((28, 28)))[None])
    assert torch.equal(patchify(pixels, UNEVEN), expected)


def clip(frames: int, width: int = 96, height: int = 64, fps: float = 2.0) -> VideoPart:
    return VideoPart(tuple(picture(width, height, "BMP", seed) for seed in range(frames)), fps)


def patches_by_formula(
    pixels: np.ndarray[Any, Any], processing: ImageProcessorConfig
) -> np.ndarray[Any, Any]:
    """Patches of a clip, one value after the other, from what Qwen3VLVideoProcessor.patchify says."""
    frames, height, width, _ = pixels.shape
    patch, merge, temporal = processing.patch_size, processing.merge_size, processing.temporal_patch_size
    normal = (pixels.astype(np.float64) * processing.rescale_factor - processing.mean) / processing.std
    out = []
    for start in range(0, frames, temporal):
        for square_row in range(height // patch // merge):
            for square_column in range(width // patch // merge):
                for row in range(merge):
                    for column in range(merge):
                        top = (square_row * merge + row) * patch
                        left = (square_column * merge + column) * patch
                        cube = normal[start : start + temporal, top : top + patch, left : left + patch]
                        out.append(cube.transpose(3, 0, 1, 2).reshape(-1))
    return np.stack(out)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 7])
def test_clips(frames: int) -> None:
    prepared = prepare_video(clip(frames), OFFICIAL, None)
    padded = frames + frames % 2
    assert prepared.pixels.shape[0] == padded
    assert prepared.grid[0] == padded // 2
    assert prepared.tokens == math.prod(prepared.grid) // 4
    assert prepared.seen.frames == frames
    assert len(prepared.frame_seconds) == prepared.grid[0]
    expected = patches_by_formula(prepared.pixels, OFFICIAL)
    assert np.abs(patches_of(prepared, OFFICIAL).numpy() - expected).max() < 1e-6
    if frames % 2:
        assert np.array_equal(prepared.pixels[-1], prepared.pixels[-2])
        assert numbers_in(prepared.seen.notes) == [1]


def test_clip_sizes_equal_the_reference() -> None:
    """The reference's module needs torchvision, so its formula stands here as transformers 5.23 has it."""

    def reference_resize(t: int, h: int, w: int, tf: int, f: int, least: int, most: int) -> tuple[int, int]:
        if h < f or w < f:
            scale = max(f / h, f / w)
            h, w = int(h * scale), int(w * scale)
        h_bar, w_bar, t_bar = round(h / f) * f, round(w / f) * f, round(t / tf) * tf
        if t_bar * h_bar * w_bar > most:
            beta = math.sqrt(t * h * w / most)
            return max(f, math.floor(h / beta / f) * f), max(f, math.floor(w / beta / f) * f)
        if t_bar * h_bar * w_bar < least:
            beta = math.sqrt(least / (t * h * w))
            return math.ceil(h * beta / f) * f, math.ceil(w * beta / f) * f
        return h_bar, w_bar

    limits = ((4096, 25165824), (131072, 786432), (1024, 20000))
    for frames in (2, 3, 5, 8, 64, 767):
        for width, height in SIZES:
            for least, most in limits:
                ours = smart_resize_video(frames, height, width, 2, 32, least, most)
                assert ours == reference_resize(frames, height, width, 2, 32, least, most)


def test_clip_times_equal_the_reference() -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    for frames, fps in ((1, 2.0), (2, 2.0), (5, 1.0), (8, 24.0), (9, 3.7)):
        prepared = prepare_video(clip(frames, fps=fps), SMALL, None)
        calculate: Any = Qwen3VLProcessor._calculate_timestamps
        assert list(prepared.frame_seconds) == calculate(None, list(range(frames)), fps, 2)


def test_the_cap_of_a_clip_counts_each_pair_of_frames() -> None:
    prepared = prepare_video(clip(8, 640, 480), OFFICIAL, 16)
    assert prepared.tokens // prepared.grid[0] <= 16
    assert numbers_in(prepared.seen.notes) == [640, 480, 128, 96, 16]


def test_invalid_clips_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"\b0 frames"):
        prepare_video(VideoPart(()), SMALL, None)
    with pytest.raises(InvalidRequest, match=r"\b769 frames"):
        prepare_video(VideoPart((b"",) * 769), SMALL, None)
    with pytest.raises(InvalidRequest, match=r"fps .*\b0"):
        prepare_video(clip(2, fps=0.0), SMALL, None)
    with pytest.raises(InvalidRequest, match=r"fps .*nan"):
        prepare_video(clip(2, fps=math.nan), SMALL, None)
    uneven = VideoPart((picture(96, 64), picture(64, 96)), 2.0)
    with pytest.raises(InvalidRequest, match=r"frame 2 .*64x96.*96x64"):
        prepare_video(uneven, SMALL, None)
    with pytest.raises(NotAPicture, match=r"\bframe 2\b"):
        prepare_video(VideoPart((picture(), b"no picture")), SMALL, None)

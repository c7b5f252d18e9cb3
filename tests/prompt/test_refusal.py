"""Hints of a prompt over the context: what they say fits does fit, and one more does not."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pictures import exif_orientation, picture, rotated_by_exif
from vlfit.api.conversation import ImagePart, VideoPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.errors import DoesNotFit
from vlfit.images.decode_pool import _Run
from vlfit.prompt.builder import Prompt, max_tokens_per_image

CONTEXT = 128


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], Path]) -> NativeEngine:
    return NativeEngine(
        open_checkpoint(tiny("tied")), EngineOptions(device="cpu", max_model_len=CONTEXT, max_num_seqs=1)
    )


def prompt(
    engine: NativeEngine, text: str, *pictures: ImagePart | VideoPart, cap: int | None = None
) -> Prompt:
    return engine.prompts.build(single_turn(text, *pictures), max_image_tokens=cap)


def refused(engine: NativeEngine, prompt: Prompt) -> str:
    with pytest.raises(DoesNotFit) as caught:
        engine.prepare_prompt(prompt)
    assert caught.value.code == "context_length_exceeded"
    assert re.search(rf"\b{len(prompt.token_ids)} tokens", caught.value.message)
    most = engine.checkpoint.config.text.max_position_embeddings
    assert (f"--context (at most {most})" in caught.value.hint) == (engine.context < most)
    assert caught.value.hint[0].isupper()
    assert "or ," not in caught.value.hint
    return caught.value.hint


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text, re.IGNORECASE)
    assert found is not None, text
    return int(found[1])


def test_text_that_is_too_long(engine: NativeEngine) -> None:
    long = prompt(engine, "fox " * 400)
    surplus = number(r"shorten the text by (\d+) tokens", refused(engine, long))
    assert len(long.token_ids) - surplus == CONTEXT - 1


def test_more_messages_than_tokens_fit_are_refused_before_the_template(engine: NativeEngine) -> None:
    messages = single_turn("a") * CONTEXT
    engine.prompts.build(messages, context=CONTEXT)  # too long, as is found later
    with pytest.raises(DoesNotFit):
        engine.prompts.build(messages + single_turn("a"), context=CONTEXT)


def test_the_largest_picture_that_fits(engine: NativeEngine) -> None:
    text = "the quick brown fox"
    hint = refused(engine, prompt(engine, text, ImagePart(picture(800, 500, seed=1))))
    level = number(r"the picture fits with at most (\d+) tokens", hint)
    width, height = number(r", (\d+)x\d+ pixels", hint), number(r", \d+x(\d+) pixels", hint)
    smaller = prompt(engine, text, ImagePart(picture(width, height, seed=1)))
    assert smaller.images[0].tokens <= level
    engine.prepare_prompt(smaller)
    # The level is the most: text and so many tokens fill the context but for the answer's one.
    assert len(smaller.token_ids) - smaller.image_tokens + level == CONTEXT - 1
    assert "shorten the text" not in hint  # without any text it would still be too large


def test_hint_for_several_pictures_has_a_size_for_all_and_how_many_fit_unchanged(
    engine: NativeEngine,
) -> None:
    text = "the quick brown fox"
    photos = [ImagePart(picture(224, 160, seed=seed)) for seed in range(5)]  # 35 tokens each
    whole = prompt(engine, text, *photos)
    hint = refused(engine, whole)
    level = number(r"all 5 pictures fit with at most (\d+) tokens each", hint)
    engine.prepare_prompt(prompt(engine, text, *photos, cap=level))
    room = CONTEXT - 1 - (len(whole.token_ids) - whole.image_tokens)
    assert 5 * level <= room < 5 * (level + 1)
    width, height = number(r", (\d+)x\d+ pixels", hint), number(r", \d+x(\d+) pixels", hint)
    engine.prepare_prompt(
        prompt(engine, text, *(ImagePart(picture(width, height, seed=seed)) for seed in range(5)))
    )
    first = number(r"the first (\d+) pictures fit as they are", hint)
    engine.prepare_prompt(prompt(engine, text, *photos[:first]))
    refused(engine, prompt(engine, text, *photos[: first + 1]))


def test_small_pictures_stay_as_they_are_when_large_ones_shrink(engine: NativeEngine) -> None:
    text = "the quick brown fox"
    pictures = [ImagePart(picture(*size, seed=1)) for size in ((64, 64), (640, 480), (96, 64), (480, 320))]
    whole = prompt(engine, text, *pictures)
    level = number(r"all 4 pictures fit with at most (\d+) tokens each", refused(engine, whole))
    engine.prepare_prompt(prompt(engine, text, *pictures, cap=level))
    small = [image.tokens for image in whole.images if image.tokens < level]
    assert len(small) == 2
    room = CONTEXT - 1 - (len(whole.token_ids) - whole.image_tokens) - sum(small)
    assert 2 * level <= room < 2 * (level + 1)


def test_so_many_pictures_that_no_size_is_small_enough(engine: NativeEngine) -> None:
    photos = [ImagePart(picture(160, 128, seed=seed)) for seed in range(60)]
    hint = refused(engine, prompt(engine, "fox", *photos))
    first = number(r"the first (\d+) pictures fit with at most", hint)
    level = number(r"with at most (\d+) tokens each", hint)
    engine.prepare_prompt(prompt(engine, "fox", *photos[:first], cap=level))
    # One more has no room, even at the least size that the checkpoint looks at in this shape.
    assert engine.image_processor_config is not None
    least = engine.image_processor_config.min_pixels // 32**2
    one_more = prompt(engine, "fox", *photos[: first + 1])
    share = (CONTEXT - 1 - (len(one_more.token_ids) - one_more.image_tokens)) // (first + 1)
    assert prompt(engine, "fox", photos[0], cap=share).images[0].tokens < least <= level


def pictures_and_clips() -> list[list[ImagePart | VideoPart]]:
    photo = ImagePart(picture(800, 500, seed=1))
    small = [ImagePart(picture(224, 160, seed=seed)) for seed in range(5)]
    return [
        [photo],
        [ImagePart(picture(500, 800, "JPEG", exif=exif_orientation(6)))],
        [photo, photo],
        [*small],
        [*small, ImagePart(photo.data, detail="low")],
        [VideoPart((photo.data,) * 5)],
        [VideoPart((small[0].data,) * 9), small[1]],
    ]


@pytest.mark.parametrize("parts", pictures_and_clips(), ids=lambda parts: f"{len(parts)}")
def test_pictures_beyond_the_context_are_refused_by_their_headers(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, parts: list[ImagePart | VideoPart]
) -> None:
    """With the same numbers as after decoding (width and height as stored), and nothing is decoded."""
    text = "the quick brown fox"
    expected = refused(engine, prompt(engine, text, *parts))
    monkeypatch.setattr(_Run, "start_decoding", None)
    with pytest.raises(DoesNotFit) as caught:
        engine.prepare(single_turn(text, *parts), SamplingParams())
    assert sorted(re.findall(r"\d+", caught.value.hint)) == sorted(re.findall(r"\d+", expected))


def test_pictures_that_fit_are_not_refused_by_their_headers(engine: NativeEngine) -> None:
    for parts in ([picture(224, 160)], [picture(224, 160), picture(64, 64)], [rotated_by_exif(6)]):
        prepared = engine.prepare(single_turn("fox", *map(ImagePart, parts)), SamplingParams())
        assert len(prepared.images) == len(parts)


@pytest.fixture(scope="module")
def mini() -> NativeEngine:
    return NativeEngine(
        open_checkpoint("mini"), EngineOptions(device="cpu", max_model_len=4096, max_num_seqs=1)
    )


@pytest.mark.parametrize("size", [(640, 480), (480, 640), (320, 320), (900, 300), (2000, 100)])
def test_a_size_that_is_named_is_not_enlarged_again(mini: NativeEngine, size: tuple[int, int]) -> None:
    """mini enlarges all below 64 tokens, and 4:3 has no size of 64 to 66: for 60 pictures there is none."""
    photo = ImagePart(picture(*size, "BMP"))
    named = 0
    for count in (1, 14, 28, 49, 60):
        whole = prompt(mini, "fox", *[photo] * count)
        if len(whole.token_ids) < mini.context:
            continue
        hint = refused(mini, whole)
        found = re.search(
            r"(?:all|first) (\d+) pictures fit with at most (\d+) tokens each", hint, re.IGNORECASE
        )
        pixels = re.search(r", (\d+)x(\d+) pixels", hint)
        if found and pixels:
            named += 1
            small = ImagePart(picture(int(pixels[1]), int(pixels[2]), "BMP"))
            fitting = prompt(mini, "fox", *[small] * int(found[1]))
            assert fitting.images[0].tokens <= int(found[2])
            mini.prepare_prompt(fitting)
        if size == (640, 480) and count == 60:
            assert not re.search(r"\b60 pictures", hint)
            assert number(r"the first (\d+) pictures fit as they are", hint)
    assert named


def test_hint_for_pictures_that_cannot_shrink_has_only_how_many_fit(mini: NativeEngine) -> None:
    photo = ImagePart(picture(320, 224, "BMP"))  # 70 tokens; the next smaller of this shape is enlarged to it
    hint = refused(mini, prompt(mini, "fox", *[photo] * 60))
    assert "with at most" not in hint
    whole = number(r"the first (\d+) pictures fit as they are", hint)
    mini.prepare_prompt(prompt(mini, "fox", *[photo] * whole))
    refused(mini, prompt(mini, "fox", *[photo] * (whole + 1)))


def test_a_clip_counts_by_its_pairs_of_frames(engine: NativeEngine) -> None:
    clip = VideoPart(tuple(picture(320, 224, seed=seed) for seed in range(6)))
    whole = prompt(engine, "the fox", clip)
    level = number(r"with at most (\d+) tokens each \(a clip", refused(engine, whole))
    engine.prepare_prompt(prompt(engine, "the fox", clip, cap=level))


def test_a_level_leaves_what_is_smaller_alone(engine: NativeEngine) -> None:
    images = prompt(engine, "", *(ImagePart(picture(32 * side, 32 * side)) for side in (2, 8, 4))).images
    assert [image.tokens for image in images] == [4, 64, 16]
    assert [max_tokens_per_image(images, room) for room in (84, 83, 36, 35, 12, 11, 2, 0, -5)] == [
        64,
        63,
        16,
        15,
        4,
        3,
        0,
        0,
        0,
    ]

"""The profiling run reaches what the plan allows; random weights have the shapes of real ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vlfit.api.engine_options import EngineOptions
from vlfit.api.stats import Counters
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.warmup import (
    ProfilingRun,
    image_prompt,
    prompt_ending_in_images,
    run_requests,
    run_worst_case,
)
from vlfit.engine.execution.warmup import (
    profile_peak_memory as at_start,
)
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.errors import DoesNotFit
from vlfit.tuning.calibration_run import RandomWeightsLoader


def engine(
    folder: Path, context: int = 512, chunk: int = 64, sequences: int = 1, image_cache_bytes: int = 100_000
) -> NativeEngine:
    options = EngineOptions(
        device="cpu",
        max_model_len=context,
        max_num_batched_tokens=chunk,
        max_num_seqs=sequences,
        image_cache_bytes=image_cache_bytes,
    )
    return NativeEngine(open_checkpoint(folder), options, None, RandomWeightsLoader)


@pytest.mark.parametrize(
    ("context", "chunk", "sequences"), [(512, 64, 1), (512, 64, 3), (500, 32, 4), (256, 512, 2)]
)
def test_the_profiling_run_covers_the_worst_case(
    tiny: Callable[[str], Path], context: int, chunk: int, sequences: int
) -> None:
    built = engine(tiny("tied"), context=context, chunk=chunk, sequences=sequences)
    profile = run_worst_case(built, 48)
    assert profile.max_decoding == sequences
    assert profile.max_rows >= min(chunk, context - 3) - 1
    assert context - chunk < profile.max_length <= context
    assert profile.max_chunk_with_prefix >= min(chunk, context - chunk) - sequences - 1 or chunk >= context
    assert built.runner.encoder_cache.used_bytes > 0
    assert built.block_manager.num_free == built.block_manager.num_blocks


def test_the_cache_of_pictures_is_filled(tiny: Callable[[str], Path]) -> None:
    built = engine(tiny("tied"))
    one = built.runner.encode_image(image_prompt(built, 12, 0).images[0]).nbytes
    built = engine(tiny("tied"), image_cache_bytes=3 * one)
    assert run_worst_case(built, 12).num_images == 4
    assert built.runner.encoder_cache.used_bytes == 3 * one
    built = engine(tiny("tied"), image_cache_bytes=one - 1)
    assert run_worst_case(built, 12).num_images == 1
    assert built.runner.encoder_cache.used_bytes == 0


def test_pictures_have_exactly_so_many_tokens(tiny: Callable[[str], Path]) -> None:
    built = engine(tiny("tied"))
    for tokens in (1, 4, 7, 48, 64):
        prompt = image_prompt(built, tokens, 0)
        assert prompt.images[0].tokens == tokens
        with torch.inference_mode():
            assert len(built.runner.encode_image(prompt.images[0]).rows) == tokens


def test_what_a_request_fails_of_is_raised(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = engine(tiny("tied"))

    def broken(_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(built.runner, "run", broken)
    with pytest.raises(Exception, match="no memory left"):
        run_worst_case(built, 12)
    with pytest.raises(DoesNotFit):
        run_requests(built, [(image_prompt(built, 12, 0, 600), 1)])


@pytest.mark.parametrize("name", ["tied", "fp8", "vision_head_72"])
def test_made_up_weights_have_the_types_and_shapes_of_real_ones(
    tiny: Callable[[str], Path], name: str
) -> None:
    real = NativeEngine(open_checkpoint(tiny(name)), EngineOptions(device="cpu", max_model_len=64))
    made_up = engine(tiny(name))
    real_vision: Any = real.runner.vision
    random_vision: Any = made_up.runner.vision
    for theirs, ours in (
        (real.runner.text.norm, made_up.runner.text.norm),
        (real_vision.position_table, random_vision.position_table),
    ):
        assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
        assert not torch.equal(theirs, ours)
    assert made_up.account().memory.weights == real.account().memory.weights
    assert isinstance(run_worst_case(made_up, 12), ProfilingRun)


def test_at_the_start_nothing_of_it_is_left(tiny: Callable[[str], Path]) -> None:
    built = engine(tiny("tied"), context=256, sequences=2)
    profile = at_start(built)
    assert profile.max_decoding == 2
    assert built.runner.encoder_cache.used_bytes == 0
    assert built.counters == Counters()
    assert built.block_manager.num_free == built.block_manager.num_blocks
    assert not built.busy


@pytest.mark.parametrize("name", ["llama2", "phi3_long"])
def test_a_model_without_eyes_rehearses_text(tiny_decoder: Callable[[str], Path], name: str) -> None:
    built = engine(tiny_decoder(name), context=256, sequences=3, chunk=32)
    profile = at_start(built)
    assert (built.image_tokens, profile.num_images) == (0, 0)
    assert (profile.max_decoding, profile.max_length) == (3, 255)
    assert profile.max_chunk_with_prefix == 32


@pytest.mark.parametrize("context", [48, 64])
def test_a_picture_as_large_as_the_context_is_rehearsed_as_large_as_can_be(
    tiny: Callable[[str], Path], context: int
) -> None:
    built = engine(tiny("tied"), context=context, sequences=2)
    assert built.image_tokens == context - 1
    assert at_start(built).num_images >= 1


@pytest.mark.parametrize("each", [True, False])
def test_a_worst_case_that_does_not_fit_is_no_start(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, each: bool
) -> None:
    """Also where all requests could be done one by one: a plan that holds needs no second try."""
    built = engine(tiny("tied"), context=256, sequences=2)
    run = built.runner.run

    def short_of_memory(batch: list[ScheduledChunk]) -> StepOutput:
        if each or len(batch) > 1:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")
        return run(batch)

    monkeypatch.setattr(built.runner, "run", short_of_memory)
    with pytest.raises(DoesNotFit) as caught:
        at_start(built)
    assert "--image-tokens" in caught.value.hint
    assert ("20.0 MiB" in caught.value.message) is each


def test_a_context_ends_in_pictures_alone(tiny: Callable[[str], Path]) -> None:
    """The last whole chunk has features for nearly all of its rows, however small the largest picture is."""
    built = engine(tiny("tied"), context=512, chunk=64)
    picture_token = built.checkpoint.config.image_token_id
    for image_tokens, count in ((48, 3), (12, 9), (400, 1)):
        prompt = prompt_ending_in_images(built, image_tokens, 64, 500)
        assert len(prompt.token_ids) == 500
        assert len(prompt.images) == count
        assert len({image.key for image in prompt.images}) == count
        whole = prompt.token_ids[384:448]
        assert whole.count(picture_token) >= 64 * image_tokens // (image_tokens + 3) - 4
    profile = run_worst_case(built, 12)
    assert profile.max_length > 500

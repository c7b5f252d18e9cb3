"""The rehearsal reaches what a plan admits; made-up weights stand where real ones would."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from vlfit.api.engine_options import EngineOptions
from vlfit.api.stats import Counters
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import Engine
from vlfit.engine.execution.warmup import (
    Rehearsed,
    about_a_picture,
    answer_all,
    ending_in_pictures,
    rehearse,
)
from vlfit.engine.execution.warmup import (
    profile_peak_memory as at_start,
)
from vlfit.engine.sampling.sampler import Scores
from vlfit.engine.scheduling.scheduler import Work
from vlfit.errors import DoesNotFit
from vlfit.tuning.calibration_run import MadeUpLoader


def engine(
    folder: Path, context: int = 512, chunk: int = 64, sequences: int = 1, image_cache_bytes: int = 100_000
) -> Engine:
    options = EngineOptions(
        device="cpu",
        context=context,
        chunk=chunk,
        sequences=sequences,
        image_cache_bytes=image_cache_bytes,
    )
    return Engine(open_checkpoint(folder), options, None, MadeUpLoader)


@pytest.mark.parametrize(
    ("context", "chunk", "sequences"), [(512, 64, 1), (512, 64, 3), (500, 32, 4), (256, 512, 2)]
)
def test_the_worst_case_is_reached(
    tiny: Callable[[str], Path], context: int, chunk: int, sequences: int
) -> None:
    built = engine(tiny("tied"), context=context, chunk=chunk, sequences=sequences)
    reached = rehearse(built, 48)
    assert reached.most_decoding == sequences
    assert reached.most_rows >= min(chunk, context - 3) - 1
    assert context - chunk < reached.longest <= context
    assert reached.widest_chunk_with_a_past >= min(chunk, context - chunk) - sequences - 1 or chunk >= context
    assert built.runner.image_cache.used_bytes > 0
    assert built.pool.free == built.pool.blocks


def test_the_cache_of_pictures_is_filled(tiny: Callable[[str], Path]) -> None:
    built = engine(tiny("tied"))
    one = built.runner.encode(about_a_picture(built, 12, 0).images[0]).nbytes
    built = engine(tiny("tied"), image_cache_bytes=3 * one)
    assert rehearse(built, 12).pictures == 4
    assert built.runner.image_cache.used_bytes == 3 * one
    built = engine(tiny("tied"), image_cache_bytes=one - 1)
    assert rehearse(built, 12).pictures == 1
    assert built.runner.image_cache.used_bytes == 0


def test_pictures_have_exactly_so_many_tokens(tiny: Callable[[str], Path]) -> None:
    built = engine(tiny("tied"))
    for tokens in (1, 4, 7, 48, 64):
        prompt = about_a_picture(built, tokens, 0)
        assert prompt.images[0].tokens == tokens
        with torch.inference_mode():
            assert len(built.runner.encode(prompt.images[0]).rows) == tokens


def test_what_a_request_fails_of_is_raised(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = engine(tiny("tied"))

    def broken(_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(built.runner, "run", broken)
    with pytest.raises(Exception, match="no memory left"):
        rehearse(built, 12)
    with pytest.raises(DoesNotFit):
        answer_all(built, [(about_a_picture(built, 12, 0, 600), 1)])


@pytest.mark.parametrize("name", ["tied", "fp8", "vision_head_72"])
def test_made_up_weights_have_the_types_and_shapes_of_real_ones(
    tiny: Callable[[str], Path], name: str
) -> None:
    real = Engine(open_checkpoint(tiny(name)), EngineOptions(device="cpu", context=64))
    made_up = engine(tiny(name))
    assert real.runner.vision is not None
    assert made_up.runner.vision is not None
    for theirs, ours in (
        (real.runner.text.norm, made_up.runner.text.norm),
        (real.runner.vision.position_table, made_up.runner.vision.position_table),
    ):
        assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
        assert not torch.equal(theirs, ours)
    assert made_up.account().holdings.weights == real.account().holdings.weights
    assert isinstance(rehearse(made_up, 12), Rehearsed)


def test_at_the_start_nothing_of_it_is_left(tiny: Callable[[str], Path]) -> None:
    built = engine(tiny("tied"), context=256, sequences=2)
    reached = at_start(built)
    assert reached.most_decoding == 2
    assert built.runner.image_cache.used_bytes == 0
    assert built.counters == Counters()
    assert built.pool.free == built.pool.blocks
    assert not built.busy


@pytest.mark.parametrize("name", ["llama2", "phi3_long"])
def test_a_model_without_eyes_rehearses_text(tiny_decoder: Callable[[str], Path], name: str) -> None:
    built = engine(tiny_decoder(name), context=256, sequences=3, chunk=32)
    reached = at_start(built)
    assert (built.image_tokens, reached.pictures) == (0, 0)
    assert (reached.most_decoding, reached.longest) == (3, 255)
    assert reached.widest_chunk_with_a_past == 32


@pytest.mark.parametrize("context", [48, 64])
def test_a_picture_as_large_as_the_context_is_rehearsed_as_large_as_can_be(
    tiny: Callable[[str], Path], context: int
) -> None:
    built = engine(tiny("tied"), context=context, sequences=2)
    assert built.image_tokens == context - 1
    assert at_start(built).pictures >= 1


@pytest.mark.parametrize("each", [True, False])
def test_a_worst_case_that_does_not_fit_is_no_start(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, each: bool
) -> None:
    """Also where all requests could be done one by one: a plan that holds needs no second try."""
    built = engine(tiny("tied"), context=256, sequences=2)
    run = built.runner.run

    def short_of_memory(batch: Sequence[Work]) -> Scores:
        if each or len(batch) > 1:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")
        return run(batch)

    monkeypatch.setattr(built.runner, "run", short_of_memory)
    with pytest.raises(DoesNotFit, match="worst case") as caught:
        at_start(built)
    assert "--image-tokens" in caught.value.hint
    assert ("20.0 MiB" in caught.value.message) is each


def test_a_context_ends_in_pictures_alone(tiny: Callable[[str], Path]) -> None:
    """The last whole chunk has features for nearly all of its rows, however small the largest picture is."""
    built = engine(tiny("tied"), context=512, chunk=64)
    picture_token = built.checkpoint.config.image_token_id
    for image_tokens, count in ((48, 3), (12, 9), (400, 1)):
        prompt = ending_in_pictures(built, image_tokens, 64, 500)
        assert len(prompt.token_ids) == 500
        assert len(prompt.images) == count
        assert len({image.key for image in prompt.images}) == count
        whole = prompt.token_ids[384:448]
        assert whole.count(picture_token) >= 64 * image_tokens // (image_tokens + 3) - 4
    reached = rehearse(built, 12)
    assert reached.longest > 500

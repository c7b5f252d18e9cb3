"""While others decode, images are encoded for a short time in each step; without others, all in one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pictures import picture
from vlfit.api.conversation import ImagePart, VideoPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine import engine as module
from vlfit.engine.engine import NativeEngine
from vlfit.models.interface import PreparedImage, VisionFeatures

CLIPS = [VideoPart(tuple(picture(96, 64, seed=10 * clip + seed) for seed in range(8))) for clip in range(2)]


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("even_chunks", [True, False])
def test_clips_of_others_hold_up_a_token_for_one_image_only(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, others: bool, even_chunks: bool
) -> None:
    """With no time to encode in, each step encodes one time step of a clip, and answers stay the same."""
    monkeypatch.setattr(module, "MAX_ENCODE_SECONDS", 0.0)
    options = EngineOptions(device="cpu", max_model_len=512, even_chunks=even_chunks)
    quiet, engine = (NativeEngine(open_checkpoint(tiny("tied")), options) for _ in range(2))
    alone = [answer(quiet, clip) for clip in CLIPS]
    encode, encoded = engine.runner.encode_image, 0

    def counted(image: PreparedImage) -> VisionFeatures:
        nonlocal encoded
        encoded += 1
        return encode(image)

    monkeypatch.setattr(engine.runner, "encode_image", counted)
    tokens: list[Chunk | Exception] = []
    if others:
        submit(engine, tokens, max_tokens=60)
        while not tokens:
            engine.step()
    answers: list[list[Chunk | Exception]] = [[], []]
    for clip, received in zip(CLIPS, answers, strict=True):
        submit(engine, received, clip)
    most = 0
    while engine.busy:
        before = encoded
        engine.step()
        most = max(most, encoded - before)
    assert encoded == 8
    assert most == (1 if others and even_chunks else 8)
    assert [text(received) for received in answers] == alone


def submit(
    engine: NativeEngine,
    received: list[Chunk | Exception],
    *parts: ImagePart | VideoPart,
    max_tokens: int = 4,
) -> None:
    prompt = engine.prepare_prompt(engine.prompts.build(single_turn("what is it?", *parts)))
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    engine.submit(engine.make_sequence(prompt, sampling, received.append))


def answer(engine: NativeEngine, *parts: ImagePart | VideoPart) -> str:
    received: list[Chunk | Exception] = []
    submit(engine, received, *parts)
    while engine.busy:
        engine.step()
    return text(received)


def text(received: list[Chunk | Exception]) -> str:
    assert all(isinstance(each, Chunk) for each in received)
    return "".join(each.text for each in received if isinstance(each, Chunk))

"""The reference is law: the engine against transformers, in float32 on the CPU, on checkpoints that differ as
real ones do (see ``tests/tiny.py``).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from tests import pictures
from tests.tiny import TINY, tiny_reference
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, VideoPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import ScheduledChunk, Sequence
from vlfit.models.qwen3_vl.config import read_image_processor_config, read_video_processor_config
from vlfit.models.qwen3_vl.image_processor import patchify, prepare_image, prepare_video
from vlfit.prompt.builder import Prompt

NEW_TOKENS = 48
TOLERANCE = 1e-4
TIE = 1e-4  # of logits around 5: ten times what the order of additions changes
GREEDY = GenerationConfig(
    do_sample=False,
    max_new_tokens=NEW_TOKENS,
    pad_token_id=0,
    output_scores=True,
    return_dict_in_generate=True,
)


@pytest.fixture(scope="module", params=TINY)
def pair(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> tuple[NativeEngine, Any]:
    """The engine and the reference on the same files."""
    folder = tiny(request.param)
    options = EngineOptions(device="cpu", max_model_len=1024, max_num_batched_tokens=128)
    reference = tiny_reference(folder)
    reference.generation_config = GenerationConfig()  # the checkpoint's own would stop at its end token
    return NativeEngine(open_checkpoint(folder), options), reference


def picture(width: int, height: int, seed: int) -> ImagePart:
    return ImagePart(pictures.picture(width, height, seed=seed))


CONVERSATIONS: dict[str, Conversation] = {
    "text": single_turn("the quick brown fox"),
    "picture": single_turn("what is in this image?", picture(90, 70, 1)),
    "three pictures between text": (
        Message(
            "user",
            (
                TextPart("first "),
                picture(64, 96, 2),
                TextPart(" then "),
                picture(128, 64, 3),
                picture(70, 70, 4),
                TextPart(" which one is red?"),
            ),
        ),
    ),
    "frames as a clip": single_turn(
        "what happens?", VideoPart(tuple(pictures.picture(64, 64, seed=seed) for seed in range(5)), fps=2.0)
    ),
    "system and turns": (
        Message("system", (TextPart("You describe pictures."),)),
        Message("user", (picture(64, 64, 5), TextPart("hello world"))),
        Message("assistant", (TextPart("a red square"),)),
        Message("user", (TextPart("and the fox?"),)),
    ),
}


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def reference_inputs(engine: NativeEngine, prompt: Prompt) -> dict[str, Tensor]:
    """What transformers wants for the same prompt: ids, token types, patches and grids."""
    config = engine.checkpoint.config
    ids = torch.tensor([prompt.token_ids])
    images, videos = ids == config.image_token_id, ids == config.video_token_id
    inputs = {"input_ids": ids, "mm_token_type_ids": images.int() + 2 * videos.int()}
    processing = read_image_processor_config(engine.checkpoint.folder)
    for suffix, grid_name, is_video in (("", "image", False), ("_videos", "video", True)):
        parts = [image for image in prompt.images if image.is_video == is_video]
        if parts:
            patches = [patchify(torch.from_numpy(part.pixels), processing) for part in parts]
            inputs[f"pixel_values{suffix}"] = torch.cat(patches)
            inputs[f"{grid_name}_grid_thw"] = torch.tensor([part.grid for part in parts])
    return inputs


def run(engine: NativeEngine, *conversations: Conversation, tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Greedy tokens of each conversation, all in the engine at once."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sequences: list[Sequence] = []
    for conversation in conversations:
        prompt = engine.prompts.build(conversation, max_image_tokens=None, context=engine.context)
        sequences.append(engine.make_sequence(engine.prepare_prompt(prompt), sampling, _raise))
        engine.submit(sequences[-1])
    while engine.busy:
        engine.step()
    return [sequence.generated for sequence in sequences]


def _raise(event: object) -> None:
    if isinstance(event, Exception):
        raise event


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_greedy_tokens_equal_the_reference(pair: tuple[NativeEngine, Any], name: str) -> None:
    engine, reference = pair
    prompt = engine.prompts.build(CONVERSATIONS[name], max_image_tokens=None, context=engine.context)
    with torch.inference_mode():
        output = reference.generate(
            **reference_inputs(engine, prompt),
            generation_config=GREEDY,
        )
    expected = output.sequences[0, len(prompt.token_ids) :].tolist()
    best, second = torch.stack(output.scores)[:, 0].topk(2).values.unbind(-1)
    assert (best - second).min() > TIE, "the reference itself hangs on the last bit: take another picture"
    assert run(engine, CONVERSATIONS[name]) == [expected]
    assert len(expected) == NEW_TOKENS
    assert len(set(expected)) > 5, "the reference says the same few tokens over and over: a weak test"


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_logits_equal_the_reference(
    pair: tuple[NativeEngine, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, reference = pair
    prompt = engine.prompts.build(CONVERSATIONS[name], max_image_tokens=None, context=engine.context)
    with torch.inference_mode():
        expected = reference(**reference_inputs(engine, prompt)).logits[0, -1]
    seen: list[Tensor] = []
    forward = engine.runner.run

    def watching(batch: list[ScheduledChunk]) -> StepOutput:
        scores = forward(batch)
        seen.append(scores.logits)
        return scores

    monkeypatch.setattr(engine.runner, "run", watching)
    run(engine, CONVERSATIONS[name], tokens=1)
    assert relative(seen[-1][0], expected) < TOLERANCE


def test_vision_features_and_every_deepstack_level_equal_the_reference(
    pair: tuple[NativeEngine, Any],
) -> None:
    engine, reference = pair
    folder = engine.checkpoint.folder
    processing = read_image_processor_config(folder)
    still = prepare_image(picture(100, 60, 6), processing, None)
    clip = prepare_video(
        VideoPart(tuple(pictures.picture(64, 96, seed=seed) for seed in range(4))),
        read_video_processor_config(folder),
        None,
    )
    for image in (still, clip):
        patches = patchify(torch.from_numpy(image.pixels), processing)
        with torch.inference_mode():
            expected = reference.model.visual(patches, grid_thw=torch.tensor([image.grid]))
            ours = engine.runner.encode_image(image)
        assert relative(ours.rows, expected.pooler_output) < TOLERANCE
        assert len(ours.deepstack) == len(expected.deepstack_features)
        for level, theirs in zip(ours.deepstack, expected.deepstack_features, strict=True):
            assert relative(level, theirs) < TOLERANCE


@pytest.mark.parametrize(
    ("chunk", "block_size"), [(7, 16), (64, 4), (1024, 16)], ids=["chunk 7", "block 4", "one chunk"]
)
def test_tokens_depend_neither_on_company_nor_on_chunks_nor_on_blocks(
    tiny: Callable[[str], Path], chunk: int, block_size: int
) -> None:
    checkpoint = open_checkpoint(tiny(next(iter(TINY))))
    conversations = list(CONVERSATIONS.values())
    plain = NativeEngine(
        checkpoint, EngineOptions(device="cpu", max_model_len=1024, max_num_batched_tokens=128)
    )
    alone = [run(plain, conversation)[0] for conversation in conversations]
    options = EngineOptions(
        device="cpu", max_model_len=1024, max_num_batched_tokens=chunk, block_size=block_size, max_num_seqs=5
    )
    assert run(NativeEngine(checkpoint, options), *conversations) == alone

"""Converted checkpoints in our engine against transformers with the values that the files stand for.

transformers gets those values widened by ``reference.py``, in float32, so that logits can be compared.
``test_other_readers.py`` has transformers and compressed-tensors read the files themselves.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

from tests.engine.test_parity import (
    CONVERSATIONS,
    GREEDY,
    NEW_TOKENS,
    TIE,
    TOLERANCE,
    reference_inputs,
    relative,
    run,
)
from tests.quantize.reference import dequantized_copy
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.quantize.conversion import convert

# Names of tests/tiny.py, and how each is converted.
CONVERTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp8, partial blocks": ("odd_vocab_one_kv_head", "fp8", {}),
    "fp8, fp16 with biases": ("half_with_biases", "fp8", {}),
    "int4": ("tied", "int4", {}),
    "int4, layers that no group divides": ("odd_vocab_one_kv_head", "int4", {}),
    "int4 from fp16 with biases": ("half_with_biases", "int4", {}),
    "int4 with the head, shards": ("untied_sharded", "int4", {"head": "int4", "shard_bytes": 200_000}),
    "int4, all else in int8": (
        "untied_sharded",
        "int4",
        {"head": "int8", "embedding": "int8", "vision": "int8"},
    ),
    "int4, a tied embedding in int8": ("tied", "int4", {"embedding": "int8"}),
    "fp8, all else in int8": (
        "fp8_untied_sharded",
        "fp8",
        {"head": "int8", "embedding": "int8", "vision": "int8"},
    ),
    "int4 from fp8": ("fp8", "int4", {}),
    "int4 from bf16, the tower in int8": ("vision_head_72", "int4", {"vision": "int8"}),
    "int4, groups of 64": ("half_with_biases", "int4", {"group_size": 64}),
}
ASKED = ("picture", "system and turns")


@pytest.fixture(scope="module", params=CONVERTED)
def pair(
    request: pytest.FixtureRequest, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[NativeEngine, Any]:
    name, weights, options = CONVERTED[request.param]
    root = tmp_path_factory.mktemp("converted")
    convert(open_checkpoint(tiny(name)), weights, root / "new", **options)
    reference: Any = Qwen3VLForConditionalGeneration.from_pretrained(
        dequantized_copy(root / "new", root / "wide"), dtype=torch.float32
    ).eval()
    reference.generation_config = GenerationConfig()
    # Without guesses each pass gives the logits of one token.
    alone = EngineOptions(device="cpu", max_model_len=1024, max_num_batched_tokens=128, speculate=False)
    return NativeEngine(open_checkpoint(root / "new"), alone), reference


@pytest.mark.parametrize("name", ASKED)
def test_greedy_tokens_and_logits_equal_the_reference(
    pair: tuple[NativeEngine, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, reference = pair
    prompt = engine.prompts.build(CONVERSATIONS[name], max_image_tokens=None, context=engine.context)
    with torch.inference_mode():
        output = reference.generate(**reference_inputs(engine, prompt), generation_config=GREEDY)
    scores = torch.stack(output.scores)[:, 0]
    best, second = scores.topk(2).values.unbind(-1)
    assert (best - second).min() > TIE, "the reference itself hangs on the last bit: take another picture"
    seen: list[Tensor] = []
    forward = engine.runner.run

    def watching(batch: list[ScheduledChunk]) -> StepOutput:
        scores = forward(batch)
        seen.append(scores.logits.clone())
        return scores

    monkeypatch.setattr(engine.runner, "run", watching)
    expected = output.sequences[0, len(prompt.token_ids) :].tolist()
    assert run(engine, CONVERSATIONS[name]) == [expected]
    assert len(set(expected)) > 5, "the reference says the same few tokens over and over: a weak test"
    ours = torch.cat(seen[-NEW_TOKENS:])
    assert max(relative(mine, theirs) for mine, theirs in zip(ours, scores, strict=True)) < TOLERANCE

"""Limits that the engine keeps to, and numbers that it does not take for words."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import MAX_SEED, SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import StepOutput, select_tokens
from vlfit.errors import DoesNotFit, InvalidRequest, ModelFailed, UsageError
from vlfit.plan.ledger import DEFAULT_CONTEXT


def test_a_context_beyond_the_checkpoint_is_refused(tiny: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(tiny("tied"))
    most = checkpoint.config.text.max_position_embeddings
    with pytest.raises(UsageError, match=f"{most}"):
        NativeEngine(checkpoint, EngineOptions(device="cpu", max_model_len=most + 1))
    default = NativeEngine(checkpoint, EngineOptions(device="cpu", max_num_seqs=1))
    assert default.context == min(DEFAULT_CONTEXT, most)


def test_a_larger_context_is_advised_only_where_there_is_one(tiny: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(tiny("tied"))
    most = checkpoint.config.text.max_position_embeddings
    for context, advised in ((most - 1, True), (most, False)):
        engine = NativeEngine(
            checkpoint, EngineOptions(device="cpu", max_model_len=context, max_num_seqs=1, kv_tokens=1)
        )
        with pytest.raises(DoesNotFit) as caught:
            engine.resolve_max_tokens(10, SamplingParams(max_tokens=most))
        assert ("larger --context" in caught.value.hint) is advised


def test_numbers_that_are_none_end_the_request_and_no_other(tiny: Callable[[str], Path]) -> None:
    engine = NativeEngine(open_checkpoint(tiny("tied")), EngineOptions(device="cpu", max_model_len=256))
    received: dict[str, list[Chunk | Exception]] = {"broken": [], "sound": []}
    prompt = engine.prepare_prompt(engine.prompts.build(single_turn("hello")))
    for name in received:
        engine.submit(
            engine.make_sequence(prompt, SamplingParams(max_tokens=3, ignore_eos=True), received[name].append)
        )
    forward = engine.runner.run

    def overflowing(batch: object) -> StepOutput:
        logits = forward(batch).logits  # type: ignore[arg-type]
        if len(logits) == 2:
            logits[0, 5] = torch.nan
        return select_tokens(logits)

    engine.runner.run = overflowing  # type: ignore[method-assign]
    while engine.busy:
        engine.step()
    assert isinstance(received["broken"][-1], ModelFailed)
    assert "token 1" in received["broken"][-1].message
    assert [chunk.finish_reason for chunk in received["sound"] if isinstance(chunk, Chunk)][-1] == "length"
    assert engine.block_manager.num_free == engine.block_manager.num_blocks


@pytest.mark.parametrize("seed", [2**63, -(2**63), 10**30])
def test_a_seed_that_no_generator_takes_is_refused(seed: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(seed=seed)
    assert caught.value.param == "seed"


@pytest.mark.parametrize("seed", [MAX_SEED, -MAX_SEED])
def test_the_largest_seeds_work(tiny: Callable[[str], Path], seed: int) -> None:
    engine = NativeEngine(open_checkpoint(tiny("tied")), EngineOptions(device="cpu", max_model_len=256))
    prompt = engine.prepare_prompt(engine.prompts.build(single_turn("hello")))
    for choice in (seed, seed + 15):
        engine.make_sequence(prompt, SamplingParams(temperature=1.0, seed=min(choice, MAX_SEED)), print)

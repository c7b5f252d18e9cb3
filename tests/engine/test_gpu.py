"""The engine on a CUDA device: the same tokens as on the CPU in float32, in every weights format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.on_gpu import requested_bytes, reset_memory_statistics
from tests.engine.test_parity import CONVERSATIONS, relative, run
from tests.engine.test_pooling import vectors_beside_answers
from tests.tiny import TINY
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.cuda_graphs import StepInputs
from vlfit.engine.scheduling import scheduler
from vlfit.engine.scheduling.sequence import Sequence
from vlfit.layers.linear import Fp8Linear, PackedLinear
from vlfit.quantize.conversion import convert

pytestmark = pytest.mark.gpu


def engine(
    folder: Path, device: str, dtype: str = "float32", *, graphs: bool = True, speculate: bool = True
) -> NativeEngine:
    options = EngineOptions(
        device=device,
        dtype=dtype,
        max_model_len=1024,
        max_num_batched_tokens=64,
        max_num_seqs=5,
        cuda_graphs=graphs,
        speculate=speculate,
    )
    return NativeEngine(open_checkpoint(folder), options)


@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_are_those_of_the_cpu(tiny: Callable[[str], Path], name: str) -> None:
    conversations = list(CONVERSATIONS.values())
    expected = run(engine(tiny(name), "cpu"), *conversations)
    assert run(engine(tiny(name), "cuda"), *conversations) == expected


@pytest.mark.parametrize("name", ["tied", "untied_sharded", "fp8"])
def test_vectors_are_those_of_the_cpu(tiny: Callable[[str], Path], name: str) -> None:
    conversations = list(CONVERSATIONS.values())
    vectors, answers = vectors_beside_answers(engine(tiny(name), "cpu"), conversations, 8)
    same_vectors, same_answers = vectors_beside_answers(engine(tiny(name), "cuda"), conversations, 8)
    assert same_answers == answers
    np.testing.assert_allclose(same_vectors, vectors, atol=1e-3)


def test_fp8_weights_stay_fp8(tiny: Callable[[str], Path]) -> None:
    layer = engine(tiny("fp8"), "cuda").runner.text.layers[0]
    assert isinstance(layer.down, Fp8Linear)
    assert layer.down.weights.codes.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_converted_weights_stay_narrow_and_say_the_same(
    tiny: Callable[[str], Path], tmp_path: Path, weights: str
) -> None:
    convert(open_checkpoint(tiny("odd_vocab_one_kv_head")), weights, tmp_path / "new")
    conversations = list(CONVERSATIONS.values())
    on_gpu = engine(tmp_path / "new", "cuda")
    assert isinstance(on_gpu.runner.text.layers[0].down, Fp8Linear if weights == "fp8" else PackedLinear)
    assert run(on_gpu, *conversations) == run(engine(tmp_path / "new", "cpu"), *conversations)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(tiny: Callable[[str], Path], dtype: str) -> None:
    """Hidden states of one forward pass; tokens of random weights may differ in half precision."""
    exact, rounded = engine(tiny("tied"), "cuda"), engine(tiny("tied"), "cuda", dtype)
    seen = []
    for each in (exact, rounded):
        prompt = each.prompts.build(CONVERSATIONS["picture"])
        features = each.runner.encode_image(prompt.images[0])
        seen.append(features.rows.float())
    assert relative(seen[1], seen[0]) < 0.05


def test_loading_leaves_nothing_beside_the_model(tiny: Callable[[str], Path]) -> None:
    reset_memory_statistics()
    before = requested_bytes()
    loaded = engine(tiny("tied"), "cuda", graphs=False)  # graphs hold what a step computes
    weights = loaded.checkpoint.weight_bytes
    held = requested_bytes() - before - loaded.runner.cache.nbytes
    # What lies side by side in one allocation is aligned to 512 bytes.
    assert weights <= held <= weights + 512 * 2 * len(loaded.checkpoint.tensors)


def test_steps_follow_each_other_before_tokens_are_read(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host says once where a request begins to decode, and not again: tables of blocks grow meanwhile."""
    monkeypatch.setattr(scheduler, "LOOKAHEAD_TOKENS", 2)
    expected = run(engine(tiny("tied"), "cpu"), CONVERSATIONS["text"], tokens=200)
    on_gpu = engine(tiny("tied"), "cuda", speculate=False)
    fill, filled = StepInputs.fill, []

    def counted(inputs: StepInputs, sequences: Any) -> None:
        filled.append(len(sequences))
        fill(inputs, sequences)

    monkeypatch.setattr(StepInputs, "fill", counted)
    assert run(on_gpu, CONVERSATIONS["text"], tokens=200) == expected
    assert filled == [1]


def test_who_comes_or_goes_meanwhile_changes_no_word(tiny: Callable[[str], Path]) -> None:
    """One is cancelled after ten tokens, another comes after twenty, a third draws its tokens by chance."""
    expected = run(engine(tiny("tied"), "cpu"), CONVERSATIONS["text"], CONVERSATIONS["picture"], tokens=60)
    on_gpu = engine(tiny("tied"), "cuda")
    greedy = SamplingParams(max_tokens=60, ignore_eos=True)
    by_chance = SamplingParams(max_tokens=15, ignore_eos=True, temperature=1.0, seed=1)

    def ask(name: str, sampling: SamplingParams) -> Sequence:
        prompt = on_gpu.prepare_prompt(on_gpu.prompts.build(CONVERSATIONS[name], context=on_gpu.context))
        sequence = on_gpu.make_sequence(prompt, sampling, lambda _: None)
        on_gpu.submit(sequence)
        return sequence

    first, gone = ask("text", greedy), ask("text", greedy)
    later: list[Sequence] = []
    while on_gpu.busy:
        gone.cancelled = len(gone.generated) >= 10
        if len(first.generated) >= 20 and not later:
            later = [ask("picture", greedy), ask("text", by_chance)]
        on_gpu.step()
    assert [first.generated, later[0].generated] == expected
    assert gone.generated == expected[0][: len(gone.generated)]
    assert len(gone.generated) < 20
    assert len(later[1].generated) == 15


@pytest.mark.parametrize("graphs", [False, True])
def test_tables_grow_beside_a_prompt_in_chunks(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Passes outside of graphs compare tables with those of the pass before, which have grown since."""
    monkeypatch.setattr(scheduler, "LOOKAHEAD_TOKENS", 2)
    conversations = [CONVERSATIONS["text"], single_turn("hello " * 600), CONVERSATIONS["picture"]]
    expected = run(engine(tiny("tied"), "cpu"), *conversations, tokens=100)
    on_gpu = engine(tiny("tied"), "cuda", graphs=graphs, speculate=False)
    assert run(on_gpu, *conversations, tokens=100) == expected

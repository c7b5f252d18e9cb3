"""A vocabulary of 248,320 tokens (Qwen3.5) through every path: head, drawing, logprobs, grammars, drafts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_parity import run
from tests.tiny_qwen3_5 import QWEN3_5, HybridSpec, build_qwen3_5
from vlfit.api.conversation import single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Answer
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.backends.native import NativeBackend
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine

VOCABULARY = 248320
HELLO = single_turn("the quick brown fox")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every row of the embedding is random, so that answers are of tokens from the whole vocabulary."""
    spec = HybridSpec("0.8B", hidden=32, vision=False, more={"vocab_size": VOCABULARY})
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(QWEN3_5, "vocabulary", spec)
        made = build_qwen3_5("vocabulary", tmp_path_factory.mktemp("vocabulary"))
    tensors = load_file(made / "model.safetensors")
    [name] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    generator = torch.Generator().manual_seed(3)
    tensors[name] = torch.randn(tensors[name].shape, generator=generator) * 0.5
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


OPTIONS = EngineOptions(device="cpu", max_model_len=256, max_num_seqs=4)


@pytest.fixture(scope="module")
def backend(folder: Path) -> Any:
    with NativeBackend.load(str(folder), OPTIONS) as backend:
        yield backend


@pytest.fixture(scope="module")
def engine(folder: Path) -> NativeEngine:
    """For steps by hand: the backend's own has a thread, which may still be in its last step."""
    return NativeEngine(open_checkpoint(folder), OPTIONS)


def answer(backend: NativeBackend, **settings: Any) -> Answer:
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **settings})
    return backend.stream(HELLO, params).answer()


def tokens(found: Answer) -> list[int]:
    return [each.token_id for each in found.logprobs]


def test_the_head_and_logprobs(backend: NativeBackend, engine: NativeEngine) -> None:
    """The likeliest tokens of all rows, and their logprobs over all of them."""
    weight = load_file(Path(backend.checkpoint.folder) / "model.safetensors")
    [table] = [value for name, value in weight.items() if name.endswith("embed_tokens.weight")]
    assert len(table) == VOCABULARY
    found = answer(backend, top_logprobs=20)
    greedy = run(engine, HELLO, tokens=6)[0]
    assert tokens(found) == greedy
    assert max(greedy) > 151_936  # beyond other vocabularies
    for each in found.logprobs:
        assert len(each.top) == 20
        assert each.top[0].token_id == each.token_id
        probabilities = np.exp([other.logprob for other in each.top])
        assert (np.diff(probabilities) <= 0).all()
        assert probabilities.sum() <= 1 + 1e-6
    assert len({other.token_id for each in found.logprobs for other in each.top}) > 40


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 20, "top_p": 0.95}, {"top_k": 1}, {"min_p": 0.1}, {"top_p": 0.5}, {"repetition_penalty": 1.1}],
    ids=str,
)
def test_drawing(backend: NativeBackend, settings: dict[str, Any]) -> None:
    """Seeded answers come again; with one candidate they are the greedy ones."""
    drawn = [
        tokens(answer(backend, temperature=1.0, seed=seed, top_logprobs=0, **settings)) for seed in (5, 5, 6)
    ]
    assert drawn[0] == drawn[1]
    greedy = tokens(answer(backend, top_logprobs=0))
    if settings == {"top_k": 1}:
        assert drawn[0] == drawn[2] == greedy
    elif "repetition_penalty" not in settings and "min_p" not in settings:
        assert drawn[0] != drawn[2]
    assert all(0 <= token < VOCABULARY for each in drawn for token in each)


def test_a_grammar_masks_all_tokens_that_have_no_text(backend: NativeBackend) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"enum": ["yes", "no"]}},
        "required": ["a"],
    }
    schema["additionalProperties"] = False
    for settings in ({}, {"temperature": 1.0, "seed": 1}):
        found = answer(
            backend,
            grammar=Grammar("json", json.dumps(schema)),
            ignore_eos=False,
            max_tokens=40,
            template_variables='{"enable_thinking": false}',
            **settings,
        )
        assert found.finish_reason == "stop"
        assert json.loads(found.text)["a"] in ("yes", "no")


def test_drafts_by_prompt_lookup_change_no_token(folder: Path, engine: NativeEngine) -> None:
    plain = EngineOptions(device="cpu", max_model_len=256, max_num_seqs=1, speculate=False)
    repeated = single_turn("one two three four " * 12)
    wanted = run(NativeEngine(open_checkpoint(folder), plain), repeated, tokens=24)
    assert run(engine, repeated, tokens=24) == wanted

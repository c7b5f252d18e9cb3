"""Sliding-window attention of Phi-3, Qwen2 and Qwen3: greedy tokens beyond the window equal transformers'."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from transformers import GenerationConfig

from tests.engine.test_parity import run
from tests.models.test_parity import CONVERSATIONS, expected_tokens
from tests.tiny_decoders import DECODERS, build_decoder, decoder_reference
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.engine.engine import NativeEngine

WINDOW, TOKENS = 24, 32
SLIDES, FULL = "sliding_attention", "full_attention"
SWITCHED = {"sliding_window": WINDOW, "use_sliding_window": True}
# Fields of config.json, and the windows of the three layers.
CONFIGS: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...]]] = {
    "phi3": ("phi3", {"sliding_window": WINDOW}, (WINDOW, WINDOW, WINDOW)),
    "qwen2": ("qwen2", {**SWITCHED, "max_window_layers": 1}, (None, WINDOW, WINDOW)),
    "qwen3": ("qwen3", {**SWITCHED, "layer_types": [SLIDES, FULL, SLIDES]}, (WINDOW, None, WINDOW)),
    "qwen3 from the first layer on": ("qwen3", {**SWITCHED, "max_window_layers": 0}, (WINDOW,) * 3),
}


@dataclass
class Windowed:
    checkpoint: Checkpoint
    reference: Any
    windows: tuple[int | None, ...]

    def engine(self, checkpoint: Checkpoint | None = None, **options: Any) -> NativeEngine:
        chosen = {"device": "cpu", "max_model_len": 512, **options}
        return NativeEngine(checkpoint or self.checkpoint, EngineOptions(**chosen))


@pytest.fixture(scope="module", params=CONFIGS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    name, fields, windows = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp("windowed")
    with pytest.MonkeyPatch.context() as patched:
        spec = DECODERS[name]
        patched.setitem(DECODERS, "windowed", replace(spec, more={**spec.more, **fields}))
        build_decoder("windowed", folder)
    reference = decoder_reference(folder, folder / "wide")
    reference.generation_config = GenerationConfig()
    return Windowed(open_checkpoint(folder), reference, windows)


def test_windows_equal_the_reference(windowed: Windowed) -> None:
    text, theirs = windowed.checkpoint.config.text, windowed.reference.config
    assert text.sliding_windows == windowed.windows
    assert text.max_position_embeddings == text.default_context == theirs.max_position_embeddings
    if hasattr(theirs, "layer_types") and theirs.layer_types:
        kinds = [FULL if window is None else SLIDES for window in text.sliding_windows]
        assert kinds == theirs.layer_types
    assert theirs.sliding_window == WINDOW


@pytest.mark.parametrize("chunk", [512, 16])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_greedy_tokens_equal_the_reference(windowed: Windowed, name: str, chunk: int) -> None:
    """Whole prompts, and in chunks smaller than the window."""
    engine = windowed.engine(max_num_batched_tokens=chunk, max_num_seqs=1)
    prompt = engine.prompts.build(CONVERSATIONS[name]).token_ids
    assert len(prompt) > WINDOW
    expected = expected_tokens(engine, windowed.reference, CONVERSATIONS[name], TOKENS)
    assert run(engine, CONVERSATIONS[name], tokens=TOKENS) == [expected]
    assert len(set(expected)) > 5, "the reference says the same few tokens over and over: a weak test"


def test_in_a_batch_and_with_cached_prefixes(windowed: Windowed) -> None:
    engine = windowed.engine(max_num_batched_tokens=24, max_num_seqs=2, block_size=8)
    conversations = list(CONVERSATIONS.values())
    expected = [expected_tokens(engine, windowed.reference, each, TOKENS) for each in conversations]
    assert run(engine, *conversations, tokens=TOKENS) == expected
    before = engine.counters.cached_prompt_tokens
    assert run(engine, *conversations, tokens=TOKENS) == expected
    assert engine.counters.cached_prompt_tokens > before


def test_tokens_differ_without_the_window(windowed: Windowed) -> None:
    """So the tests above would see a window that is ignored."""
    config = windowed.checkpoint.config
    whole = replace(config, text=replace(config.text, sliding_windows=()))
    engine = windowed.engine(replace(windowed.checkpoint, config=whole))
    conversation = CONVERSATIONS["question"]
    expected = expected_tokens(engine, windowed.reference, conversation, TOKENS)
    assert run(engine, conversation, tokens=TOKENS) != [expected]

"""Pooled requests against transformers, in float32 on a CPU: vectors and scores, however scheduled.

Tolerance: hidden states of both programs differ by the order of float32 sums, some 1e-6 of their largest
component in these models; 1e-4, as for logits in ``test_parity.py``, leaves room for wider models and other
CPUs. A score is a sigmoid, whose slope is 1/4 at most.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import pictures
from tests.engine.test_parity import reference_inputs
from tests.tiny import tiny_reference
from tests.tiny_pooled import NO, YES, make_reranker
from tests.wording import figures_in
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, VideoPart
from vlfit.api.engine_options import EngineOptions
from vlfit.api.outputs import Chunk
from vlfit.api.pooling import PoolingParams, Vector
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.errors import DoesNotFit, InvalidRequest, ModelFailed

TOLERANCE = 1e-4
CONTEXT = 512


def system(text: str = "Represent the user's input.") -> Message:
    return Message("system", (TextPart(text),))


def user(*parts: Any) -> Message:
    return Message("user", parts)


def picture(width: int, height: int, seed: int) -> ImagePart:
    return ImagePart(pictures.picture(width, height, seed=seed))


LONG = "the quick brown fox jumps over the lazy dog. " * 8
CONVERSATIONS: dict[str, Conversation] = {
    "text": (system(), user(TextPart("the quick brown fox"))),
    "long text": (system(), user(TextPart(LONG))),
    "picture": (system(), user(picture(90, 70, 1))),
    "picture and text": (system("Find the animal."), user(picture(64, 96, 2), TextPart("a lazy dog"))),
    "two pictures": (system(), user(picture(64, 64, 3), picture(128, 64, 4), TextPart("which is red?"))),
    "clip": (
        system(),
        user(VideoPart(tuple(pictures.picture(64, 64, seed=seed) for seed in range(4)), fps=2.0)),
    ),
}


@pytest.fixture(scope="module")
def scored(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint that says by which tokens it scores."""
    root = tmp_path_factory.mktemp("scored")

    def build(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else make_reranker(tiny(name), folder)

    return build


def engine_of(folder: Path, **options: Any) -> NativeEngine:
    settings = {"device": "cpu", "max_model_len": CONTEXT, "max_num_batched_tokens": 128, **options}
    return NativeEngine(open_checkpoint(folder), EngineOptions(**settings))


@pytest.fixture(scope="module", params=["tied", "untied_sharded", "fp8", "half_with_biases"])
def pair(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> tuple[NativeEngine, Any]:
    """The engine and the reference on the same files."""
    folder = tiny(request.param)
    return engine_of(folder), tiny_reference(folder)


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], Path]) -> NativeEngine:
    return engine_of(tiny("tied"))


class Collected:
    """The events of one request."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.errors: list[Exception] = []

    def __call__(self, event: Chunk | Exception) -> None:
        if isinstance(event, Chunk):
            self.chunks.append(event)
        else:
            self.errors.append(event)

    @property
    def vector(self) -> Vector:
        (chunk,) = self.chunks
        assert chunk.pooled is not None
        assert chunk.finish_reason == "stop"
        return chunk.pooled


def submit(
    engine: NativeEngine, conversation: Conversation | tuple[int, ...], pooling: PoolingParams
) -> Collected:
    events = Collected()
    prepared = engine.prepare_pooled(conversation, pooling)
    engine.submit(engine.make_request(prepared, SamplingParams(), events))
    return events


def run(engine: NativeEngine) -> None:
    while engine.busy:
        engine.step()


def embed(engine: NativeEngine, conversation: Conversation, **params: Any) -> Vector:
    events = submit(engine, conversation, PoolingParams(**params))
    run(engine)
    return events.vector


def reference_state(engine: NativeEngine, reference: Any, conversation: Conversation) -> torch.Tensor:
    """transformers' hidden state of the last token, after the final norm."""
    prompt = engine.prompts.build(conversation, None, engine.context)
    with torch.inference_mode():
        output = reference.model(**reference_inputs(engine, prompt), use_cache=False)
    state: torch.Tensor = output.last_hidden_state[0, -1]
    return state


def unit(state: torch.Tensor) -> Vector:
    vector: Vector = (state / state.norm()).numpy()
    return vector


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_vectors_equal_the_reference(pair: tuple[NativeEngine, Any], name: str) -> None:
    engine, reference = pair
    wanted = unit(reference_state(engine, reference, CONVERSATIONS[name]))
    ours = embed(engine, CONVERSATIONS[name])
    assert ours.dtype == np.float32
    assert float(np.linalg.norm(ours)) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(ours, wanted, atol=TOLERANCE * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("chunk", [7, 32])
def test_vectors_of_prompts_computed_in_chunks(
    tiny: Callable[[str], Path], engine: NativeEngine, chunk: int
) -> None:
    in_chunks = engine_of(tiny("tied"), max_num_batched_tokens=chunk, prefix_cache=False)
    for conversation in CONVERSATIONS.values():
        whole = embed(engine, conversation)
        close = TOLERANCE * np.abs(whole).max()
        np.testing.assert_allclose(embed(in_chunks, conversation), whole, atol=close, rtol=0)


def generate(engine: NativeEngine, text: str, tokens: int = 24) -> list[int]:
    """Greedy tokens, alone in the engine."""
    sequence = start_generating(engine, text, tokens)
    run(engine)
    generated: list[int] = sequence.generated
    return generated


def start_generating(engine: NativeEngine, text: str, tokens: int) -> Any:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    prepared = engine.prepare((user(TextPart(text)),), params)
    sequence = engine.make_request(prepared, params, lambda _: None)
    engine.submit(sequence)
    return sequence


def vectors_beside_answers(
    engine: NativeEngine, conversations: Sequence[Conversation], tokens: int
) -> tuple[list[Vector], list[list[int]]]:
    """The vector of each conversation, and greedy tokens of other prompts in the same passes."""
    sequences = [start_generating(engine, text, tokens) for text in ("hello world", "a red square")]
    engine.step()
    events = [submit(engine, each, PoolingParams()) for each in conversations]
    run(engine)
    return [each.vector for each in events], [sequence.generated for sequence in sequences]


def test_vectors_in_the_company_of_other_requests(tiny: Callable[[str], Path]) -> None:
    engine = engine_of(tiny("tied"), max_num_seqs=4, max_num_batched_tokens=48, prefix_cache=False)
    alone = {name: embed(engine, conversation) for name, conversation in CONVERSATIONS.items()}
    texts = ["hello world", "a red square"]
    answers = [generate(engine, text) for text in texts]
    together, same_answers = vectors_beside_answers(engine, list(CONVERSATIONS.values()), 24)
    assert same_answers == answers
    for one, vector in zip(together, alone.values(), strict=True):
        np.testing.assert_allclose(one, vector, atol=TOLERANCE * np.abs(vector).max(), rtol=0)


def test_vectors_of_prompts_with_a_cached_prefix(engine: NativeEngine) -> None:
    first, second = ((system(), user(TextPart(LONG + end))) for end in ("a cat", "a dog"))
    embed(engine, first)
    events = submit(engine, second, PoolingParams())
    run(engine)
    usage = events.chunks[0].usage
    assert usage is not None
    assert usage.cached_tokens >= engine.options.block_size
    assert usage.completion_tokens == 0
    repeated = embed(engine, second)
    np.testing.assert_allclose(repeated, events.vector, atol=TOLERANCE, rtol=0)
    assert float(events.vector @ embed(engine, first)) < 1 - TOLERANCE  # the end counts


def test_dimensions_are_the_first_components_normalized(engine: NativeEngine) -> None:
    whole = embed(engine, CONVERSATIONS["text"])
    some = embed(engine, CONVERSATIONS["text"], dimensions=8)
    assert some.shape == (8,)
    np.testing.assert_allclose(some, whole[:8] / np.linalg.norm(whole[:8]), atol=TOLERANCE)


@pytest.mark.parametrize("dimensions", [0, -1, 65])
def test_dimensions_that_the_model_does_not_have(engine: NativeEngine, dimensions: int) -> None:
    with pytest.raises(InvalidRequest, match="64") as caught:
        engine.prepare_pooled(CONVERSATIONS["text"], PoolingParams(dimensions=dimensions))
    assert caught.value.param == "dimensions"


def test_token_ids_are_taken_as_they_are(engine: NativeEngine) -> None:
    prompt = engine.prompts.build(CONVERSATIONS["text"])
    events = submit(engine, prompt.token_ids, PoolingParams())
    run(engine)
    np.testing.assert_allclose(events.vector, embed(engine, CONVERSATIONS["text"]), atol=TOLERANCE)
    for wrong in ((), (engine.checkpoint.config.text.vocab_size + 5,)):
        with pytest.raises(InvalidRequest):
            engine.prepare_pooled(wrong, PoolingParams())


@pytest.mark.parametrize("name", ["text", "picture", "two pictures"])
@pytest.mark.parametrize("spec", ["tied", "untied_sharded"])
def test_scores_equal_the_reference(
    tiny: Callable[[str], Path], scored: Callable[[str], Path], spec: str, name: str
) -> None:
    engine, reference = engine_of(scored(spec)), tiny_reference(tiny(spec))
    with torch.inference_mode():
        logits = reference.lm_head(reference_state(engine, reference, CONVERSATIONS[name]))
    events = submit(engine, CONVERSATIONS[name], PoolingParams("score"))
    beside = submit(engine, CONVERSATIONS["long text"], PoolingParams("score"))
    run(engine)
    wanted = torch.sigmoid(logits[YES] - logits[NO]).item()
    assert events.vector.shape == (1,)
    assert float(events.vector[0]) == pytest.approx(wanted, abs=TOLERANCE * logits.abs().max().item() / 2)
    assert 0 <= float(beside.vector[0]) <= 1
    with pytest.raises(InvalidRequest) as caught:  # it is a reranker
        engine.prepare_pooled(CONVERSATIONS[name], PoolingParams())
    assert caught.value.param == "model"


def test_no_more_rows_get_logits_than_the_plan_has_room_for(scored: Callable[[str], Path]) -> None:
    engine = engine_of(scored("tied"), max_num_seqs=3)
    head, rows = engine.runner.text.head, []

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return head(hidden)

    engine.runner.text.head = noted  # type: ignore[assignment]
    for _ in range(6):
        submit(engine, CONVERSATIONS["text"], PoolingParams("score"))
        start_generating(engine, "hello", 4)
    while engine.busy:
        rows.clear()
        engine.step()
        assert sum(rows) <= 3


def test_a_pooled_request_that_is_preempted(tiny: Callable[[str], Path]) -> None:
    engine = engine_of(tiny("tied"), kv_tokens=CONTEXT, max_num_seqs=4, prefix_cache=False)
    alone = embed(engine, CONVERSATIONS["long text"])
    old = start_generating(engine, LONG, 200)
    events = [submit(engine, CONVERSATIONS["long text"], PoolingParams()) for _ in range(5)]
    run(engine)
    assert len(old.generated) == 200
    for each in events:
        np.testing.assert_allclose(each.vector, alone, atol=TOLERANCE)


@pytest.fixture
def broken(tiny: Callable[[str], Path]) -> NativeEngine:
    engine = engine_of(tiny("tied"))
    engine.runner.text.norm = torch.full_like(engine.runner.text.norm, float("nan"))
    return engine


def test_a_vector_that_is_not_finite_fails(broken: NativeEngine) -> None:
    events = submit(broken, CONVERSATIONS["text"], PoolingParams())
    run(broken)
    assert not events.chunks
    assert isinstance(events.errors[0], ModelFailed)


def test_a_cancelled_request_has_no_vector(engine: NativeEngine) -> None:
    events = Collected()
    prepared = engine.prepare_pooled(CONVERSATIONS["text"], PoolingParams())
    request = engine.make_request(prepared, SamplingParams(), events)
    engine.submit(request)
    engine.cancel(request)
    run(engine)
    assert [(chunk.finish_reason, chunk.pooled) for chunk in events.chunks] == [("cancelled", None)]


def test_what_exceeds_the_context_is_refused_or_cut(engine: NativeEngine) -> None:
    text = "a lazy dog " * 1000
    conversation = (system(), user(picture(64, 64, 3), TextPart(text)))
    with pytest.raises(DoesNotFit):
        engine.prepare_pooled(conversation, PoolingParams())
    with pytest.raises(DoesNotFit) as refused:  # only once its tokens are counted
        engine.prepare_pooled((system(), user(TextPart("a lazy dog " * 800))), PoolingParams())
    assert CONTEXT - 1 in figures_in(refused.value.message)
    assert "answer" not in refused.value.message, "there is none"
    prepared = engine.prepare_pooled(conversation, PoolingParams(truncate=True))
    assert CONTEXT - 8 <= prepared.prompt_tokens < CONTEXT
    assert prepared.image_tokens > 0
    # Only text at the end is cut: pictures never are.
    pictures_only = (system(), user(*(picture(256, 256, seed) for seed in range(12))))
    with pytest.raises(DoesNotFit):
        engine.prepare_pooled(pictures_only, PoolingParams(truncate=True))


def test_a_cut_text_is_that_of_its_beginning(engine: NativeEngine) -> None:
    long, other = ((system(), user(TextPart("a lazy dog " * 500 + end))) for end in ("one", "two"))
    first, second = (embed(engine, each, truncate=True) for each in (long, other))
    np.testing.assert_allclose(first, second, atol=TOLERANCE)

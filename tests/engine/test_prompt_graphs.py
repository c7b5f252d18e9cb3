"""Graphs of short prompts: inputs and answers are those of an ordinary pass.

Capture needs a GPU; on a CPU the captured functions are run.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.test_cuda_graphs import CACHE, capture_nothing, decoding
from tests.engine.test_parity import CONVERSATIONS, picture, run
from tests.engine.test_speculative_states import SPEC
from tests.kernels.conftest import ON_GPU, device
from tests.tiny_qwen3_5 import QWEN3_5, HybridSpec, build_qwen3_5
from vlfit.api.conversation import Message, TextPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.model_runner import AttentionMetadataBuilder
from vlfit.engine.execution.prompt_graphs import PictureRows, PromptGraphs, PromptInputs
from vlfit.engine.scheduling.sequence import ScheduledChunk
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.layers.kv_cache import KVCache, slots_of_blocks
from vlfit.loading.pinned import GraphPool
from vlfit.models.interface import VisionFeatures
from vlfit.plan.native.cost import PROMPT_GRAPH_ROWS, prompt_graph_rows
from vlfit.plan.native.tiles import DequantConfig

__all__ = ["device"]  # a fixture
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("longest", "sizes"),
    [(1, (16,)), (16, (16,)), (17, (16, 32)), (64, (16, 32, 64))],
)
def test_sizes_hold_the_longest_pass(longest: int, sizes: tuple[int, ...]) -> None:
    assert prompt_graph_rows(longest) == sizes
    assert prompt_graph_rows(10**6) == PROMPT_GRAPH_ROWS


def chunk_of(blocks: list[int], cached: int, tokens: int, slot: int = 3) -> ScheduledChunk:
    """``tokens`` of a prompt, of which ``cached`` are in the cache."""
    sequence = decoding(blocks, cached + tokens)
    sequence.generated.clear()
    sequence.num_cached_tokens = cached
    sequence.slot_mapping = slots_of_blocks(blocks, CACHE.block_size)
    sequence.state_slot = slot
    return ScheduledChunk(sequence, tokens)


def fill(inputs: PromptInputs, chunk: ScheduledChunk) -> tuple[Any, Any]:
    """Fill ``inputs`` with tokens and positions that are all different, and return both."""
    end = chunk.begin + chunk.num_tokens
    token_ids = np.arange(chunk.begin, end) + 50
    positions = np.arange(chunk.begin, end) + np.array([[0], [100], [200]])
    inputs.fill(chunk, token_ids, positions)
    return token_ids, positions


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("spec", [None, SPEC], ids=["attention", "states"])
def test_inputs_are_those_of_an_ordinary_pass(monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    monkeypatch.setattr("vlfit.kernels.enabled_for", lambda group, device: True)
    cache = CACHE if spec is None else KVCache(spec, 12, 4, torch.float32, CPU, sequences=5)
    inputs = PromptInputs(16, 6, cache)
    builder = AttentionMetadataBuilder(4, CPU, has_states=bool(cache.states))
    for chunk in (
        chunk_of([3, 7, 1, 9], 0, 13),
        chunk_of([5, 0, 2], 5, 6),  # fewer rows: what the last chunk had more is gone
        chunk_of([8], 3, 1),
    ):
        token_ids, positions = fill(inputs, chunk)
        count = chunk.num_tokens
        expected = builder.build([chunk])
        assert isinstance(expected, BlockAttentionMetadata)
        assert inputs.token_ids[:count].tolist() == token_ids.tolist()
        assert inputs.positions[:, :count].tolist() == positions.tolist()
        assert inputs.last_row.tolist() == [count - 1]
        found = inputs.metadata
        assert found.slot_mapping[:count].tolist() == expected.slot_mapping.tolist()
        assert set(found.slot_mapping[count:].tolist()) <= {-1}
        assert found.query_spans.tolist() == expected.query_spans.tolist()
        blocks = expected.block_tables.shape[1]
        assert found.block_tables[:, :blocks].tolist() == expected.block_tables.tolist()
        assert (found.num_decodes, found.max_query_len) == (0, 16)
        if spec is not None:
            assert found.states is not None
            assert expected.states is not None
            assert found.states.table.tolist() == expected.states.table.tolist()
            assert found.states.max_chunk_len == 16
    inputs.clear()
    assert set(inputs.metadata.slot_mapping.tolist()) == {-1}
    assert inputs.metadata.query_spans.tolist() == [[0, 0, 0]]
    if inputs.metadata.states is not None:
        assert inputs.metadata.states.table[0, 1:3].tolist() == [0, -1]


def test_each_chunk_takes_the_smallest_graph_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_nothing(monkeypatch)
    passes: list[int] = []

    def run_pass(
        token_ids: Tensor, positions: Tensor, visual: Any, metadata: BlockAttentionMetadata, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        passes.append(len(token_ids))
        hidden = token_ids[:, None].float()
        return hidden, hidden[last] + 1

    cache = SimpleNamespace(addresses=(1,), block_size=4, device=CPU, states={})
    graphs = PromptGraphs(run_pass, cache, GraphPool(CPU), 40, (16, 32))  # type: ignore[arg-type]
    graphs.capture()
    assert passes == [32, 32, 16, 16]  # once to load kernels, once captured
    del passes[:]

    def ask(tokens: int) -> float:
        chunk = chunk_of([3, 7, 1, 9, 4, 5, 6, 2], 0, tokens)
        assert graphs.takes(tokens, 0)
        output = graphs.run(chunk, np.arange(tokens) + 7, np.zeros((3, tokens), np.int64))
        assert output.hidden[:tokens, 0].tolist() == list(range(7, 7 + tokens))
        return output.logits.item() - 1

    assert [ask(tokens) for tokens in (1, 16, 17, 32)] == [7, 22, 23, 38]
    assert passes == [16, 16, 32, 32]
    del passes[:]
    cache.addresses = (2,)  # the cache moved: what is needed is captured again
    assert ask(20) == 26
    assert passes == [32, 32, 32]
    graphs.release()
    assert ask(3) == 9
    assert passes == [32, 32, 32, 16, 16, 16]


def test_long_prompts_are_captured_as_they_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pictures or without; the least recently used of many makes room; where memory is short none is."""
    capture_nothing(monkeypatch)
    monkeypatch.setattr("vlfit.engine.execution.prompt_graphs.MOST_LONG_GRAPHS", 3)
    passes: list[tuple[int, bool]] = []

    def run_pass(
        token_ids: Tensor, positions: Tensor, visual: Any, metadata: BlockAttentionMetadata, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        passes.append((len(token_ids), visual is not None))
        hidden = token_ids[:, None].float().repeat(1, 2)
        if visual is not None:
            hidden[visual.index] = visual.rows
            hidden[visual.index] += visual.deepstack[0]
        return hidden, hidden[last]

    cache = SimpleNamespace(addresses=(1,), block_size=4, device=CPU, states={})
    pictures = PictureRows(256, 2, 1, torch.float32, CPU)
    graphs = PromptGraphs(
        run_pass,
        cache,  # type: ignore[arg-type]
        GraphPool(CPU),
        300,
        (16, 32),
        256,
        pictures,
    )
    graphs.capture()
    assert passes == [(256, True)] * 2 + [(32, False)] * 2 + [(16, False)] * 2
    del passes[:]

    def ask(tokens: int, places: list[int]) -> list[float]:
        chunk = chunk_of(list(range(75)), 0, tokens)
        rows = torch.arange(2.0 * len(places)).view(-1, 2)
        features = [VisionFeatures(part, (part * 100,)) for part in rows.split(2)]
        ids, positions = np.full(tokens, 7), np.zeros((3, tokens), np.int64)
        where = np.array(places, np.int64) if places else None
        output = graphs.run(chunk, ids, positions, where, features)
        assert output.logits.tolist() == [[7, 7]]
        assert (output.visual is not None) == bool(places)
        return output.hidden[:tokens, 1].tolist()

    assert not graphs.takes(101, 3)
    assert graphs.takes(101, 3)
    assert ask(101, [3, 4, 5]) == [7.0] * 3 + [101.0, 303.0, 505.0] + [7.0] * 95
    assert ask(101, [0, 1, 99]) == [101.0, 303.0] + [7.0] * 97 + [505.0, 7.0]
    assert passes == [(101, True)] * 4
    del passes[:]
    assert not graphs.takes(101, 4), "another graph"
    assert not graphs.takes(101, 0)
    assert not graphs.takes(33, 0)
    assert graphs.takes(33, 0)
    assert ask(33, []) == [7.0] * 33
    assert graphs.takes(101, 0)
    assert ask(101, []) == [7.0] * 101
    assert passes == [(33, False)] * 3 + [(101, False)] * 3
    assert not graphs.takes(20, 5), "so few rows with pictures are a long prompt"
    assert not graphs.takes(257, 5)
    assert not graphs.takes(257, 0)
    del passes[:]
    assert not graphs.takes(256, 255), "three others were used, so its graph had to go"
    assert graphs.takes(101, 0)
    assert ask(101, []) == [7.0] * 101
    assert graphs.takes(256, 255)
    assert passes == [(101, False)] + [(256, True)] * 2
    assert not graphs.takes(101, 3), "the least recently used"
    assert graphs.kept_bytes > pictures.nbytes > 0
    graphs.release()
    assert graphs.kept_bytes == pictures.nbytes == 0
    assert not graphs.takes(150, 0)
    assert graphs.takes(101, 0), "it came before"
    assert ask(101, []) == [7.0] * 101

    def no_memory(run: Callable[[], Any]) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(GraphPool, "capture", lambda pool, run: no_memory(run))
    assert not graphs.takes(150, 0)
    assert not graphs.takes(150, 0)
    monkeypatch.undo()
    assert not graphs.takes(150, 0)
    assert not graphs.takes(101, 0), "nor any other"
    assert graphs.takes(20, 0)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the chunks that graphs ran."""
    counts: list[int] = []
    run_graph = PromptGraphs.run

    def watched(graphs: PromptGraphs, chunk: ScheduledChunk, *rest: Any) -> Any:
        counts.append(chunk.num_tokens)
        return run_graph(graphs, chunk, *rest)

    monkeypatch.setattr(PromptGraphs, "run", watched)
    return counts


def assert_whole_chunks(
    counts: list[int], chunk: int, engine: NativeEngine, conversation: Any, *, reused: bool
) -> None:
    """Graphs ran all of a prompt, but for a prefix that may be ``reused``, in whole chunks up to the last."""
    prompt = engine.prompts.build(conversation, max_image_tokens=None, context=engine.context)
    total, ran = len(prompt.token_ids), sum(counts)
    assert ran == total or (reused and 0 < ran < total)
    assert counts == [min(chunk, ran - begin) for begin in range(0, ran, chunk)]


def chat(*words: str) -> tuple[Message, ...]:
    roles = ("user", "assistant")
    return tuple(
        Message(roles[number % 2], (TextPart(each),))  # type: ignore[arg-type]
        for number, each in enumerate(words)
    )


TALK = (
    single_turn("hello"),
    chat("hello", "hello yourself", "what now?"),  # continues the first one
    single_turn("the quick brown fox jumps over the lazy dog " * 3),  # in chunks
)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu.py runs it on the GPU")
@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # in rows without a token
@pytest.mark.parametrize("kind", ["attention", "states"])
def test_answers_are_those_without_graphs(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Interpreted kernels: alone, behind a reused prefix, cut in chunks, and with a draft model."""
    pytest.importorskip("triton")
    folder = tiny("odd_vocab_one_kv_head") if kind == "attention" else build_short(monkeypatch, tmp_path)
    limits = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 32, "cuda_graphs": False}

    def build() -> NativeEngine:
        return NativeEngine(open_checkpoint(folder), EngineOptions(device="cpu", **limits))  # type: ignore[arg-type]

    plain = build()
    expected = [run(plain, each, tokens=3) for each in TALK]
    replays = capture_nothing(monkeypatch)
    counts = watch(monkeypatch)
    engine = build()
    engine.runner.capture_graphs(engine.context, 2, 32, 8)
    for conversation, answers in zip(TALK, expected, strict=True):
        del counts[:], replays[:]
        assert run(engine, conversation, tokens=3) == answers
        assert_whole_chunks(counts, 32, engine, conversation, reused=conversation is TALK[1])
        assert replays
    del counts[:]
    assert run(engine, TALK[0], TALK[2], tokens=3) == run(plain, TALK[0], TALK[2], tokens=3)


def build_short(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A checkpoint with a layer of each kind and a draft model."""
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    monkeypatch.setitem(QWEN3_5, "short", HybridSpec("0.8B", layers=2, mtp=True, more=kinds))
    return build_qwen3_5("short", folder)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="tests/engine/test_gpu.py runs it on the GPU")
@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # in rows without a token
@pytest.mark.parametrize("longest", [0, 192], ids=["few rows", "long prompts"])
def test_pictures_are_part_of_graphs_of_long_prompts_alone(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    """A question about a picture that is cached is in any; layers that somebody wraps are run as they are."""
    pytest.importorskip("triton")
    folder = tiny("odd_vocab_one_kv_head")
    options = EngineOptions(device="cpu", max_model_len=256, max_num_seqs=1, cuda_graphs=False)
    plain = NativeEngine(open_checkpoint(folder), options)
    first, second = CONVERSATIONS["picture"], replaced_question(CONVERSATIONS["picture"], "and the colours?")
    expected = [run(plain, each, tokens=2) for each in (first, second)]
    capture_nothing(monkeypatch)
    counts = watch(monkeypatch)
    monkeypatch.setattr("vlfit.plan.native.cost.PROMPT_GRAPH_ROWS", (64,))
    monkeypatch.setattr("vlfit.plan.native.cost.LONG_PROMPT_ROWS", longest)
    engine = NativeEngine(open_checkpoint(folder), options)
    configs = {CPU: DequantConfig(captures_prompts=longest > 0)}
    monkeypatch.setattr("vlfit.kernels.gemm.quantized._DEQUANT_CONFIGS", configs)
    engine.runner.capture_graphs(engine.context, 1, 512)
    engine.runner.encoder_graph = None
    assert run(engine, first, tokens=2) == expected[0]
    assert not counts
    assert run(engine, second, tokens=2) == expected[1]
    assert len(counts) == 1
    for seed in (8, 9) if longest else ():  # as long as the first one: the second time it is captured
        another = single_turn("what is in this image?", picture(90, 70, seed))
        assert run(engine, another, tokens=2) == run(plain, another, tokens=2)
        assert len(counts) == seed - 6, "the first one counts"
    del counts[1:]
    layers = engine.runner.text.layers
    engine.runner.text.layers = list(layers)
    assert run(engine, TALK[0], tokens=2) == run(plain, TALK[0], tokens=2)
    assert len(counts) == 1


def replaced_question(conversation: Any, text: str) -> tuple[Message, ...]:
    [message] = conversation
    parts = tuple(TextPart(text) if isinstance(part, TextPart) else part for part in message.parts)
    return (replace(message, parts=parts),)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["attention", "states"])
def test_on_a_gpu_answers_are_those_of_the_cpu(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Alone, behind a reused prefix, in chunks, and after graphs were released."""
    folder = tiny("tied") if kind == "attention" else build_short(monkeypatch, tmp_path)
    limits: Any = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 64}
    plain, engine = (
        NativeEngine(open_checkpoint(folder), EngineOptions(device=name, **limits))
        for name in ("cpu", "cuda")
    )
    counts = watch(monkeypatch)
    for round_number in range(2):
        for conversation in TALK:
            del counts[:]
            assert run(engine, conversation) == run(plain, conversation)
            reused = round_number > 0 or conversation is TALK[1]
            assert_whole_chunks(counts, 64, engine, conversation, reused=reused)
        if not round_number:
            assert engine.runner.graph_bytes > 0
            engine.runner.release_graphs()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["attention", "states"])
def test_on_a_gpu_pictures_are_captured_as_they_repeat(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tiny("tied") if kind == "attention" else build_short(monkeypatch, tmp_path)
    monkeypatch.setattr("vlfit.plan.native.tiles.ROOMY", 0)
    options = EngineOptions(device="cuda", dtype="bfloat16", max_model_len=1024, prefix_cache=False)
    engine = NativeEngine(open_checkpoint(folder), options)
    graphs, counts = engine.runner.prompt_graphs, watch(monkeypatch)
    for seed in range(4):
        asked = single_turn("what is in this image? " * 20, picture(90, 70, seed))
        engine.runner.prompt_graphs = None
        expected = run(engine, asked)
        engine.runner.prompt_graphs = graphs
        assert run(engine, asked) == expected
        assert len(counts) == seed

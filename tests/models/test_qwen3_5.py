"""Qwen3.5 against transformers in float32 on the CPU, on tiny checkpoints of each size's pattern.

Tokens depend on nothing but the conversation: not on chunks, company, preemption, or failures of others.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import pictures
from tests.engine.test_parity import CONVERSATIONS as WITH_PICTURES
from tests.engine.test_parity import GREEDY, TIE, TOLERANCE, reference_inputs, relative, run
from tests.tiny_qwen3_5 import QWEN3_5, qwen3_5_reference
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, single_turn
from vlfit.api.engine_options import EngineOptions
from vlfit.api.sampling_params import SamplingParams
from vlfit.checkpoint.conversions import with_weights_format
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.source import open_checkpoint
from vlfit.checkpoint.tensors import expected_tensor_shapes
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling import scheduler
from vlfit.engine.scheduling.sequence import ScheduledChunk, Sequence
from vlfit.errors import CheckpointError, MissingTensor, UnknownArchitecture
from vlfit.models.cache_spec import MAX_PENDING_TOKENS, Paged, State, state_bytes_per_sequence
from vlfit.models.registry import cache_spec_of, parse_config
from vlfit.plan.native.cost import MAX_DRAFT_ROWS
from vlfit.quantize.conversion import convert

LONG = "Describe the quick brown fox, how it jumps, and what the lazy dog says. "


def ten_turns() -> Conversation:
    messages = []
    for turn in range(10):
        picture = [ImagePart(pictures.picture(64, 64, seed=40 + turn))] if turn in (2, 7) else []
        messages.append(Message("user", (*picture, TextPart(f"question {turn} of the fox"))))
        messages.append(Message("assistant", (TextPart(f"a red square and {turn} cats"),)))
    return tuple(messages[:-1])


CONVERSATIONS = WITH_PICTURES | {"long text": single_turn(LONG * 4), "ten turns": ten_turns()}
TEXTS = ("text", "long text")


@dataclass(frozen=True)
class Expected:
    """What transformers answers: tokens, and the logits of the first."""

    tokens: list[int]
    first: torch.Tensor


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the reference's answers to conversations by name."""

    folder: Path
    answers: dict[str, Expected]

    def engine(self, **options: Any) -> NativeEngine:
        settings: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 128, **options}
        return NativeEngine(open_checkpoint(self.folder), EngineOptions(device="cpu", **settings))


def answers_of(folder: Path, names: tuple[str, ...]) -> Case:
    reference = qwen3_5_reference(folder)
    case = Case(folder, {})
    engine = case.engine()
    for name in names:
        prompt = engine.prompts.build(CONVERSATIONS[name], max_image_tokens=None, context=engine.context)
        inputs = {"input_ids": torch.tensor([prompt.token_ids])}
        if engine.checkpoint.config.vision is not None:
            inputs = reference_inputs(engine, prompt)
        with torch.inference_mode():
            output = reference.generate(**inputs, generation_config=GREEDY)
        scores = torch.stack(output.scores)[:, 0]
        best, second = scores.topk(2).values.unbind(-1)
        assert (best - second).min() > TIE, "the reference itself hangs on the last bit: take another seed"
        tokens = output.sequences[0, len(prompt.token_ids) :].tolist()
        assert len(set(tokens)) > 5, "the reference says the same few tokens over and over: a weak test"
        case.answers[name] = Expected(tokens, scores[0])
    return case


@pytest.fixture(scope="module")
def cases(tiny_qwen3_5: Callable[[str], Path]) -> Callable[[str], Case]:
    """A checkpoint with the reference's answers, by name."""

    @cache
    def build(name: str) -> Case:
        return answers_of(tiny_qwen3_5(name), tuple(CONVERSATIONS) if QWEN3_5[name].vision else TEXTS)

    return build


@pytest.fixture(params=QWEN3_5)
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


@pytest.fixture
def large(cases: Callable[[str], Case]) -> Case:
    return cases("large")


def test_greedy_tokens_and_logits_equal_the_reference(case: Case) -> None:
    engine = case.engine()
    first: list[torch.Tensor] = []
    forward = engine.runner.run

    def recorded(batch: list[ScheduledChunk]) -> StepOutput:
        output = forward(batch)
        if batch[0].needs_sampling and not batch[0].sequence.generated:
            first.append(output.logits[0].clone())
        return output

    engine.runner.run = recorded  # type: ignore[method-assign]
    for name, expected in case.answers.items():
        assert run(engine, CONVERSATIONS[name]) == [expected.tokens], name
        assert relative(first[-1], expected.first) < TOLERANCE, name


@pytest.mark.parametrize("chunk", [1, 7, 64, 65])
def test_tokens_do_not_depend_on_chunks(large: Case, chunk: int) -> None:
    engine = large.engine(max_num_batched_tokens=chunk, max_num_seqs=1)
    names = list(large.answers) if chunk == 7 else ["long text", "three pictures between text"]
    for name in names:
        expected = large.answers[name].tokens[:12]
        assert run(engine, CONVERSATIONS[name], tokens=12) == [expected], name


def test_tokens_do_not_depend_on_company(large: Case) -> None:
    engine = large.engine(max_num_seqs=8, max_num_batched_tokens=48)
    names = [*large.answers, "text"]
    assert len(names) == 8
    found = run(engine, *(CONVERSATIONS[name] for name in names))
    assert found == [large.answers[name].tokens for name in names]


def test_slots_are_given_back(large: Case) -> None:
    engine = large.engine(max_num_seqs=2, max_num_batched_tokens=48)
    names = [*large.answers, "text"]
    found = run(engine, *(CONVERSATIONS[name] for name in names), tokens=8)
    assert found == [large.answers[name].tokens[:8] for name in names]


def test_preempted_sequences_start_again(large: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "LOOKAHEAD_TOKENS", 4)  # else whole answers have blocks
    names = ["system and turns", "three pictures between text", "picture"]
    engine = large.engine(
        max_model_len=200, max_num_seqs=3, kv_tokens=200, block_size=4, max_num_batched_tokens=48
    )
    found = run(engine, *(CONVERSATIONS[name] for name in names))
    assert engine.scheduler.num_preemptions > 0
    assert found == [large.answers[name].tokens for name in names]


def test_a_failure_of_one_request_changes_no_other(large: Case) -> None:
    """States that a failed pass has changed are computed again."""
    engine = large.engine(max_num_seqs=3, max_num_batched_tokens=16)
    names = ["picture", "long text"]
    forward = type(engine.runner.text)._forward
    passes = 0

    def failing(self: Any, token_ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        logits = forward(self, token_ids, *arguments)  # the states are written
        if passes in (3, 9, 20) and len(arguments[3].states.table) > 1:
            raise RuntimeError("a kernel failed")
        return logits

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(engine.runner.text), "_forward", failing)
        found = run(engine, *(CONVERSATIONS[name] for name in names))
    assert engine.counters.retried_steps > 0
    assert found == [large.answers[name].tokens for name in names]


def test_sleep_and_resize_keep_answers(large: Case) -> None:
    engine = large.engine(max_num_seqs=2)
    expected = [large.answers["picture"].tokens]
    assert run(engine, CONVERSATIONS["picture"]) == expected
    whole = engine.runner.cache.nbytes
    engine.sleep("files")
    assert engine.runner.cache.nbytes == 0
    engine.wake()
    assert engine.runner.cache.nbytes == whole
    assert run(engine, CONVERSATIONS["picture"]) == expected
    sequence = start(engine, CONVERSATIONS["picture"])
    for _ in range(6):
        engine.step()
    blocks = engine.block_manager.num_blocks - 2
    engine.runner.cache.resize(blocks, engine.scheduler.resize(blocks), lambda: None)
    while engine.busy:
        engine.step()
    assert [sequence.generated] == expected


def start(engine: NativeEngine, conversation: Conversation) -> Sequence:
    prompt = engine.prompts.build(conversation, max_image_tokens=None, context=engine.context)
    sampling = SamplingParams(max_tokens=48, ignore_eos=True)
    sequence = engine.make_sequence(engine.prepare_prompt(prompt), sampling, lambda event: None)
    engine.submit(sequence)
    return sequence


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_memory_is_what_the_cache_spec_says(large: Case, kv_dtype: str) -> None:
    engine = large.engine(max_num_seqs=3, kv_dtype=kv_dtype)
    spec = cache_spec_of(engine.checkpoint.config)
    assert [isinstance(layer, State) for layer in spec] == [True, True, True, False] * 2
    paged = engine.block_manager.num_blocks * engine.runner.cache.block_bytes
    assert engine.runner.cache.nbytes == paged + 3 * state_bytes_per_sequence(spec)
    assert engine.account().settings.speculate
    assert len(run(engine, CONVERSATIONS["text"], tokens=4)[0]) == 4


def test_thinking_can_be_turned_off(large: Case) -> None:
    engine = large.engine()
    endings = {}
    for variables in (None, '{"enable_thinking": true}', '{"enable_thinking": false}'):
        params = SamplingParams(max_tokens=4, template_variables=variables)
        prepared = engine.prepare(single_turn("hello"), params)
        ids = prepared.prompt.token_ids.tolist()
        endings[variables] = engine.prompts.tokenizer.decode(ids, skip_special_tokens=False)
    assert endings[None] == endings['{"enable_thinking": true}']
    assert endings[None].endswith("assistant\n<think>\n")
    assert endings['{"enable_thinking": false}'].endswith("assistant\n<think>\n\n</think>\n\n")


def test_sizes_of_the_real_models() -> None:
    """Against ``research``: KV bytes of a token in 16 bits and the recurrent state of a sequence."""
    for value_heads, layers, kv_heads, kib, mib in ((16, 24, 2, 12, 18), (32, 32, 4, 32, 48)):
        text = {
            "num_hidden_layers": layers,
            "num_key_value_heads": kv_heads,
            "linear_num_value_heads": value_heads,
            "rope_parameters": {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        }
        config = parse_config(Fields({"model_type": "qwen3_5_text", **text}, "config.json"))
        spec = cache_spec_of(config)
        assert sum(layer.bytes_per_token(2) for layer in spec if isinstance(layer, Paged)) == kib * 1024
        recurrent = [
            each.nbytes
            for layer in spec
            if isinstance(layer, State)
            for each in layer.tensors
            if each.name == "recurrent"
        ]
        assert sum(recurrent) == mib * 2**20
    assert MAX_PENDING_TOKENS >= MAX_DRAFT_ROWS


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("layer_types", ["full_attention"], CheckpointError),
        ("layer_types", ["sliding_attention"] * 4, UnknownArchitecture),
        ("layer_types", ["linear_attention"] * 4, CheckpointError),
        ("linear_num_value_heads", 3, CheckpointError),
        ("linear_conv_kernel_dim", 1, CheckpointError),
        ("attn_output_gate", False, UnknownArchitecture),
        ("mtp_use_dedicated_embeddings", True, UnknownArchitecture),
        ("partial_rotary_factor", 2.0, CheckpointError),
        ("hidden_act", "gelu", UnknownArchitecture),
    ],
)
def test_fields_that_vlfit_does_not_run_are_refused(
    large: Case, field: str, value: object, error: type[Exception]
) -> None:
    values = json.loads((large.folder / "config.json").read_text(encoding="utf-8"))
    text = values["text_config"] | {"num_hidden_layers": 4, "layer_types": None, field: value}
    if field == "partial_rotary_factor":
        text["rope_parameters"] = text["rope_parameters"] | {field: value}
    with pytest.raises(error):
        parse_config(Fields(values | {"text_config": text}, "config.json"))


def test_a_checkpoint_may_lack_multi_token_prediction(large: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    def copy(without: Callable[[str], bool]) -> Path:
        for file in large.folder.iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        kept = {
            name: tensor
            for name, tensor in load_file(large.folder / "model.safetensors").items()
            if not without(name)
        }
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    case = replace(large, folder=copy(lambda name: name.startswith("mtp.")))
    assert run(case.engine(), CONVERSATIONS["text"]) == [large.answers["text"].tokens]
    with pytest.raises(MissingTensor):
        open_checkpoint(copy(lambda name: name == "mtp.fc.weight"))


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_converted_copies_keep_what_decides_the_state(large: Case, tmp_path: Path, weights: str) -> None:
    checkpoint = open_checkpoint(large.folder)
    convert(checkpoint, weights, tmp_path / "new")
    made = open_checkpoint(tmp_path / "new")
    planned = expected_tensor_shapes(with_weights_format(checkpoint.config, weights))
    plain = {name for name, info in made.tensors.items() if info.dtype == "F32"}
    for name in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias", "conv1d.weight", "norm.weight"):
        assert f"model.language_model.layers.0.linear_attn.{name}" in plain
    quantized = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    assert quantized not in plain
    missing = {name for name in planned if name not in made.tensors}
    assert not {name for name in missing if "in_proj" in name}
    assert len(run(replace(large, folder=tmp_path / "new").engine(), CONVERSATIONS["picture"])[0]) == 48

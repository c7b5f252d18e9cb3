"""The float32 reference beside transformers: every stage, for every tiny checkpoint and format."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.awq_gptq import gptq_section, gptq_tensors, rounded
from tests.compressed import compress
from tests.engine.test_parity import CONVERSATIONS
from tests.gguf_files import as_gguf
from tests.loading.test_awq_gptq import FORMS
from tests.loading.test_compressed import CASES
from tests.parity.transformers_reference import TransformersReference
from tests.reference_processor import reference_ids, reference_processor
from tests.tiny import TINY
from tests.tiny_decoders import DECODERS, build_decoder, decoder_reference
from tests.tiny_qwen3_5 import QWEN3_5, build_qwen3_5, qwen3_5_reference
from vlfit.api.conversation import single_turn
from vlfit.checkpoint.source import open_checkpoint, read_checkpoint
from vlfit.parity.reference.reference_run import FloatReference, Trace
from vlfit.parity.reference.stored_tensors import SafetensorsSource

# Both compute in float32, but in another order: relative to the size of the numbers, after a few layers.
RELATIVE = 2e-4
FORCED = (5, 17, 300, 9)
PICTURES = ["picture", "three pictures between text", "system and turns"]
Folder = Callable[[str], Path]


def agree(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    size = theirs.float().square().mean().sqrt().clamp_min(1e-12)
    assert float((ours.float() - theirs.float()).abs().max() / size) < RELATIVE


def reference_of(folder: Path) -> FloatReference:
    return FloatReference(read_checkpoint(folder.name, folder))


def logits(trace: Trace, forced: Sequence[int] = FORCED) -> Tensor:
    """[forced + 1, vocabulary]: of the prompt's last token, and of the forced ones."""
    return torch.stack([trace["logits"], *(trace[f"forced.{step}"] for step in range(len(forced)))])


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("kind", ["text", *PICTURES])
def test_a_whole_pass_is_transformers(name: str, kind: str, tiny: Folder) -> None:
    folder, conversation = tiny(name), CONVERSATIONS[kind]
    ours = reference_of(folder).trace(conversation, FORCED)
    theirs = TransformersReference(folder).trace(conversation, FORCED)
    assert ours["tokens"].tolist() == theirs["tokens"].tolist()
    assert ours["positions"].tolist() == theirs["positions"].tolist()
    agree(logits(ours), logits(theirs))
    if "patches" in theirs:
        names = sorted(each for each in ours if each.startswith("patches"))
        agree(torch.cat([ours[each] for each in names]), theirs["patches"])


def test_a_clip_is_transformers(tiny: Folder) -> None:
    """Times and places by its processor, positions and logits by its model."""
    folder, conversation = tiny("tied"), CONVERSATIONS["frames as a clip"]
    ours = reference_of(folder).trace(conversation, FORCED)
    theirs = TransformersReference(folder).trace(conversation, FORCED)
    assert ours["tokens"].tolist() == reference_ids(reference_processor(folder), conversation)
    assert ours["positions"].tolist() == theirs["positions"].tolist()
    assert len(ours["pixels"]) == 6  # five frames, and the last once more
    agree(logits(ours), logits(theirs))


def test_runs_side_by_side_are_those_alone(tiny: Folder) -> None:
    ours, talk = reference_of(tiny("fp8")), CONVERSATIONS["picture"]
    exact, changed = ours.traces(talk, FORCED, (0.0, 0.01))
    for trace, perturb in ((exact, 0.0), (changed, 0.01)):
        alone = ours.trace(talk, FORCED, perturb=perturb)
        assert trace.keys() == alone.keys()
        assert all(torch.equal(value, alone[name]) for name, value in trace.items())
    assert not torch.equal(exact["logits"], changed["logits"])


@pytest.mark.parametrize("name", ["fp8", "tied"])
def test_threads_compute_what_one_does(name: str, tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlfit.parity.reference.stored_tensors.SLICE_BYTES", 1)  # slices as small as they get
    talk, before = CONVERSATIONS["picture"], torch.get_num_threads()
    alone = reference_of(tiny(name)).trace(talk, FORCED)
    ours = reference_of(tiny(name))
    ours.weights.threads = 3
    trace = ours.trace(talk, FORCED)
    assert trace.keys() == alone.keys()
    assert all(torch.equal(value, alone[stage]) for stage, value in trace.items())
    assert torch.get_num_threads() == before


def test_steps_are_compared_as_a_pass_comes_to_them(tiny: Folder) -> None:
    ours, talk = reference_of(tiny("tied")), CONVERSATIONS["picture"]
    seen: list[str] = []

    def beside(name: str) -> None:
        seen.append(name)
        assert torch.is_inference_mode_enabled()

    (trace,) = ours.traces(talk, FORCED, (0.0,), beside=beside)
    assert seen == [name for name in trace if name in seen]
    assert {"tower.embedding", "tower.merged", "embedding", "layer.0", "norm", "logits"} <= set(seen)


@pytest.mark.parametrize("name", ["tied", "half_with_biases", "vision_head_72"])
def test_one_step_at_a_time_is_transformers(name: str, tiny: Folder) -> None:
    folder = tiny(name)
    ours, theirs = reference_of(folder), TransformersReference(folder)
    trace = ours.trace(CONVERSATIONS["picture"], ())
    grid = torch.tensor(ours.prompts.build(CONVERSATIONS["picture"]).pictures[0].grid)
    text = {"positions": trace["positions"]}
    steps: dict[str, dict[str, Tensor]] = {
        "tower.embedding": {"patches": trace["patches"], "grid": grid},
        "embedding": {"tokens": trace["tokens"]},
        "norm": {"hidden": trace["layer.2"]},
        "logits": {"hidden": trace["norm"][-3:]},
        **{f"layer.{index}": {"hidden": trace["embedding"], **text} for index in range(3)},
        **{f"tower.layer.{index}": {"hidden": trace["tower.embedding"], "grid": grid} for index in range(4)},
        "tower.merged": {"hidden": trace["tower.layer.3"]},
        "tower.deepstack.0": {"hidden": trace["tower.layer.0"]},
    }
    for step, inputs in steps.items():
        mine, right = ours.layer(step, inputs), theirs.layer(step, inputs)
        assert mine.keys() >= right.keys(), step
        for part, value in right.items():
            agree(mine[part], value)


@pytest.mark.parametrize("name", DECODERS)
def test_text_models(name: str, tmp_path: Path) -> None:
    folder = build_decoder(name, tmp_path / "model")
    model = decoder_reference(folder, tmp_path / "wide")
    talk = single_turn("the quick brown fox jumps over the lazy dog, and then it sleeps for a while")
    ours = reference_of(folder).trace(talk, FORCED)
    ids = torch.cat((ours["tokens"], torch.tensor(FORCED)))
    with torch.inference_mode():
        theirs: Tensor = model(ids[None]).logits[0, len(ours["tokens"]) - 1 :]
    agree(logits(ours), theirs)


@pytest.mark.parametrize("name", QWEN3_5)
def test_qwen3_5(name: str, tiny_qwen3_5: Folder) -> None:
    folder = tiny_qwen3_5(name)
    model, reference = qwen3_5_reference(folder), reference_of(folder)
    kinds = ["text", *PICTURES] if QWEN3_5[name].vision else ["text"]
    for kind in kinds:
        ours = reference.trace(CONVERSATIONS[kind], FORCED)
        prompt = reference.prompts.build(CONVERSATIONS[kind])
        inputs: dict[str, Any] = {"input_ids": torch.cat((prompt.tokens, torch.tensor(FORCED)))[None]}
        if QWEN3_5[name].vision:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
        if prompt.pictures:
            inputs["pixel_values"] = torch.cat([each.patches for each in prompt.pictures])
            inputs["image_grid_thw"] = torch.tensor([each.grid for each in prompt.pictures])
        with torch.inference_mode():
            theirs: Tensor = model(**inputs).logits[0, len(prompt.tokens) - 1 :]
        agree(logits(ours), theirs)


def same_values(narrow: Path, wide: Path) -> None:
    """The narrow checkpoint's numbers are those that the wide one stores."""
    mine, right = (reference_of(each).trace(CONVERSATIONS["picture"], FORCED) for each in (narrow, wide))
    assert mine.keys() == right.keys()
    for stage, value in right.items():
        agree(mine[stage], value)


@pytest.mark.parametrize("name", CASES)
def test_compressed_tensors(name: str, tiny: Folder, tmp_path: Path) -> None:
    source, groups, choose, _ = CASES[name]
    same_values(*compress(tiny(source), tmp_path, groups, choose))


@pytest.mark.parametrize("name", FORMS)
def test_awq_and_gptq(name: str, tiny: Folder, tmp_path: Path) -> None:
    source, form, options = FORMS[name]
    same_values(*form(tiny(source), tmp_path, **options))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_0_borrows_from_the_next(bits: int, tmp_path: Path) -> None:
    """As GPTQModel writes version 1: rows without a negative weight have the zero point 0."""
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    weight[::3] = weight[::3].abs()
    codes = rounded(weight, bits, 16, symmetric=False)
    assert not codes.zero[0].any()
    tensors = {f"part.{name}": value.contiguous() for name, value in gptq_tensors(codes).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, {"quantization_config": gptq_section(bits=bits)})
    assert torch.equal(source.rows("part", 0, 64, (64, 32)), codes.widened())


@pytest.mark.parametrize("name", ["tied", "vision_head_72", "half_with_biases"])
def test_gguf_in_float32_is_what_it_was_made_of(name: str, tiny: Folder, tmp_path: Path) -> None:
    model, _ = as_gguf(tiny(name), tmp_path / "gguf")
    mine = FloatReference(open_checkpoint(model)).trace(CONVERSATIONS["picture"], FORCED)
    right = reference_of(tiny(name)).trace(CONVERSATIONS["picture"], FORCED)
    for stage in right:
        agree(mine[stage], right[stage])


@pytest.mark.parametrize("name", ["small", "large", "text"])
def test_gguf_of_qwen3_5(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    square = replace(QWEN3_5[name], more={**QWEN3_5[name].more, "linear_value_head_dim": 16})
    monkeypatch.setitem(QWEN3_5, name, square)  # llama.cpp has keys and values of one width
    folder = build_qwen3_5(name, tmp_path / "model")
    model, _ = as_gguf(folder, tmp_path / "gguf")
    talk = CONVERSATIONS["text" if name == "text" else "picture"]
    mine, right = (FloatReference(open_checkpoint(each)).trace(talk, FORCED) for each in (model, folder))
    agree(logits(mine), logits(right))


@pytest.mark.parametrize("name", ["llama_biased_stretched", "qwen2", "qwen3"])
def test_gguf_of_text_models(name: str, tmp_path: Path) -> None:
    folder = build_decoder(name, tmp_path / "model")
    model, _ = as_gguf(folder, tmp_path / "gguf")
    talk = single_turn("the quick brown fox")
    mine, right = (FloatReference(open_checkpoint(each)).trace(talk, FORCED) for each in (model, folder))
    agree(logits(mine), logits(right))
